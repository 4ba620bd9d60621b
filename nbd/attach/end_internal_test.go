package attach

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
)

// holdLock starts a shell that holds the folder's lock and is named in it, and
// ignores SIGTERM when stubborn.
func holdLock(t *testing.T, dir folder, stubborn bool) *exec.Cmd {
	t.Helper()
	need.Root(t)
	f, err := lockFolder(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	script := "echo set; read -r line"
	if stubborn {
		script = "trap '' TERM; " + script
	}
	cmd := startProcess(t, script, f)
	start, err := ProcessStart(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteString(process{cmd.Process.Pid, start}.String()); err != nil {
		t.Fatal(err)
	}
	f.Close()
	return cmd
}

// startProcess starts a shell and waits for its first output.
func startProcess(t *testing.T, script string, files ...*os.File) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sh", "-c", script)
	cmd.ExtraFiles = files
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	if _, err := out.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	return cmd
}

func runs(cmd *exec.Cmd) bool {
	_, err := ProcessStart(cmd.Process.Pid)
	return err == nil
}

func TestEndEndsTheHolderOfTheLock(t *testing.T) {
	dir := folder(t.TempDir())
	cmd := holdLock(t, dir, false)
	if err := Sweep(t.Context(), string(dir)); !errors.Is(err, ErrInUse) {
		t.Errorf("Sweep: got %v, want ErrInUse", err)
	}
	for range 2 {
		if err := End(t.Context(), string(dir)); err != nil {
			t.Error(err)
		}
	}
	if runs(cmd) || dir.locked() {
		t.Error("the holder runs")
	}
}

func TestEndKillsAHolderThatDoesNotHeedSIGTERM(t *testing.T) {
	dir := folder(t.TempDir())
	cmd := holdLock(t, dir, true)
	p, ok := dir.holder()
	if !ok {
		t.Fatal("no holder")
	}
	if err := p.end(t.Context(), dir.lock(), 200*time.Millisecond); err != nil {
		t.Error(err)
	}
	if runs(cmd) {
		t.Error("the holder runs")
	}
}

func TestEndSignalsNobodyButTheHolder(t *testing.T) {
	need.Root(t)
	dir := folder(t.TempDir())
	cmd := startProcess(t, "echo set; read -r line")
	start, err := ProcessStart(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	for name, record := range map[string]string{
		"no record":                "",
		"a damaged record":         "1x 2\n",
		"a record cut short":       strings.TrimSuffix(process{cmd.Process.Pid, start}.String(), "\n"),
		"a record of a bystander":  process{cmd.Process.Pid, start}.String(),
		"a record of init":         "1 0\n",
		"a number that is another": process{cmd.Process.Pid, start + 1}.String(),
	} {
		t.Run(name, func(t *testing.T) {
			lock, err := lockFolder(t.Context(), dir)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := lock.WriteString(record); err != nil {
				t.Fatal(err)
			}
			if err := End(t.Context(), string(dir)); !errors.Is(err, ErrInUse) {
				t.Errorf("End of a held folder: got %v, want ErrInUse", err)
			}
			lock.Close()
			if err := End(t.Context(), string(dir)); err != nil {
				t.Errorf("End of a free folder: %v", err)
			}
			if !runs(cmd) {
				t.Error("a bystander was ended")
			}
		})
	}
}

func TestEndOfThisProcessIsRefused(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	l, err := TakeLock(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Release()
	if err := End(t.Context(), dir); !errors.Is(err, ErrInUse) {
		t.Errorf("got %v, want ErrInUse", err)
	}
}

func TestEndOfAFolderThatIsNotThere(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "none")
	if err := End(t.Context(), dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("folder: got %v, want none", err)
	}
}

func TestTakeLockWaitsForALookAndForASweep(t *testing.T) {
	for name, how := range map[string]int{"look": unix.LOCK_SH, "sweep": unix.LOCK_EX} {
		t.Run(name, func(t *testing.T) {
			dir := folder(t.TempDir())
			f, err := os.OpenFile(dir.lock(), os.O_RDWR|os.O_CREATE, 0o600)
			if err != nil {
				t.Fatal(err)
			}
			if err := unix.Flock(int(f.Fd()), how); err != nil {
				t.Fatal(err)
			}
			time.AfterFunc(100*time.Millisecond, func() { f.Close() })
			l, err := TakeLock(t.Context(), string(dir))
			if err != nil {
				t.Fatal(err)
			}
			l.Release()
		})
	}
}

func TestAliveIsWhoHoldsTheLock(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	start, err := ProcessStart(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	alive := func(pid int) bool {
		t.Helper()
		if err := (State{PID: pid, Start: start, Phase: PhaseMounted}).Write(dir); err != nil {
			t.Fatal(err)
		}
		s, err := ReadState(dir)
		if err != nil {
			t.Fatal(err)
		}
		return s.Alive()
	}
	if alive(os.Getpid()) {
		t.Error("a process without the lock is alive")
	}
	l, err := TakeLock(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	if !alive(os.Getpid()) {
		t.Error("the lock's holder is not alive")
	}
	if alive(1) {
		t.Error("a state of a process that is not the holder is alive")
	}
	l.Release()
	if alive(os.Getpid()) {
		t.Error("alive after the lock was released")
	}
}
