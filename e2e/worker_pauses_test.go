package e2e_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"quarry/api/sandboxes/client"
	"quarry/internal/netns"
	"quarry/worker/sandbox"
)

const (
	// pauseSteps are made by pauseSandboxes together. pauseSeed makes the steps; how they
	// fall together is the machine's.
	pauseSteps     = 10_000
	pauseSandboxes = 8
	pauseSeed      = 11
	// Every so many steps the worker is killed, its packets are lost, its rules are
	// flushed.
	stepsPerKill    = 500
	stepsPerOverrun = 300
	stepsPerFlush   = 900
	// pausePatience is for a slow machine: much longer than all of it takes.
	pausePatience = 25 * time.Minute
)

// counter is an agent that asks its model one thing after another, and says what it was
// told, and whether memory that it filled before is still what it was.
const counter = `import hashlib, http.client, os, sys
name = sys.argv[1]
held = os.urandom(1 << 20)
was = hashlib.sha256(held).digest()
i = 0
while True:
    c = http.client.HTTPConnection("203.0.113.10", 8000, timeout=600)
    try:
        for _ in range(50):
            c.request("GET", "/%s/%d" % (name, i))
            said = c.getresponse().read().decode()
            print(i, said, hashlib.sha256(held).digest() == was, flush=True)
            i += 1
    finally:
        c.close()`

func modelSays(path string) string { return fmt.Sprintf("%x", sha256.Sum256([]byte(path)))[:16] }

// model answers a question when the test says so.
type model struct {
	mu    sync.Mutex
	asked map[string]chan struct{} // by the name of the agent
}

func (m *model) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	name, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	c := make(chan struct{})
	m.mu.Lock()
	m.asked[name] = c
	m.mu.Unlock()
	select {
	case <-c:
	case <-r.Context().Done():
		return
	}
	fmt.Fprint(w, modelSays(r.URL.Path))
}

// answer answers the question of an agent, if there is one.
func (m *model) answer(name string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := m.asked[name]
	if c == nil {
		return false
	}
	delete(m.asked, name)
	close(c)
	return true
}

// pauseStorm is what its sandboxes share.
type pauseStorm struct {
	*workerRig
	lab   *netLab
	model *model
	steps atomic.Int64
	down  sync.RWMutex // held for writing while no worker runs
	mu    sync.Mutex
	calls map[string]int
}

func (s *pauseStorm) note(what string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[what]++
}

// TestTenThousandPauses pauses and resumes sandboxes in every way there is, by calls
// that do not match, by questions to a model, by commands and files, while the worker is
// killed, its packets are lost and its rules are flushed. All live on, and say what they
// were to say.
func TestTenThousandPauses(t *testing.T) {
	l := newNetLab(t)
	s := &pauseStorm{lab: l, model: &model{asked: map[string]chan struct{}{}}, calls: map[string]int{}}
	server := &http.Server{Handler: s.model}
	t.Cleanup(func() { server.Close() })
	var listener net.Listener
	check(t, netns.Do(l.outside, func() (err error) { listener, err = net.Listen("tcp4", "203.0.113.10:8000"); return err }))
	go server.Serve(listener) // ends with Close
	flags := []string{"--model-endpoint", "203.0.113.10:8000"}
	s.workerRig = newWorkerRigIn(t, l.node, "cold", flags...)
	ctx, cancel := context.WithTimeout(t.Context(), pausePatience)
	defer cancel()
	c := s.socketClient()
	var ids []string
	for i := range pauseSandboxes {
		spec := sandbox.Spec{Image: "t/task", MemoryMB: 256, DiskMB: 64, Network: sandbox.Policy{Allow: []sandbox.Rule{{CIDR: "203.0.113.10/32"}}}}
		sb, err := c.Create(ctx, spec, fmt.Sprint("key", i))
		check(t, err)
		_, err = c.Start(ctx, sb.ID, sandbox.ExecSpec{ID: "agent", Role: sandbox.ExecAgent, Argv: []string{"python3", "-c", counter, fmt.Sprint(i)}})
		check(t, err)
		ids = append(ids, sb.ID)
	}
	var all, faults errgroup.Group
	done := make(chan struct{})
	faults.Go(func() error {
		defer func() {
			if t.Failed() { // nobody waits for a worker that does not come
				cancel()
			}
		}()
		s.faults(done, flags)
		return nil
	})
	for i, id := range ids {
		all.Go(func() error { return s.drive(ctx, id, fmt.Sprint(i), rand.New(rand.NewPCG(pauseSeed, uint64(i)))) })
	}
	err := all.Wait()
	close(done)
	check(t, errors.Join(err, faults.Wait()))
	answers := 0
	for i, id := range ids {
		answers += s.judge(ctx, id, fmt.Sprint(i))
	}
	t.Logf("%d steps, %d answers, %v", s.steps.Load(), answers, s.calls)
	s.nothingLeftOf()
}

