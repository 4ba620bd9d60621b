package main_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/internal/need"
	"quarry/nbd/attach"
)

// within is a context for one call.
func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// startStalled starts a shim whose mount waits for the reader.
func (r *rig) startStalled() {
	r.t.Helper()
	if err := os.WriteFile(r.stall, nil, 0o600); err != nil {
		r.t.Fatal(err)
	}
	r.shim = r.shimCommand()
	r.shim.Stderr = &r.stderr
	if err := r.shim.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.waitFor("the mount to reach the reader", func() bool {
		_, err := os.Stat(r.stall + ".reached")
		return err == nil
	})
}

// wantEnd ends the folder's shim and looks for what it left.
func (r *rig) wantEnd() {
	r.t.Helper()
	if err := attach.End(within(r.t, patience), r.dir); err != nil {
		r.t.Errorf("End: %v", err)
	}
	if _, err := attach.ProcessStart(r.shim.Process.Pid); err == nil {
		r.t.Error("the shim runs after End")
	}
	r.waitShim()
	if left := r.leftovers(); left != "" {
		r.t.Errorf("left after End:\n%s", left)
	}
	if err := os.RemoveAll(r.dir); err != nil {
		r.t.Error(err)
	}
}

func TestEndDoesNotNeedTheState(t *testing.T) {
	for name, state := range map[string]string{"damaged": "{", "missing": ""} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.startShim()
			path := filepath.Join(r.dir, "shim.json")
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
			if state != "" {
				if err := os.WriteFile(path, []byte(state), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			r.wantEnd()
		})
	}
}

func TestEndOfAShimThatStarts(t *testing.T) {
	r := newRig(t)
	r.startStalled()
	r.wantEnd()
}

func TestEndOfAKilledShim(t *testing.T) {
	r := newRig(t)
	r.startShim()
	r.shim.Process.Kill()
	r.wantEnd()
}

