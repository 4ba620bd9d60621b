// Package vm boots Debian kernels in QEMU, without hardware support, to show what
// this machine's own kernel cannot: that images mount, and the worker works, on
// the kernels people have. A guest is 10 to 20 times slower than its host: it is
// for truth, not for speed.
package vm

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// Tools are the programs that the package calls, by their Debian packages:
// qemu-system-x86, busybox-static, kmod, cpio, xz-utils, zstd.
var Tools = []string{"qemu-system-x86_64", "busybox", "depmod", "modprobe", "cpio", "xz", "zstd", "apt-get", "dpkg"}

// Machine is a guest that runs one script and ends.
type Machine struct {
	Kernel *Kernel
	// Share is a folder of the host, which the guest has as /host, to write too.
	Share string
	// Programs are files of the host that the guest has in /bin from the start. To copy
	// them from a shared folder takes Linux 6.12 minutes, as it reads that in small steps.
	Programs []string
	// Script is a program for busybox's sh. It runs as root in /host, on a tmpfs
	// with proc, sysfs, devtmpfs and cgroup v2, loopback up and no other network.
	Script string
	// Modules are loaded besides those of every guest; each is a name and
	// parameters: "nbd nbds_max=16".
	Modules []string
	// Loadable are modules that the script may load, from /modules/NAME.ko; what they
	// depend on is among those that are loaded.
	Loadable []string
	// MemoryMiB is the guest's memory, the tmpfs included; 0 means 2048.
	MemoryMiB int
	// Processors is how many the guest has; 0 means 2. Where guests have more of them
	// together than the host, each spins while a processor of its own that holds a lock
	// does not run.
	Processors int
	// Console gets what the guest prints while it runs. nil discards it.
	Console io.Writer
}

// Result is how a guest ended.
type Result struct {
	Status int           // the script's exit status
	Tail   string        // the end of what was printed
	Took   time.Duration // boot to power-off
}

const (
	defaultMemoryMiB  = 2048
	defaultProcessors = 2
	// boots is how often a guest is booted whose kernel ends before the script begins: now
	// and then a processor that is emulated stumbles over code that another one patches,
	// as kernels do while they boot ("int3").
	boots = 3
	// tailBytes is what is kept of the console: 200 lines of 80.
	tailBytes = 16 << 10
)

// NoStatusError says that a guest ended, or was ended, before its script did.
type NoStatusError struct {
	Err  error  // why: of QEMU, or the context's cause; nil when the guest ended by itself, as after a panic
	Tail string // the end of what was printed
}

func (e *NoStatusError) Error() string {
	why := "the guest ended before its script (a kernel panic?)"
	if e.Err != nil {
		why = "the guest was ended before its script: " + e.Err.Error()
	}
	return why + "; its console ends with:\n" + e.Tail
}

// Unwrap returns what ended the guest.
func (e *NoStatusError) Unwrap() error { return e.Err }

// Run boots the machine and waits until it is off. It ends the guest when ctx
// ends. Errors: *NoStatusError.
func (m Machine) Run(ctx context.Context) (Result, error) {
	work, err := os.MkdirTemp("", "vm")
	if err != nil {
		return Result{}, err
	}
	defer os.RemoveAll(work)
	// The folder of script and status is the guest's /vm.
	own := filepath.Join(work, "vm")
	if err := os.Mkdir(own, 0o755); err != nil {
		return Result{}, err
	}
	if err := os.WriteFile(filepath.Join(own, "script"), []byte(m.Script), 0o644); err != nil {
		return Result{}, err
	}
	initrd, err := m.Kernel.writeInitrd(ctx, work, m.Programs, append(append([]string(nil), baseModules...), m.Modules...), m.Loadable)
	if err != nil {
		return Result{}, err
	}
	tail := &tailWriter{max: tailBytes, next: m.Console}
	started := time.Now()
	for range boots {
		err = m.boot(ctx, initrd, own, tail)
		if _, serr := os.Stat(filepath.Join(own, "begun")); serr == nil || err != nil {
			break
		}
	}
	r := Result{Tail: tail.String(), Took: time.Since(started)}
	raw, statusErr := os.ReadFile(filepath.Join(own, "status"))
	if errors.Is(statusErr, fs.ErrNotExist) || err != nil {
		return r, &NoStatusError{Err: err, Tail: r.Tail}
	}
	if statusErr != nil {
		return r, statusErr
	}
	r.Status, err = strconv.Atoi(strings.TrimSpace(string(raw)))
	return r, err
}

// boot runs QEMU until the guest is off.
func (m Machine) boot(ctx context.Context, initrd, own string, console io.Writer) error {
	memory := m.MemoryMiB
	if memory == 0 {
		memory = defaultMemoryMiB
	}
	processors := m.Processors
	if processors == 0 {
		processors = defaultProcessors
	}
	// QEMU dies with the thread that started it, so that thread must stay.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd := exec.CommandContext(ctx, "qemu-system-x86_64",
		"-accel", "tcg,thread=multi", "-cpu", "max", "-smp", strconv.Itoa(processors), "-m", strconv.Itoa(memory),
		"-kernel", filepath.Join(m.Kernel.base, unpackedImage), "-initrd", initrd,
		// A panic or an oops ends the guest at once. The timer check panics when the
		// host is too busy to emulate the timer in time. The time stamp counters are the
		// host's, which are in step; a kernel that does not trust them asks an emulated
		// device for the time, a hundred times as long each, and what runsc does takes
		// several times as long.
		"-append", "console=ttyS0 quiet no_timer_check tsc=reliable panic=-1 oops=panic cgroup_no_v1=all", "-no-reboot",
		"-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-nic", "none",
		"-virtfs", share(own, "vm"), "-virtfs", share(m.Share, "host"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = console, &problems
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return fmt.Errorf("qemu: %w: %s", err, problems.String())
	}
	return nil
}

// share is QEMU's word for a folder of the host under a name; the guest's root
// acts as the host's.
func share(dir, tag string) string {
	return "local,path=" + strings.ReplaceAll(dir, ",", ",,") + ",mount_tag=" + tag + ",security_model=none"
}

// tailWriter keeps the last bytes of what passes through it.
type tailWriter struct {
	max  int
	last []byte
	next io.Writer // may be nil
}

func (w *tailWriter) Write(p []byte) (int, error) {
	w.last = append(w.last, p...)
	if extra := len(w.last) - w.max; extra > 0 {
		w.last = append(w.last[:0], w.last[extra:]...)
	}
	if w.next == nil {
		return len(p), nil
	}
	return w.next.Write(p)
}

// String returns the bytes kept, without the serial line's carriage returns.
func (w *tailWriter) String() string { return strings.ReplaceAll(string(w.last), "\r", "") }
