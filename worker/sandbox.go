package worker

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
	"quarry/worker/folder"
	"quarry/worker/timeline"
)

type sandbox struct {
	w     *Worker
	dir   string
	id    string
	owner *proc.Lock // held while this process runs the sandbox
	pid   int        // of the Sentry, once started
	gofer int
}

// create makes a sandbox folder that this process owns.
func (w *Worker) create(ctx context.Context) (*sandbox, error) {
	l, err := proc.TakeLock(ctx, w.Dir.SandboxLock())
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	id := strings.ToLower(rand.Text())
	b := &sandbox{w: w, id: id, dir: filepath.Join(w.Dir.Sandboxes(), id)}
	for _, sub := range []string{"", "runsc", "upper"} {
		if err := os.Mkdir(filepath.Join(b.dir, sub), 0o700); err != nil {
			return nil, err
		}
	}
	if b.owner, err = proc.TryLock(filepath.Join(b.dir, "owner")); err != nil {
		return nil, errors.Join(err, os.RemoveAll(b.dir))
	}
	return b, nil
}

// endTimeout bounds the end of processes that were killed.
const endTimeout = 10 * time.Second

// remove ends whatever runs of the sandbox and deletes its folder. A killed
// owner may have left runsc on its way to start a sandbox that no state file
// tells of yet, so its processes are found by the folder in their arguments:
// the sandbox's id is random and in no other's.
func (b *sandbox) remove() error {
	defer b.owner.Unlock()
	deadline := time.Now().Add(endTimeout)
	for {
		pids, err := b.processes()
		if err != nil {
			return err
		}
		if len(pids) == 0 {
			return b.removeFolder()
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("sandbox %s: processes %v do not end", b.id, pids)
		}
		for _, pid := range pids {
			syscall.Kill(pid, syscall.SIGKILL)
		}
		time.Sleep(poll)
	}
}

// removeFolder removes the lock's file last: until then a sweep sees an owner. A
// sweep that has opened that file before it was removed gets its lock after, and
// finds no folder.
func (b *sandbox) removeFolder() error {
	entries, err := os.ReadDir(b.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() == "owner" {
			continue
		}
		if err := os.RemoveAll(filepath.Join(b.dir, e.Name())); err != nil {
			return err
		}
	}
	return os.RemoveAll(b.dir)
}

// processes lists those with the sandbox's folder in their arguments.
func (b *sandbox) processes() ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	want := []byte(b.dir + "/")
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		// A zombie has no arguments: it is not found, and needs no killing.
		if args, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline")); err == nil && bytes.Contains(args, want) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

func readPID(path string) (int, error) {
	raw, err := folder.ReadBounded(path, folder.MaxJSON)
	if err != nil {
		return 0, err
	}
	return strconv.Atoi(strings.TrimSpace(string(raw)))
}

// goferPID reads the number of the sandbox's gofer from runsc's state.
func (b *sandbox) goferPID() (int, error) {
	dir := filepath.Join(b.dir, "runsc")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), ".state") {
			continue
		}
		var state struct {
			GoferPID int `json:"goferPid"`
		}
		err := folder.ReadJSON(filepath.Join(dir, e.Name()), &state)
		return state.GoferPID, err
	}
	return 0, fmt.Errorf("runsc left no state in %s", dir)
}

// runsc returns a call of runsc with this sandbox's own state folder.
func (b *sandbox) runsc(ctx context.Context, args ...string) *exec.Cmd {
	global := []string{
		"--root", filepath.Join(b.dir, "runsc"), "--log", filepath.Join(b.dir, "runsc.log"), "--log-format", "json",
		"--platform", "systrap", "--network", "none", "--ignore-cgroups",
		"--host-uds", "none", "--allow-suid",
		"--overlay2", "root:dir=" + filepath.Join(b.dir, "upper"),
	}
	return exec.CommandContext(ctx, b.w.Runsc, append(global, args...)...)
}

// run starts the command, copies its output and waits for it.
func (b *sandbox) run(ctx context.Context, c Command) (int, error) {
	streams, err := newStdio(b.dir, c)
	if err != nil {
		return 0, err
	}
	defer streams.close()
	started := timeline.Begin(ctx, timeline.Runsc)
	err = b.start(ctx, streams)
	started()
	if err != nil {
		return 0, orCause(ctx, err)
	}
	defer timeline.Begin(ctx, timeline.Command)()
	if c.Started != nil {
		c.Started()
	}
	if c.ended != nil {
		defer c.ended()
	}
	copied := make(chan error, 1)
	go func() { copied <- streams.copyOutput() }() // waited for below, but when nobody reads our output
	exited := make(chan exit, 1)
	go func() { exited <- b.wait() }() // ends with the Sentry
	e, killed := b.supervise(ctx, exited, c.Signals)
	if killed == nil {
		return e.status, errors.Join(e.err, <-copied)
	}
	select {
	case <-copied:
	case <-time.After(outputGrace):
	}
	return e.status, killed
}

