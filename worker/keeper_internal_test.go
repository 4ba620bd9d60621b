package worker

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/internal/proc"
	"quarry/nbd/attach"
	"quarry/worker/folder"
	"quarry/worker/reader"
)

// envReader makes the test program the reader of this folder.
const envReader = "QUARRY_TEST_READER_OF"

// envKeeper makes it the folder's keeper.
const envKeeper = "QUARRY_TEST_KEEPER_OF"

// envStays has such a reader stay without a connection.
const envStays = "QUARRY_TEST_READER_STAYS"

const (
	// idle is how long such a reader stays when nobody ends it.
	idle = 5 * time.Second
	// patience is for whatever should happen at once: a busy machine may take long,
	// and a test that fails may wait.
	patience = time.Minute
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(envReader); dir != "" {
		if err := serveFolder(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if dir := os.Getenv(envKeeper); dir != "" {
		if err := keepFolder(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func serveFolder(dir string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	d, err := folder.Open(dir)
	if err != nil {
		return err
	}
	cfg := reader.Config{Dir: d, DiskBytes: -1, Idle: idle}
	if os.Getenv(envStays) != "" {
		cfg.Idle = time.Hour // killReaders ends it
	}
	return reader.Run(ctx, cfg)
}

func keepFolder(dir string) error {
	d, err := folder.Open(dir)
	if err != nil {
		return err
	}
	return (&Worker{Dir: d, ReaderCommand: readerCommand(d)}).Keep(context.Background())
}

func readerCommand(d folder.Dir) []string {
	return []string{"/usr/bin/env", envReader + "=" + d.Path(), os.Args[0]}
}

// kept is a folder with a keeper in this process, whose readers are real ones.
type kept struct {
	t     *testing.T
	w     *Worker
	shim  *attach.Lock // the folder looks as if an image were mounted
	end   chan error   // of the keeper
	ended chan struct{}
}

func newKept(t *testing.T, command ...string) *kept {
	t.Helper()
	base := need.ShortDir(t)
	d, err := folder.Open(filepath.Join(base, "w"))
	if err != nil {
		t.Fatal(err)
	}
	if command == nil {
		command = readerCommand(d)
	}
	k := &kept{t: t, w: &Worker{Dir: d, ReaderCommand: command}, end: make(chan error, 1)}
	t.Cleanup(k.killReaders)
	k.mount()
	return k
}

// killReaders kills what a failed test leaves: every process that was started as
// the folder's reader, also one that is stopped.
func (k *kept) killReaders() { k.killAll(envReader) }

func (k *kept) killAll(env string) {
	want := []byte(env + "=" + k.w.Dir.Path() + "\x00")
	procs, _ := filepath.Glob("/proc/[0-9]*/environ")
	for _, path := range procs {
		if raw, err := os.ReadFile(path); err == nil && bytes.Contains(raw, want) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			syscall.Kill(pid, syscall.SIGKILL)
		}
	}
}

// mount takes the lock that a shim holds.
func (k *kept) mount() {
	k.t.Helper()
	dir := filepath.Join(k.w.Dir.Mounts(), "image")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		k.t.Fatal(err)
	}
	var err error
	if k.shim, err = attach.TakeLock(k.t.Context(), dir); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kept) start() {
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	k.ended = make(chan struct{})
	k.t.Cleanup(func() {
		cancel()
		<-k.ended
	})
	go func() { // ends with ctx at the latest
		k.end <- k.w.Keep(ctx)
		close(k.ended)
	}()
}

// reader waits for a reader other than the given one.
func (k *kept) reader(other int) (pid int, p *proc.Process) {
	k.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(poll) {
		p, err := reader.Find(k.t.Context(), k.w.Dir)
		if err != nil {
			continue
		}
		if p.PID() != other {
			k.t.Cleanup(func() { p.Close() })
			return p.PID(), p
		}
		p.Close()
	}
	k.t.Fatalf("no reader within %v", patience)
	return 0, nil
}

func (k *kept) waitFor(what string, cond func() bool) {
	k.t.Helper()
	for end := time.Now().Add(patience); !cond(); time.Sleep(poll) {
		if time.Now().After(end) {
			k.t.Fatalf("waited %v for %s", patience, what)
		}
	}
}

func (k *kept) wantEnd() error {
	k.t.Helper()
	select {
	case err := <-k.end:
		return err
	case <-time.After(patience):
		k.t.Fatal("the keeper does not end")
		return nil
	}
}

func TestKeeperReplacesReadersWhileThereIsAMount(t *testing.T) {
	k := newKept(t)
	k.start()
	pid, p := k.reader(0)
	for _, sig := range []unix.Signal{unix.SIGKILL, unix.SIGTERM, unix.SIGKILL} {
		if err := p.Signal(sig); err != nil {
			t.Fatal(err)
		}
		pid, p = k.reader(pid)
	}
	k.shim.Release()
	p.Signal(unix.SIGTERM)
	if err := k.wantEnd(); err != nil {
		t.Error(err)
	}
	if proc.Locked(k.w.Dir.KeeperLock()) || proc.Locked(k.w.Dir.ReaderLock()) {
		t.Error("a lock is held after the keeper's end")
	}
}

// TestKeeperAdoptsAReader that runs already, and does not start a second one.
func TestKeeperAdoptsAReader(t *testing.T) {
	k := newKept(t)
	cmd, err := proc.Start(k.w.ReaderCommand, k.w.Dir.ReaderLog(), nil)
	if err != nil {
		t.Fatal(err)
	}
	reaped := make(chan struct{})
	go func() { // ends with the reader
		cmd.Wait()
		close(reaped)
	}()
	first, p := k.reader(0)
	k.w.ReaderCommand = []string{"/bin/sh", "-c", "touch " + k.w.Dir.Path() + "/second; exit 1"}
	k.start()
	k.waitFor("the keeper", func() bool { return proc.Locked(k.w.Dir.KeeperLock()) })
	k.shim.Release()
	time.Sleep(3 * adoptGrace)
	if _, err := os.Stat(k.w.Dir.Path() + "/second"); err == nil {
		t.Errorf("a second reader was started beside %d", first)
	}
	p.Signal(unix.SIGTERM)
	if err := k.wantEnd(); err != nil {
		t.Error(err)
	}
	<-reaped
}

func TestKeeperSaysWhyNoReaderStarts(t *testing.T) {
	k := newKept(t, "/bin/sh", "-c", "echo disk is gone >&2; exit 1")
	k.shim.Release()
	k.start()
	if err := k.wantEnd(); err == nil || !strings.Contains(err.Error(), "disk is gone") {
		t.Errorf("got %v, want the reader's last words", err)
	}
}

// TestKeeperEndsWithAReaderThatLeaves: nobody needs another one.
func TestKeeperEndsWithAReaderThatLeaves(t *testing.T) {
	k := newKept(t, "/bin/true")
	k.shim.Release()
	k.start()
	if err := k.wantEnd(); err != nil {
		t.Error(err)
	}
}

// TestKeeperDoesNotGiveUpOnAMount: a reader that cannot start may be able to later.
func TestKeeperDoesNotGiveUpOnAMount(t *testing.T) {
	k := newKept(t)
	fixed := filepath.Join(k.w.Dir.Path(), "fixed")
	k.w.ReaderCommand = []string{"/bin/sh", "-c", fmt.Sprintf("echo >> %s/tried; [ -e %s ] && %s=%s exec %s; exit 1", k.w.Dir.Path(), fixed, envReader, k.w.Dir.Path(), os.Args[0])}
	k.start()
	k.waitFor("some readers to fail", func() bool {
		tried, _ := os.ReadFile(k.w.Dir.Path() + "/tried")
		return len(tried) > freeRestarts+1
	})
	if err := os.WriteFile(fixed, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	_, p := k.reader(0)
	k.shim.Release()
	p.Signal(unix.SIGTERM)
	if err := k.wantEnd(); err != nil {
		t.Error(err)
	}
}

func TestASecondKeeperIsNotNeeded(t *testing.T) {
	k := newKept(t)
	k.start()
	_, p := k.reader(0)
	if err := k.w.Keep(t.Context()); err != nil {
		t.Error(err)
	}
	k.shim.Release()
	p.Signal(unix.SIGTERM)
	if err := k.wantEnd(); err != nil {
		t.Error(err)
	}
}

// TestADeafReaderIsKilled: it is stopped, so it accepts connections and answers
// nothing.
func TestADeafReaderIsKilled(t *testing.T) {
	k := newKept(t)
	cmd, err := proc.Start(k.w.ReaderCommand, k.w.Dir.ReaderLog(), nil)
	if err != nil {
		t.Fatal(err)
	}
	pid, p := k.reader(0)
	quick, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	k.w.awaitReader(quick, p, 10*time.Millisecond, patience)
	if quick.Err() == nil {
		t.Error("a reader that answers was taken for a deaf one")
	}
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	k.w.awaitReader(t.Context(), p, 10*time.Millisecond, 50*time.Millisecond)
	if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("reader ended with %v, want it killed", err)
	}
}

func TestBackOff(t *testing.T) {
	want := []time.Duration{0, 0, 0, 0, minBackOff, 2 * minBackOff, 4 * minBackOff, 8 * minBackOff, 16 * minBackOff, maxBackOff, maxBackOff}
	for short, want := range want {
		if got := backOff(short); got != want {
			t.Errorf("after %d short lives: got %v, want %v", short, got, want)
		}
	}
	if got := backOff(1 << 30); got != maxBackOff {
		t.Errorf("after many: got %v", got)
	}
}
