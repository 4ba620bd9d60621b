package worker

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/internal/proc"
	"quarry/nbd/attach"
	"quarry/worker/folder"
)

func testWorker(t *testing.T) *Worker {
	t.Helper()
	base := need.ShortDir(t)
	// The folder's own name must not be taken for a pattern.
	d, err := folder.Open(filepath.Join(base, "w*[g]"))
	if err != nil {
		t.Fatal(err)
	}
	return &Worker{Dir: d}
}

func TestASandboxIsNotSweptWhileItIsMadeOrRuns(t *testing.T) {
	w := testWorker(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 10 {
				b, err := w.create(t.Context())
				if err != nil {
					t.Error(err)
					return
				}
				if err := w.Sweep(t.Context()); err != nil {
					t.Error(err)
				}
				if _, err := os.Stat(filepath.Join(b.dir, "upper")); err != nil {
					t.Errorf("swept while it was owned: %v", err)
				}
				if err := b.remove(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if left, _ := os.ReadDir(w.Dir.Sandboxes()); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestSweepEndsWhatADeadOwnerStarted(t *testing.T) {
	w := testWorker(t)
	b, err := w.create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	orphan := exec.Command("/bin/sh", "-c", "read -r wait", b.dir+"/bundle")
	other := exec.Command("/bin/sh", "-c", "read -r wait", filepath.Dir(b.dir)+"/another/bundle")
	for _, cmd := range []*exec.Cmd{orphan, other} {
		in, err := cmd.StdinPipe() // with its end the process ends, whatever the test does
		if err != nil {
			t.Fatal(err)
		}
		defer in.Close()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan error, 1)
	go func() { ended <- orphan.Wait() }() // ends with the orphan
	defer func() {
		other.Process.Kill()
		other.Wait()
	}()
	b.owner.Unlock() // as its owner's death does
	if err := w.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
	case <-time.After(patience):
		orphan.Process.Kill()
		t.Error("a process of the sandbox lives on")
	}
	if _, err := os.Stat(b.dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is left: %v", err)
	}
	if _, err := attach.ProcessStart(other.Process.Pid); err != nil { // a zombie counts as ended
		t.Errorf("another sandbox's process was ended: %v", err)
	}
}

// A killed process may end after the sweep of the one that shares its mount.
func TestASandboxWhoseOwnerDiesLateDoesNotKeepTheMount(t *testing.T) {
	need.Root(t)
	w := testWorker(t)
	b, err := w.create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	dir, gofer := startGofer(t, w, b)
	time.AfterFunc(50*time.Millisecond, b.owner.Unlock) // as its owner's death does
	if err := w.stopIfUnused(t.Context(), dir, true); err != nil {
		t.Error(err)
	}
	gofer.leave()
	if gofer.cmd.ProcessState.Exited() {
		t.Errorf("the gofer was not killed: %v", gofer.cmd.ProcessState)
	}
	for _, d := range []string{dir, b.dir} {
		if _, err := os.Stat(d); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s is left: %v", d, err)
		}
	}
}

// TestAWaitForUsersEndsWithItsContext: the caller does not want the mount gone so
// badly.
func TestAWaitForUsersEndsWithItsContext(t *testing.T) {
	need.Root(t)
	w := testWorker(t)
	b, err := w.create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer b.remove()
	dir, _ := startGofer(t, w, b)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := w.stopIfUnused(ctx, dir, true); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v, want the end of the context", err)
	}
}

// gofer is a process that a sandbox's mount is in use by.
type gofer struct {
	cmd   *exec.Cmd
	stdin io.Closer
}

// leave has the gofer end, if it has not, and waits for that.
func (g gofer) leave() {
	g.stdin.Close()
	g.cmd.Wait()
}

// startGofer mounts something as an image, and starts a gofer of the sandbox that
// has it mounted elsewhere, in its own mount namespace.
func startGofer(t *testing.T, w *Worker, b *sandbox) (string, gofer) {
	t.Helper()
	dir := filepath.Join(w.Dir.Mounts(), "x")
	root, guest := filepath.Join(dir, "root"), filepath.Join(b.dir, "guest")
	for _, d := range []string{root, guest} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount("image", root, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(root, unix.MNT_DETACH) })
	cmd := exec.Command("/bin/sh")
	cmd.Args = []string{"runsc-gofer", "-c", `mount --bind "$0" "$1" && echo up && read wait`, root, guest}
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	stdin, err1 := cmd.StdinPipe()
	stdout, err2 := cmd.StdoutPipe()
	if err := errors.Join(err1, err2, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	g := gofer{cmd, stdin}
	t.Cleanup(g.leave)
	if line, err := bufio.NewReader(stdout).ReadString('\n'); line != "up\n" {
		t.Fatalf("the gofer says %q, error %v", line, err)
	}
	return dir, g
}

// A sweep may open the owner's file of a sandbox that its owner then removes.
func TestASandboxThatIsGoneIsRemoved(t *testing.T) {
	w := testWorker(t)
	b, err := w.create(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(b.dir); err != nil {
		t.Fatal(err)
	}
	if err := b.remove(); err != nil {
		t.Error(err)
	}
}

func TestAMountIsInUseWhileAProcessHoldsAReference(t *testing.T) {
	w := testWorker(t)
	dir := filepath.Join(w.Dir.Mounts(), "x")
	if err := os.MkdirAll(filepath.Join(dir, "refs"), 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "refs", "r")
	l, err := proc.TryLock(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := inUse(dir); got != usedHere || err != nil {
		t.Errorf("with a live reference: %v, %v", got, err)
	}
	l.Unlock()
	if got, err := inUse(dir); got != unused || err != nil {
		t.Errorf("with a dead reference: %v, %v", got, err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the dead reference is left: %v", err)
	}
}

func TestAnotherMountOfTheDeviceIsAUse(t *testing.T) {
	const table = "30 24 0:27 / / rw - tmpfs tmpfs rw\n" +
		"31 30 7:3 / /w/mounts/x/root ro,nosuid,nodev - erofs /dev/loop3 ro\n"
	dev := unix.Mkdev(7, 3)
	beside := func(table string, dev uint64, root string) bool {
		got, err := mountedBeside(strings.NewReader(table), dev, root)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	if beside(table, dev, "/w/mounts/x/root") {
		t.Error("the mount itself, or a namespace's copy of it, counts as a use")
	}
	for _, point := range []string{"/mnt", `/mnt/a\040b`} {
		if !beside(table+"32 30 7:3 / "+point+" ro - erofs /dev/loop3 ro\n", dev, "/w/mounts/x/root") {
			t.Errorf("a bind mount on %s does not count", point)
		}
	}
	if beside(table, unix.Mkdev(7, 30), "/w") {
		t.Error("another device counts")
	}
}
