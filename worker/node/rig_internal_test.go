package node

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/worker/holder"
	"quarry/worker/sandbox"
	"quarry/worker/sentry/sentrytest"
)

// TestMain makes this program a holder when it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) >= 2 && os.Args[1] == holder.Role {
		signal.Ignore(unix.SIGPIPE, unix.SIGTERM) // as quarry-shim does
		if err := holder.Main(os.Stdin, os.Stdout, slog.New(slog.NewTextHandler(os.Stderr, nil))); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// patience is how long a test waits for what has to come.
const patience = time.Minute

// boxRig is a sandbox that runs, of a node that has nothing but it.
type boxRig struct {
	*testing.T
	b     *box
	leave context.CancelFunc // ends the node's life
	goOn  func()             // of a holder that was stopped
}

func newBoxRig(t *testing.T) *boxRig {
	t.Helper()
	dir := filepath.Join(need.ShortDir(t), "box")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	sentrytest.Bundle(t, dir, sentrytest.Root(t), "sleeper")
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	h, _, err := holder.Start(ctx, holder.Config{Shim: []string{os.Args[0]}, Dir: dir, ID: "test", Runsc: sentrytest.Runsc(t, dir)})
	if err != nil {
		t.Fatal(err)
	}
	r := &boxRig{T: t}
	r.b, r.leave = testBox(dir, h)
	t.Cleanup(func() {
		r.close()
		sentrytest.End(t, dir)
	})
	r.begun()
	return r
}

// testBox is a sandbox of a new node, and what ends the node's life.
func testBox(dir string, h *holder.Client) (*box, context.CancelFunc) {
	life, leave := context.WithCancel(context.Background())
	n := &Node{
		log: slog.New(slog.DiscardHandler), boxes: map[string]*box{}, events: newEvents(1), life: life, naps: make(chan struct{}, 1),
		c: Config{Now: time.Now, PausedMemory: PausedKeep, Naps: NewNapMetrics()},
	}
	b := n.newBox(journal{ID: testID})
	b.dir, b.h, b.state = dir, h, sandbox.StateRunning
	n.boxes[b.id] = b
	return b, leave
}

// close ends the node and leaves its sandbox.
func (r *boxRig) close() {
	r.leave()
	r.b.n.work.Wait()
	if r.b.h != nil {
		r.b.h.Close()
	}
}

// next has another node in the place of this one, which does not know the sandbox yet.
func (r *boxRig) next() {
	r.close()
	r.b, r.leave = testBox(r.b.dir, nil)
}

// begun waits until its first process has begun, without which it is not hibernated.
func (r *boxRig) begun() {
	r.Helper()
	spec := sandbox.ExecSpec{ID: "begun", Shell: "true"}
	st, err := r.b.h.Exec(r.Context(), spec, holder.Process{Argv: []string{"/bin/true"}, Env: []string{"PATH=/bin"}, WorkDir: "/"})
	if err == nil && !final(st) {
		_, err = r.b.h.WaitExec(r.Context(), spec.ID, maxOffset, maxOffset)
	}
	if err != nil {
		r.Fatal(err)
	}
}

// stopHolder has the holder stand until the test has ended.
func (r *boxRig) stopHolder() {
	r.Helper()
	st, err := r.b.h.State(r.Context())
	if err == nil {
		err = unix.Kill(st.PID, unix.SIGSTOP)
	}
	if err != nil {
		r.Fatal(err)
	}
	r.goOn = sync.OnceFunc(func() { _ = unix.Kill(st.PID, unix.SIGCONT) })
	r.Cleanup(r.goOn)
	r.until("its threads to stand, one after the other", func() bool {
		threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", st.PID))
		return len(threads) > 0 && !slices.ContainsFunc(threads, func(path string) bool {
			raw, err := os.ReadFile(path)
			return err == nil && !strings.Contains(string(raw), ") T ")
		})
	})
}

// until waits until something is so.
func (r *boxRig) until(what string, so func() bool) {
	r.Helper()
	for deadline := time.Now().Add(patience); !so(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			r.Fatalf("waited for %s", what)
		}
	}
}

// locked calls fn as who pauses and resumes does.
func (r *boxRig) locked(fn func() error) error {
	r.b.pausing.Lock()
	defer r.b.pausing.Unlock()
	return fn()
}

// soon returns what fn does, which has to end.
func (r *boxRig) soon(what string, done <-chan error) error {
	r.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(patience):
		r.Fatalf("%s does not end", what)
		return nil
	}
}