// awaitWorker waits while no worker runs, until ctx ends.
func (s *pauseStorm) awaitWorker(ctx context.Context) {
	for !s.down.TryRLock() {
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Millisecond):
		}
	}
	s.down.RUnlock()
}

// drive makes random steps with one sandbox.
func (s *pauseStorm) drive(ctx context.Context, id, name string, dice *rand.Rand) error {
	c := s.socketClient()
	for s.steps.Add(1) <= pauseSteps {
		s.awaitWorker(ctx)
		what, err := s.step(ctx, c, id, name, dice)
		switch {
		case err == nil:
			s.note(what)
		case ctx.Err() != nil:
			return fmt.Errorf("%s of sandbox %s: %w; the worker said: %s", what, name, err, s.logTail())
		case errors.Is(err, sandbox.ErrRate) || errors.Is(err, sandbox.ErrNotReady):
			s.note(what + ", busy")
		case gone(err):
			s.note(what + ", no worker")
			time.Sleep(10 * time.Millisecond)
		default:
			return fmt.Errorf("%s of sandbox %s: %w; the worker said: %s", what, name, err, s.logTail())
		}
	}
	s.steps.Add(-1)
	return nil
}

// gone reports whether a call had no answer as the worker was killed.
func gone(err error) bool {
	var op *net.OpError
	return errors.As(err, &op) || strings.Contains(err.Error(), "EOF") || strings.Contains(err.Error(), "connection")
}

func (s *pauseStorm) step(ctx context.Context, c *client.Client, id, name string, dice *rand.Rand) (what string, err error) {
	switch n := dice.IntN(100); {
	case n < 30:
		_, err = c.Pause(ctx, id)
		return "pause", err
	case n < 62:
		_, err = c.Resume(ctx, id)
		return "resume", err
	case n < 82:
		time.Sleep(time.Duration(dice.IntN(90)) * time.Millisecond)
		if !s.model.answer(name) {
			return "nothing to answer", nil
		}
		return "answer", nil
	case n < 90:
		if _, err := c.Resume(ctx, id); err != nil {
			return "command", err
		}
		code, out, err := run(ctx, c, id, sandbox.ExecSpec{Argv: []string{"echo", name}})
		if err == nil && (code != 0 || out != name+"\n") {
			err = fmt.Errorf("echo %s: exit code %d, %q", name, code, out)
		}
		return "command", err
	case n < 95:
		if _, err := c.Resume(ctx, id); err != nil {
			return "file", err
		}
		_, err := c.WriteFile(ctx, id, "/tmp/file", sandbox.WriteOptions{}, strings.NewReader(name))
		return "file", err
	}
	_, err = c.Get(ctx, id)
	return "look", err
}

// newWorker kills the worker and starts another. When that fails it ends the goroutine.
func (s *pauseStorm) newWorker(flags []string) {
	s.down.Lock()
	defer s.down.Unlock()
	s.killWorker()
	s.startWorkerIn(s.lab.node, flags...)
}