// TestSweepLeavesAUsersMountToItsUser kills a shim whose image is mounted in a
// second place.
func TestSweepLeavesAUsersMountToItsUser(t *testing.T) {
	r := newRig(t)
	r.startShim()
	state, err := attach.ReadState(r.dir)
	if err != nil {
		t.Fatal(err)
	}
	user := t.TempDir()
	if err := syscall.Mount(r.path(""), user, "", syscall.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	defer syscall.Unmount(user, syscall.MNT_DETACH)
	busy, err := os.Open(r.path("d0"))
	if err != nil {
		t.Fatal(err)
	}
	defer busy.Close()
	r.shim.Process.Kill()
	r.shim.Wait()
	// It does not wait for the user, who stays.
	if err := attach.Sweep(within(t, patience), r.dir); err != nil {
		t.Errorf("Sweep: %v", err)
	}
	if left := r.leftovers(); left != "" {
		t.Errorf("left after Sweep:\n%s", left)
	}
	if !attach.OwnsMount(user) {
		t.Error("the user's mount is not known for a dead shim's")
	}
	if _, err := os.ReadFile(filepath.Join(user, "d4/f99")); !errors.Is(err, syscall.EIO) {
		t.Errorf("read of the user's mount: got %v, want EIO", err)
	}
	r.startShim()
	r.compareTree()
	if now, err := attach.ReadState(r.dir); err != nil || now.Device == state.Device {
		t.Errorf("new attachment is on %s (%v), the old one on %s", now.Device, err, state.Device)
	}
	busy.Close()
	if err := syscall.Unmount(user, 0); err != nil {
		t.Errorf("unmount: %v", err)
	}
	backing := filepath.Join("/sys/block", filepath.Base(state.Device), "loop/backing_file")
	r.waitFor("the loop device to go free", func() bool {
		_, err := os.Stat(backing)
		return errors.Is(err, os.ErrNotExist)
	})
	r.compareTree()
}

func TestShimWithoutItsFolderEnds(t *testing.T) {
	r := newRig(t)
	if err := os.Remove(r.dir); err != nil {
		t.Fatal(err)
	}
	if out, err := r.shimCommand().CombinedOutput(); err == nil || !strings.Contains(string(out), "no such file") {
		t.Errorf("ended with %v and\n%s", err, out)
	}
	r.wantNoFolder()
}

func (r *rig) wantNoFolder() {
	r.t.Helper()
	if left := r.leftovers(); left != "" {
		r.t.Errorf("left:\n%s", left)
	}
	if entries, err := os.ReadDir(r.dir); !errors.Is(err, os.ErrNotExist) {
		r.t.Errorf("folder: got %v (%v), want none", entries, err)
	}
}

func TestShimWhoseFolderIsRemovedWhileItStartsEnds(t *testing.T) {
	r := newRig(t)
	r.startStalled()
	os.RemoveAll(r.dir) // gets as far as the mounts
	r.unstall()
	if err := r.waitShim(); err == nil {
		t.Error("shim ended without an error")
	}
	r.wantNoFolder()
}

func TestShimWhoseFolderIsRemovedWhileItServesEnds(t *testing.T) {
	r := newRig(t)
	r.startShim()
	os.RemoveAll(r.dir)
	if err := r.waitShim(); err != nil {
		t.Errorf("shim ended with %v", err)
	}
	r.wantNoFolder()
}

// TestShimThatLostItsFolderLeavesItToTheNext removes the lock and attaches anew
// before the first shim can see it.
func TestShimThatLostItsFolderLeavesItToTheNext(t *testing.T) {
	r := newRig(t)
	r.startShim()
	first := r.shim
	stop(t, first.Process.Pid)
	if err := os.Remove(filepath.Join(r.dir, "lock")); err != nil {
		t.Fatal(err)
	}
	second := newestShim(r)
	first.Process.Signal(syscall.SIGCONT)
	if err := first.Wait(); err == nil {
		t.Error("the first shim ended without an error")
	}
	if state, err := attach.ReadState(r.dir); err != nil || state.PID != second || !state.Alive() {
		t.Errorf("state is %+v, %v; want the second shim's", state, err)
	}
	r.compareTree()
}

// stop stops a child with all its threads: the signal alone only asks for it.
func stop(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus
	if got, err := syscall.Wait4(pid, &status, syscall.WUNTRACED, nil); err != nil || got != pid || !status.Stopped() {
		t.Fatalf("wait for %d to stop: %d, %v, %#x", pid, got, err, status)
	}
}

func newestShim(r *rig) int {
	r.t.Helper()
	r.shim = r.shimCommand()
	expectLine(r.t, r.shim, "ready")
	return r.shim.Process.Pid
}

// TestStateOfAShimInAnotherPIDNamespace is of a shim whose number means
// nothing, or another process, here.
func TestStateOfAShimInAnotherPIDNamespace(t *testing.T) {
	r := newRig(t)
	shim := r.shimCommand()
	args := append([]string{"--pid", "--fork", "--mount-proc", "--kill-child", "--propagation", "unchanged"}, shim.Args...)
	r.shim = r.command(need.Tool(t, "unshare"), args...)
	r.shim.Stderr = &r.stderr
	expectLine(t, r.shim, "ready")
	state, err := attach.ReadState(r.dir)
	if err != nil {
		t.Fatal(err)
	}
	if state.PID != 1 || !state.Alive() {
		t.Errorf("state is %+v, alive %v; want PID 1, alive", state, state.Alive())
	}
	if err := attach.End(within(t, patience), r.dir); !errors.Is(err, attach.ErrInUse) {
		t.Errorf("End: got %v, want ErrInUse", err)
	}
	if _, err := attach.ProcessStart(r.shim.Process.Pid); err != nil {
		t.Error("the shim was ended")
	}
	r.shim.Process.Kill()
	r.shim.Wait()
	r.waitFor("the state to be dead", func() bool { return !state.Alive() })
}
