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

	"quarry/nbd/attach"
)

func TestMountedImageReadsAsMade(t *testing.T) {
	r := newRig(t)
	r.startShim()
	r.compareTree()
	state, err := attach.ReadState(r.dir)
	if err != nil {
		t.Fatal(err)
	}
	if state.PID != r.shim.Process.Pid || !state.Alive() || state.Phase != attach.PhaseMounted || state.Export != "image" ||
		state.Root != filepath.Join(r.dir, "root") || !strings.HasPrefix(state.Device, "/dev/loop") {
		t.Errorf("state is %+v", state)
	}
}

func TestSIGTERMLeavesNothing(t *testing.T) {
	r := newRig(t)
	r.startShim()
	if err := r.compareFile("d0/f0"); err != nil {
		t.Error(err)
	}
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGHUP, syscall.SIGPIPE} {
		r.shim.Process.Signal(sig)
	}
	time.Sleep(50 * time.Millisecond)
	if err := r.compareFile("d1/f1"); err != nil {
		t.Errorf("after signals that are ignored: %v", err)
	}
	r.shim.Process.Signal(syscall.SIGTERM)
	if err := r.waitShim(); err != nil {
		t.Errorf("shim ended with %v", err)
	}
	if left := r.leftovers(); left != "" {
		t.Errorf("left after SIGTERM:\n%s", left)
	}
	entries, err := os.ReadDir(r.dir)
	if err != nil || len(entries) != 1 || entries[0].Name() != "lock" {
		t.Errorf("folder holds %v (%v), want the lock alone", entries, err)
	}
}

func TestUmountEndsTheShim(t *testing.T) {
	r := newRig(t)
	r.startShim()
	if err := syscall.Unmount(r.path(""), 0); err != nil {
		t.Fatal(err)
	}
	if err := r.waitShim(); err != nil {
		t.Errorf("shim ended with %v", err)
	}
	if left := r.leftovers(); left != "" {
		t.Errorf("left after umount:\n%s", left)
	}
}

func TestKilledShimMeansEIOAndSweepCleans(t *testing.T) {
	r := newRig(t)
	r.startShim()
	const readers = 10
	results := r.readDuring(readers)
	r.shim.Process.Kill()
	r.shim.Wait()
	r.wantEIO(results, readers)
	if err := r.compareFile("d4/f98"); !errors.Is(err, syscall.EIO) {
		t.Errorf("read without a shim: got %v, want EIO", err)
	}
	r.unstall()
	for range 2 { // it is idempotent
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := attach.Sweep(ctx, r.dir); err != nil {
			t.Errorf("Sweep: %v", err)
		}
	}
	if left := r.leftovers(); left != "" {
		t.Errorf("left after Sweep:\n%s", left)
	}
	r.startShim() // the folder can be used again
	r.compareTree()
}

// TestKilledWhileItStarts kills the shim with its mount waiting for the reader:
// the thread in mount(2) must not keep the dead process, and itself, waiting.
func TestKilledWhileItStarts(t *testing.T) {
	r := newRig(t)
	r.startStalled()
	r.shim.Process.Kill()
	ended := make(chan struct{})
	go func() { // ends with the process
		r.shim.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-time.After(patience):
		t.Fatal("the killed shim does not end")
	}
}

// TestSIGTERMWhileItStarts ends a start that waits for the reader.
func TestSIGTERMWhileItStarts(t *testing.T) {
	r := newRig(t)
	r.startStalled()
	r.shim.Process.Signal(syscall.SIGTERM)
	if err := r.waitShim(); err == nil || r.shim.ProcessState.ExitCode() != 1 {
		t.Errorf("shim ended with %v, want exit status 1", err)
	}
	if left := r.leftovers(); left != "" {
		t.Errorf("left:\n%s", left)
	}
}

func TestRefusals(t *testing.T) {
	r := newRig(t)
	for name, tc := range map[string]struct {
		args []string
		code int
		want string
	}{
		"no flags at all":       {nil, 2, "needed"},
		"a size that differs":   {[]string{"--size", "4096"}, 1, "this mount is of"},
		"an unknown export":     {[]string{"--export", "other"}, 1, "unknown export"},
		"a socket that is dead": {[]string{"--socket", r.socket + "x"}, attach.ExitNoReader, "dial"},
		"a negative read-ahead": {[]string{"--read-ahead", "-1"}, 2, "negative"},
	} {
		t.Run(name, func(t *testing.T) {
			cmd := r.shimCommand(tc.args...)
			if tc.args == nil {
				cmd.Args = cmd.Args[:1]
			}
			out, err := cmd.CombinedOutput()
			if err == nil || cmd.ProcessState.ExitCode() != tc.code || !strings.Contains(string(out), tc.want) {
				t.Errorf("ended with %v, want exit status %d and %q in\n%s", err, tc.code, tc.want, out)
			}
		})
	}
}

func TestASecondShimIsRefused(t *testing.T) {
	r := newRig(t)
	r.startShim()
	out, err := r.shimCommand().CombinedOutput()
	if err == nil || !strings.Contains(string(out), "in use") {
		t.Errorf("ended with %v and\n%s", err, out)
	}
	r.compareTree()
}