// outputGrace is how long the output of a killed command is still passed on.
const outputGrace = time.Second

// exit is how a sandbox ended.
type exit struct {
	status int
	err    error
}

// start creates and starts the sandbox; what runsc itself prints on a failed
// start becomes the error.
func (b *sandbox) start(ctx context.Context, streams *stdio) error {
	// The Sentry outlives runsc run; it becomes a child of this process.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become subreaper: %w", err)
	}
	pidFile := filepath.Join(b.dir, "pid")
	args := []string{"run", "--detach", "--pid-file", pidFile, "--bundle", b.dir}
	args = append(args, streams.runArgs()...)
	cmd := b.runsc(ctx, append(args, b.id)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = streams.guestFiles()
	streams.connect()
	err := cmd.Run()
	streams.closeGuest()
	if err == nil {
		if b.pid, err = readPID(pidFile); err != nil {
			return err
		}
		if b.gofer, err = b.goferPID(); err != nil {
			return err
		}
		return streams.attach(ctx)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("runsc did not start the sandbox: %w: %s", err, b.failure())
}

// failure returns runsc's last error from its log, of JSON lines.
func (b *sandbox) failure() string {
	raw, err := folder.ReadBounded(filepath.Join(b.dir, "runsc.log"), folder.MaxJSON)
	if err != nil {
		return err.Error()
	}
	last := strings.TrimSpace(string(raw))
	last = last[strings.LastIndexByte(last, '\n')+1:]
	var line struct{ Msg string }
	if json.Unmarshal([]byte(last), &line) == nil && line.Msg != "" {
		return line.Msg
	}
	return last
}

// wait returns the command's exit status. The Sentry exits with it, and as this
// process is its subreaper nobody else can collect it. The gofer ends with the
// Sentry; one that was killed before has failed the command's reads.
func (b *sandbox) wait() exit {
	ws, err := reap(b.pid)
	if err != nil {
		return exit{err: fmt.Errorf("wait for sandbox %s: %w", b.id, err)}
	}
	e := exit{status: ws.ExitStatus()}
	if ws.Signaled() {
		e = exit{128 + int(ws.Signal()), fmt.Errorf("sandbox %s was ended from outside by signal %d (%s)", b.id, ws.Signal(), ws.Signal())}
	}
	gofer, err := reap(b.gofer)
	switch {
	case err != nil:
		e.err = errors.Join(e.err, fmt.Errorf("wait for the gofer of sandbox %s: %w", b.id, err))
	case gofer.Signaled() && e.err == nil:
		e.err = fmt.Errorf("the gofer of sandbox %s was ended from outside by signal %d (%s)", b.id, gofer.Signal(), gofer.Signal())
	}
	return e
}

func reap(pid int) (syscall.WaitStatus, error) {
	var ws syscall.WaitStatus
	for {
		_, err := syscall.Wait4(pid, &ws, 0, nil)
		if !errors.Is(err, syscall.EINTR) {
			return ws, err
		}
	}
}

// supervise forwards signals until the command has ended, and kills it when ctx
// ends. It returns how the command ended and why it was killed.
func (b *sandbox) supervise(ctx context.Context, exited <-chan exit, signals <-chan os.Signal) (exit, error) {
	for {
		select {
		case e := <-exited:
			return e, nil
		case sig := <-signals:
			if n, ok := sig.(syscall.Signal); ok {
				b.signal(n)
			}
		case <-ctx.Done():
			return b.kill(exited), context.Cause(ctx)
		}
	}
}

const (
	// signalTimeout bounds the delivery of a signal: a guest that is stuck in a
	// read of the image does not take one.
	signalTimeout = 2 * time.Second
	// killGrace is how long a killed command may take to end, before the Sentry
	// is killed under it.
	killGrace = 2 * time.Second
)

func (b *sandbox) signal(sig syscall.Signal) {
	ctx, cancel := context.WithTimeout(context.Background(), signalTimeout)
	defer cancel()
	out, err := b.runsc(ctx, "kill", b.id, strconv.Itoa(int(sig))).CombinedOutput()
	if err != nil && syscall.Kill(b.pid, 0) == nil {
		b.w.log().WarnContext(ctx, "signal not delivered", "sandbox", b.id, "signal", sig, "err", err, "runsc", string(out))
	}
}

// kill ends the command, in the guest when that is possible, which leaves its
// output whole.
func (b *sandbox) kill(exited <-chan exit) exit {
	b.signal(syscall.SIGKILL)
	select {
	case e := <-exited:
		return e
	case <-time.After(killGrace):
	}
	syscall.Kill(b.pid, syscall.SIGKILL)
	syscall.Kill(b.gofer, syscall.SIGKILL)
	select {
	case e := <-exited:
		return e
	case <-time.After(endTimeout):
		return exit{err: fmt.Errorf("sandbox %s does not end", b.id)}
	}
}
