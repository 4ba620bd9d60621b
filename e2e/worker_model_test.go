package e2e_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/internal/netns"
	"quarry/worker/sandbox"
)

// asker is an agent: it asks its model, and says what it answered.
const asker = `import http.client, time
c = http.client.HTTPConnection("203.0.113.10", 8000, timeout=300)
for i in range(1000):
    c.request("POST", "/", "question %d" % i)
    print(c.getresponse().read().decode(), flush=True)`

// answers are what a model says, one after another.
type answers struct {
	t    *testing.T
	next chan string
}

// give waits until somebody asks, and answers.
func (a answers) give(ctx context.Context, answer string) {
	a.t.Helper()
	select {
	case a.next <- answer:
	case <-ctx.Done():
		a.t.Fatalf("nobody asked for %q", answer)
	}
}

// model serves a model outside, whose answers the test gives.
func (l *netLab) model(addr string) answers {
	l.t.Helper()
	a := answers{l.t, make(chan string)}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		select {
		case said := <-a.next:
			fmt.Fprint(w, said)
		case <-r.Context().Done():
		}
	})}
	l.t.Cleanup(func() { s.Close() })
	var listener net.Listener
	check(l.t, netns.Do(l.outside, func() (err error) { listener, err = net.Listen("tcp4", addr); return err }))
	go s.Serve(listener) // ends with Close
	return a
}

// TestPausedForItsModel has a sandbox wait for its model: it is paused until the
// answer comes, runs for whoever needs it, stays paused for who asked for that, and is
// not left paused by a worker that is killed.
func TestPausedForItsModel(t *testing.T) {
	l := newNetLab(t)
	answers := l.model("203.0.113.10:8000")
	flags := []string{"--model-endpoint", "203.0.113.10:8000"}
	r := newWorkerRigIn(t, l.node, "cold", flags...)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := r.socketClient()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task", Network: sandbox.Policy{Allow: []sandbox.Rule{{CIDR: "203.0.113.10/32"}}}}, "key")
	check(t, err)
	_, err = c.Start(ctx, sb.ID, sandbox.ExecSpec{ID: "agent", Role: sandbox.ExecAgent, Argv: []string{"python3", "-c", asker}})
	check(t, err)

	until := func(what string, ok func() bool) { t.Helper(); r.await(ctx, what, ok) }
	state := func(want sandbox.State) func() bool {
		return func() bool {
			got, err := c.Get(ctx, sb.ID)
			return err == nil && got.State == want
		}
	}
	said := func(want string) func() bool {
		return func() bool {
			var b bytes.Buffer
			_, err := c.Output(ctx, sb.ID, "agent", "stdout", 0, &b)
			return err == nil && strings.HasSuffix(b.String(), want+"\n")
		}
	}
	for i := range 3 {
		until("a pause", state(sandbox.StatePaused))
		answer := fmt.Sprint("answer ", i)
		answers.give(ctx, answer)
		until(answer, said(answer))
	}

	// A command runs, and then it is paused again.
	until("a pause", state(sandbox.StatePaused))
	if code, out, err := run(ctx, c, sb.ID, sandbox.ExecSpec{Argv: []string{"echo", "here"}}); err != nil || code != 0 || out != "here\n" {
		t.Errorf("a command in a sandbox that waits: %d %q %v", code, out, err)
	}
	until("a pause after a command", state(sandbox.StatePaused))
	_, err = c.WriteFile(ctx, sb.ID, "/tmp/file", sandbox.WriteOptions{}, strings.NewReader("text"))
	check(t, err)
	until("a pause after a file", state(sandbox.StatePaused))

	// Somebody else wants it paused too: the answer alone does not resume it.
	r.pause(ctx, c, sb.ID)
	answers.give(ctx, "held back")
	time.Sleep(300 * time.Millisecond)
	if !state(sandbox.StatePaused)() {
		t.Error("the answer of a model resumed what a call had paused")
	}
	_, err = c.Resume(ctx, sb.ID)
	check(t, err)
	until("what was held back", said("held back"))

	// The answer comes while no worker runs.
	until("a pause", state(sandbox.StatePaused))
	r.killWorker()
	answers.give(ctx, "unseen")
	r.startWorkerIn(l.node, flags...)
	c = r.socketClient()
	until("an answer that nobody saw", said("unseen"))
	until("a pause under the next worker", state(sandbox.StatePaused))
	answers.give(ctx, "seen")
	until("the answer after it", said("seen"))

	// A holder that stands holds up neither the worker's end nor, below, a delete.
	until("a pause", state(sandbox.StatePaused))
	holders := r.processesOf(sb.ID, "holder")
	if len(holders) != 1 {
		t.Fatalf("holders: %v", holders)
	}
	check(t, syscall.Kill(holders[0], syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(holders[0], syscall.SIGCONT) })
	r.stopWorker()
	check(t, syscall.Kill(holders[0], syscall.SIGCONT))
	r.startWorkerIn(l.node, flags...)
	c = r.socketClient()
	answers.give(ctx, "after a stop") // it runs since the stop: this answer's question was not seen, the next one is
	until("an answer after the worker's end", said("after a stop"))
	until("a pause", state(sandbox.StatePaused))
	check(t, syscall.Kill(holders[0], syscall.SIGSTOP))

	got, err := c.Get(ctx, sb.ID)
	check(t, err)
	if got.Pauses < 7 || got.PausedFor == 0 {
		t.Errorf("%d pauses of %d ms in all, want 7 or more", got.Pauses, got.PausedFor)
	}
	end, err := c.Delete(ctx, sb.ID)
	check(t, err)
	if end.Evidence.Pauses < 7 {
		t.Errorf("its record has %d pauses", end.Evidence.Pauses)
	}
	r.nothingLeftOf()
}

