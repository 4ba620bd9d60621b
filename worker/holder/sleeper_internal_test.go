package holder

import (
	"bytes"
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestTheSleeperIsAProgram(t *testing.T) {
	for arch, machine := range map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		b, err := sleeper(arch)
		if err != nil {
			t.Fatal(err)
		}
		f, err := elf.NewFile(bytes.NewReader(b))
		if err != nil {
			t.Fatalf("%s: %v", arch, err)
		}
		if f.Machine != machine || len(f.Progs) != 1 || f.Progs[0].Filesz != uint64(len(b)) || len(b) > 512 {
			t.Errorf("%s: %+v, %d bytes", arch, f.FileHeader, len(b))
		}
	}
	if _, err := sleeper("mips"); err == nil {
		t.Error("a sleeper for an architecture that has none")
	}
}

// ignoresChildren reports whether SIGCHLD is among the signals that a process ignores,
// beside those that it was started with.
func ignoresChildren(t *testing.T, status string) bool {
	t.Helper()
	_, rest, _ := strings.Cut(status, "SigIgn:\t")
	mask, err := strconv.ParseUint(rest[:16], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	return mask>>(uint(syscall.SIGCHLD)-1)&1 == 1
}

// It sleeps, whatever signal comes, and leaves no zombie of a child that it did not start.
func TestTheSleeperSleeps(t *testing.T) {
	b, err := sleeper(runtime.GOARCH)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "sleeper")
	if err := os.WriteFile(path, b, 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	for end := time.Now().Add(time.Minute); ; {
		raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "status"))
		if err != nil {
			t.Fatal(err)
		}
		status := string(raw)
		if time.Now().After(end) {
			t.Fatalf("it does not sleep as it is to: %s", status)
		}
		if strings.Contains(status, "State:\tZ") {
			t.Fatal("it ended")
		}
		if strings.Contains(status, "State:\tS") && ignoresChildren(t, status) && strings.Contains(status, "SigBlk:\tfffffffffffbfeff") {
			break
		}
		time.Sleep(time.Millisecond)
	}
	for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGTERM, syscall.SIGUSR1} {
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(50 * time.Millisecond)
	if err := cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Error(err)
	}
	raw, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "status"))
	if err != nil || strings.Contains(string(raw), "State:\tZ") {
		t.Errorf("a signal ended it: %v", err)
	}
}