// faults strikes the worker until done.
func (s *pauseStorm) faults(done chan struct{}, flags []string) {
	kill, overrun, flush := int64(stepsPerKill), int64(stepsPerOverrun), int64(stepsPerFlush)
	for {
		select {
		case <-done:
			return
		case <-time.After(5 * time.Millisecond):
		}
		n := s.steps.Load()
		if n >= kill {
			kill += stepsPerKill
			s.newWorker(flags)
			s.note("worker killed")
		}
		if n >= overrun {
			overrun += stepsPerOverrun
			if err := s.overrun(); err != nil {
				s.t.Error(err)
			}
			s.note("packets lost")
		}
		if n >= flush {
			flush += stepsPerFlush
			err := netns.Do(s.lab.node, func() error {
				c := &nftables.Conn{}
				c.FlushRuleset()
				return c.Flush()
			})
			if err != nil {
				s.t.Errorf("flush the rules: %v", err)
			}
			s.note("rules flushed")
		}
	}
}

// overrun makes the buffers of the worker's netfilter sockets so small for a moment that
// what comes is lost, and the worker is told ENOBUFS.
func (s *pauseStorm) overrun() error {
	pid := s.worker.Process.Pid
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	names, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	if err != nil {
		return err
	}
	for _, name := range names {
		if to, err := os.Readlink(name); err != nil || !strings.HasPrefix(to, "socket:") {
			continue
		}
		number, err := strconv.Atoi(filepath.Base(name))
		if err != nil {
			return err
		}
		sock, err := unix.PidfdGetfd(fd, number, 0)
		if err != nil {
			continue // it was closed meanwhile
		}
		if p, err := unix.GetsockoptInt(sock, unix.SOL_SOCKET, unix.SO_PROTOCOL); err == nil && p == unix.NETLINK_NETFILTER {
			defer unix.Close(sock)
			if err := unix.SetsockoptInt(sock, unix.SOL_SOCKET, unix.SO_RCVBUF, 1); err != nil {
				return err
			}
			defer unix.SetsockoptInt(sock, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 8<<20)
			continue
		}
		unix.Close(sock)
	}
	time.Sleep(50 * time.Millisecond)
	return nil
}

// judge has a sandbox run, and looks at all that its agent has said. It returns how many
// answers that were.
func (s *pauseStorm) judge(ctx context.Context, id, name string) (answers int) {
	c := s.socketClient()
	_, err := c.Resume(ctx, id)
	check(s.t, err)
	said := func() []string {
		var out bytes.Buffer
		if _, err := c.Output(ctx, id, "agent", "stdout", 0, &out); err != nil && ctx.Err() == nil {
			s.t.Fatal(err)
		}
		return strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	}
	before := len(said())
	for len(said()) < before+3 { // it goes on
		if ctx.Err() != nil {
			st, err := c.Get(context.WithoutCancel(ctx), id)
			s.t.Fatalf("the agent of sandbox %s, which is %s (%v), says no more; the worker said: %s", name, st.State, err, s.logTail())
		}
		s.model.answer(name)
		time.Sleep(5 * time.Millisecond)
	}
	lines := said()
	for i, line := range lines {
		if want := fmt.Sprintf("%d %s True", i, modelSays(fmt.Sprintf("/%s/%d", name, i))); line != want {
			s.t.Fatalf("line %d of sandbox %s is %q, want %q", i, name, line, want)
		}
	}
	end, err := c.Delete(ctx, id)
	check(s.t, err)
	if end.Reason != sandbox.ReasonDeleted || end.Evidence.Pauses == 0 {
		s.t.Errorf("sandbox %s ended as %s after %d pauses: %s", name, end.Reason, end.Evidence.Pauses, end.Message)
	}
	return len(lines)
}