// reading is an agent that reads a file whenever its model has answered.
const reading = `import hashlib, http.client, sys
c = http.client.HTTPConnection("203.0.113.10", 8000, timeout=300)
while True:
    c.request("GET", "/")
    c.getresponse().read()
    try:
        print(hashlib.sha256(open(sys.argv[1], "rb").read()).hexdigest(), flush=True)
    except OSError as e:
        print("errno", e.errno, flush=True)`

// TestTheStoreIsSilentAtAWake has a model answer while the store of images does not: the
// sandbox runs on, reads of what was never read fail, the sandbox's record says so, and
// they are right once the store is there again.
func TestTheStoreIsSilentAtAWake(t *testing.T) {
	l := newNetLab(t)
	answers := l.model("203.0.113.10:8000")
	r := newWorkerRigIn(t, l.node, "cold", "--model-endpoint", "203.0.113.10:8000", "--no-trace", "--read-timeout", "10s")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := r.socketClient()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task", Network: sandbox.Policy{Allow: []sandbox.Rule{{CIDR: "203.0.113.10/32"}}}}, "key")
	check(t, err)
	const file = "/usr/bin/git"
	_, err = c.Start(ctx, sb.ID, sandbox.ExecSpec{ID: "agent", Role: sandbox.ExecAgent, Argv: []string{"python3", "-c", reading, file}})
	check(t, err)
	paused := func() {
		t.Helper()
		for {
			if got, err := c.Get(ctx, sb.ID); err == nil && got.State == sandbox.StatePaused {
				return
			}
			if ctx.Err() != nil {
				t.Fatalf("it is not paused\n%s", r.logTail())
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	says := func(line int) string {
		t.Helper()
		for {
			var b bytes.Buffer
			_, err := c.Output(ctx, sb.ID, "agent", "stdout", 0, &b)
			if lines := strings.Split(b.String(), "\n"); err == nil && len(lines) > line+1 {
				return lines[line]
			}
			if ctx.Err() != nil {
				t.Fatalf("it says no more: %v\n%s", err, r.logTail())
			}
			time.Sleep(10 * time.Millisecond)
		}
	}
	paused()
	store := processesNamed(t, r.path("bin", "quarry")+"\x00serve\x00")
	if len(store) != 1 {
		t.Fatalf("stores: %v", store)
	}
	check(t, syscall.Kill(store[0], syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(store[0], syscall.SIGCONT) })
	answers.give(ctx, "read")
	if got := says(0); got != "errno 5" {
		t.Errorf("it says %q, want errno 5", got)
	}
	check(t, syscall.Kill(store[0], syscall.SIGCONT))
	paused()
	if u, err := c.Usage(ctx, sb.ID); err != nil || u.ImageErrors == 0 {
		t.Errorf("got %+v, %v", u, err)
	}
	var whole bytes.Buffer
	_, err = c.ReadFile(ctx, sb.ID, file, sandbox.ReadOptions{}, &whole)
	check(t, err)
	answers.give(ctx, "read")
	if got, want := says(1), fmt.Sprintf("%x", sha256.Sum256(whole.Bytes())); got != want {
		t.Errorf("it says %q, want %q", got, want)
	}
	end, err := c.Delete(ctx, sb.ID)
	check(t, err)
	if end.Reason != sandbox.ReasonImageIO || end.Blame != sandbox.BlameInfra || end.Evidence.Pauses < 2 {
		t.Errorf("got %+v", end)
	}
	r.nothingLeftOf()
}

// TestNoPauseUnderAReadOfTheImage has a call pause a sandbox that waits for its image: it
// is refused, counts nothing, and is had once the bytes have come.
func TestNoPauseUnderAReadOfTheImage(t *testing.T) {
	r := newWorkerRig(t, "cold", "--no-trace", "--read-timeout", "1m")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := r.client()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task"}, "key")
	check(t, err)
	store := processesNamed(t, r.path("bin", "quarry")+"\x00serve\x00")
	if len(store) != 1 {
		t.Fatalf("stores: %v", store)
	}
	_, _, err = run(ctx, c, sb.ID, sandbox.ExecSpec{Shell: "cat /etc/passwd >/dev/null"}) // what these need is here
	check(t, err)
	check(t, syscall.Kill(store[0], syscall.SIGSTOP))
	t.Cleanup(func() { _ = syscall.Kill(store[0], syscall.SIGCONT) })
	_, err = c.Start(ctx, sb.ID, sandbox.ExecSpec{ID: "reads", Role: sandbox.ExecAgent, Shell: "echo reads; cat /usr/bin/git >/dev/null"})
	check(t, err)
	var said bytes.Buffer
	for said.Len() == 0 && ctx.Err() == nil {
		_, err = c.Output(ctx, sb.ID, "reads", "stdout", 0, &said)
		check(t, err)
	}
	r.awaitStalledRead(ctx)
	if _, err := c.Pause(ctx, sb.ID); !errors.Is(err, sandbox.ErrNotReady) {
		t.Errorf("a pause under a read of the image: %v", err)
	}
	check(t, syscall.Kill(store[0], syscall.SIGCONT))
	if st := done(t, c, sb.ID, "reads"); st.ExitCode == nil || *st.ExitCode != 0 {
		t.Errorf("the command: %+v", st)
	}
	r.pause(ctx, c, sb.ID)
	_, err = c.Resume(ctx, sb.ID)
	check(t, err)
	end, err := c.Delete(ctx, sb.ID)
	check(t, err)
	if end.Reason != sandbox.ReasonDeleted || end.Evidence.Pauses != 1 {
		t.Errorf("its record: %+v", end)
	}
	r.nothingLeftOf()
}
