package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/api/sandboxes"
	"quarry/api/sandboxes/client"
	"quarry/worker/sandbox"
)

// anew kills the worker and starts another.
func (r *workerRig) anew() *client.Client {
	r.t.Helper()
	r.killWorker()
	r.startWorker()
	return r.client()
}

// processesOf finds the processes of a sandbox whose arguments have a word.
func (r *workerRig) processesOf(id, word string) (pids []int) {
	r.t.Helper()
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range procs {
		raw, err := os.ReadFile(path)
		if err == nil && bytes.Contains(raw, []byte(r.path("w", "node", id)+"/")) && bytes.Contains(raw, []byte(word)) {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			check(r.t, err)
			pids = append(pids, pid)
		}
	}
	return pids
}

// ended waits for the end of a sandbox.
func ended(t *testing.T, c *client.Client, id string) sandbox.End {
	t.Helper()
	for range 2400 { // 2 minutes
		sb, err := c.Get(t.Context(), id)
		check(t, err)
		if sb.End != nil {
			return *sb.End
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("sandbox %s does not end", id)
	return sandbox.End{}
}

// inTime makes calls that a sandbox must live to see, and makes them again with one that
// lives longer, as on a machine that is slow, when it has ended before.
func inTime(calls func(slow int64) error) (err error) {
	for slow := int64(1); slow < 20; slow *= 4 {
		if err = calls(slow); !errors.Is(err, sandbox.ErrEnded) {
			break
		}
	}
	return err
}

// done waits for the end of an exec.
func done(t *testing.T, c *client.Client, id, exec string) sandbox.ExecState {
	t.Helper()
	for end := time.Now().Add(3 * time.Minute); time.Now().Before(end); {
		st, err := c.ExecState(t.Context(), id, exec, time.Second)
		check(t, err)
		if st.Done() {
			return st
		}
	}
	t.Fatalf("exec %s does not end", exec)
	return sandbox.ExecState{}
}

// TestAWorkerThatIsKilledLosesNothing kills the worker while sandboxes run, stand and
// execute: the next one has them all, their output and their exit statuses.
func TestAWorkerThatIsKilledLosesNothing(t *testing.T) {
	r := newWorkerRig(t, "cold")
	c := r.client()
	ctx := t.Context()
	spec := sandbox.Spec{Image: "t/task", MemoryMB: 128, TTL: 3600, Labels: map[string]string{"a": "b"}}
	busy, err := c.Create(ctx, spec, "busy")
	check(t, err)
	still, err := c.Create(ctx, spec, "")
	check(t, err)
	_, err = c.Start(ctx, busy.ID, sandbox.ExecSpec{ID: "count", Shell: "for i in 1 2 3 4 5 6 7 8 9; do echo $i; sleep 0.4; done; exit 7"})
	check(t, err)
	_, err = c.Start(ctx, busy.ID, sandbox.ExecSpec{ID: "cat", Argv: []string{"cat"}, OpenStdin: true})
	check(t, err)
	next, err := c.Stdin(ctx, busy.ID, "cat", 0, strings.NewReader("before "), false)
	check(t, err)
	r.pause(ctx, c, still.ID)
	var used sandbox.Sandbox
	check(t, inTime(func(slow int64) error { // its command counts as use, for the next worker too
		idle := spec
		idle.Idle = 2 * slow
		if used, err = c.Create(ctx, idle, ""); err != nil {
			return err
		}
		_, err = c.Start(ctx, used.ID, sandbox.ExecSpec{ID: "long", Shell: fmt.Sprintf("sleep %d; echo used", 6*slow)})
		return err
	}))

	c = r.anew()
	again, err := c.Create(ctx, spec, "busy")
	if err != nil || again.ID != busy.ID || again.Token != busy.Token {
		t.Errorf("the key finds %s, %v; want %s", again.ID, err, busy.ID)
	}
	other := spec
	other.MemoryMB++
	if _, err := c.Create(ctx, other, "busy"); !errors.Is(err, sandbox.ErrKeyConflict) {
		t.Errorf("the key with another body: got %v", err)
	}
	_, err = c.Stdin(ctx, busy.ID, "cat", next, strings.NewReader("and after"), true)
	check(t, err)
	for exec, want := range map[string]string{"count": "1\n2\n3\n4\n5\n6\n7\n8\n9\n", "cat": "before and after"} {
		st := done(t, c, busy.ID, exec)
		var out strings.Builder
		_, err := c.Output(ctx, busy.ID, exec, "stdout", 0, &out)
		check(t, err)
		if out.String() != want {
			t.Errorf("%s: got %q, want %q", exec, out.String(), want)
		}
		if code := map[string]int{"count": 7}[exec]; st.ExitCode == nil || *st.ExitCode != code {
			t.Errorf("%s: got %+v", exec, st)
		}
	}
	if st := done(t, c, used.ID, "long"); st.ExitCode == nil || *st.ExitCode != 0 {
		t.Errorf("got %+v", st)
	}
	if end := ended(t, c, used.ID); end.Reason != sandbox.ReasonIdle {
		t.Errorf("got %+v", end)
	}
	sb, err := c.Get(ctx, still.ID)
	if err != nil || sb.State != sandbox.StatePaused || sb.Pauses != 1 || sb.Labels["a"] != "b" || sb.Expires == nil {
		t.Errorf("the paused one: got %+v, %v", sb, err)
	}
	_, err = c.Resume(ctx, still.ID)
	check(t, err)
	_, err = c.Resume(ctx, still.ID) // one too many ends no Sentry
	check(t, err)
	if code, out, err := run(ctx, c, still.ID, sandbox.ExecSpec{Shell: "echo awake"}); code != 0 || out != "awake\n" {
		t.Errorf("got %d %q %v", code, out, err)
	}
	for _, id := range []string{busy.ID, still.ID} {
		for range 2 {
			end, err := c.Delete(ctx, id)
			if err != nil || end.Reason != sandbox.ReasonDeleted || end.Blame != sandbox.BlameUser || end.Evidence.WorkerRestarts != 1 {
				t.Errorf("got %+v, %v", end, err)
			}
		}
	}
	r.nothingLeftOf()
	r.startWorker() // the records stay
	c = r.client()
	if end := ended(t, c, still.ID); end.Evidence.Pauses != 1 || end.Evidence.Execs != 1 {
		t.Errorf("got %+v", end)
	}
}

// TestAWorkerKilledInMidCreateAndMidDelete kills the worker at different times while
// sandboxes are made and ended: each is there or has a record, and nothing is left.
func TestAWorkerKilledInMidCreateAndMidDelete(t *testing.T) {
	r := newWorkerRig(t, "cold")
	c := r.client()
	ctx := t.Context()
	spec := sandbox.Spec{Image: "t/task", MemoryMB: 128}
	const rounds, each = 8, 4
	for round := range rounds {
		var g errgroup.Group
		for n := range each {
			g.Go(func() error { c.Create(ctx, spec, fmt.Sprintf("%d-%d", round, n)); return nil })
		}
		time.Sleep(time.Duration(round) * 60 * time.Millisecond)
		r.killWorker()
		g.Wait()
		r.startWorker()
		c = r.client()
		// The key makes the sandbox now, or finds the one that was made.
		var mu sync.Mutex
		var ids []string
		for n := range each {
			g.Go(func() error {
				sb, err := c.Create(ctx, spec, fmt.Sprintf("%d-%d", round, n))
				if err != nil {
					return err
				}
				mu.Lock()
				ids = append(ids, sb.ID)
				mu.Unlock()
				code, out, err := run(ctx, c, sb.ID, sandbox.ExecSpec{Shell: "echo here"})
				if err != nil || code != 0 || out != "here\n" {
					return fmt.Errorf("%s: %d %q %w", sb.ID, code, out, err)
				}
				return nil
			})
		}
		check(t, g.Wait())
		list, err := c.List(ctx, sandbox.Filter{State: sandbox.StateRunning})
		if err != nil || len(list) != each {
			t.Errorf("round %d: %d run, want %d: %v", round, len(list), each, err)
		}
		for _, id := range ids {
			g.Go(func() error { c.Delete(ctx, id); return nil })
		}
		time.Sleep(time.Duration(round) * 5 * time.Millisecond)
		r.killWorker()
		g.Wait()
		r.startWorker()
		c = r.client()
		for _, id := range ids {
			end, err := c.Delete(ctx, id)
			if err != nil || end.Reason != sandbox.ReasonDeleted {
				t.Errorf("round %d: got %+v, %v", round, end, err)
			}
		}
	}
	list, err := c.List(ctx, sandbox.Filter{State: sandbox.StateEnded})
	check(t, err)
	r.nothingLeftOf()
	for _, sb := range list {
		if sb.End == nil || sb.End.Reason != sandbox.ReasonDeleted && sb.End.Reason != sandbox.ReasonCreateFailed || sb.End.Blame == sandbox.BlameAgent {
			t.Errorf("got %+v", sb.End)
		}
	}
}

// TestHowSandboxesEnd ends sandboxes in every way that one can end.
func TestHowSandboxesEnd(t *testing.T) {
	r := newWorkerRig(t, "cold")
	c := r.client()
	ctx := t.Context()
	kill := func(word string) func(string) {
		return func(id string) {
			pids := r.processesOf(id, word)
			if len(pids) == 0 {
				t.Errorf("%s has no %s", id, word)
			}
			for _, pid := range pids {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	}
	shell := func(script string) func(string) {
		return func(id string) { c.Start(ctx, id, sandbox.ExecSpec{ID: "x", Shell: script}) }
	}
	nothing := func(string) {}
	for name, k := range map[string]struct {
		spec   sandbox.Spec
		do     func(id string)
		reason string
		blame  string
		limit  string
		holds  func(sandbox.End) bool
	}{
		"exit":   {sandbox.Spec{Entrypoint: []string{"sh", "-c", "exit 3"}}, nothing, sandbox.ReasonExited, sandbox.BlameAgent, "", func(e sandbox.End) bool { return e.ExitCode != nil && *e.ExitCode == 3 }},
		"ttl":    {sandbox.Spec{TTL: 2}, nothing, sandbox.ReasonTTL, sandbox.BlameUser, "ttl", nil},
		"idle":   {sandbox.Spec{Idle: 1}, shell("sleep 2"), sandbox.ReasonIdle, sandbox.BlameUser, "idle", func(e sandbox.End) bool { return e.Evidence.Execs == 1 }},
		"sentry": {sandbox.Spec{}, kill("runsc-sandbox"), sandbox.ReasonRuntime, sandbox.BlameInfra, "", func(e sandbox.End) bool { return e.Retryable && e.Signal == 9 }},
		"gofer":  {sandbox.Spec{}, kill("runsc-gofer"), sandbox.ReasonRuntime, sandbox.BlameInfra, "", func(e sandbox.End) bool { return e.Retryable }},
		"holder": {sandbox.Spec{}, kill("holder\x00"), sandbox.ReasonNodeLost, sandbox.BlameInfra, "", func(e sandbox.End) bool { return e.Retryable }},
		"oom": {
			sandbox.Spec{MemoryMB: 128}, shell("x=0123456789; while :; do x=$x$x; done"), sandbox.ReasonOOM, sandbox.BlameAgent, "memory",
			func(e sandbox.End) bool { return e.Evidence.OOMKills > 0 && e.Evidence.MemoryPeak > 100<<20 },
		},
	} {
		t.Run(name, func(t *testing.T) {
			k.spec.Image = "t/task"
			if k.spec.MemoryMB == 0 {
				k.spec.MemoryMB = 256
			}
			var sb sandbox.Sandbox
			var e sandbox.End
			err := inTime(func(slow int64) (err error) {
				spec := k.spec
				spec.TTL, spec.Idle = spec.TTL*slow, spec.Idle*slow
				if sb, err = c.Create(ctx, spec, ""); err != nil {
					return err
				}
				k.do(sb.ID)
				if e = ended(t, c, sb.ID); spec.Idle > 0 && e.Evidence.Execs == 0 {
					return sandbox.ErrEnded // before its command began
				}
				return nil
			})
			check(t, err)
			if e.Reason != k.reason || e.Blame != k.blame || e.Limit != k.limit || k.holds != nil && !k.holds(e) {
				t.Errorf("got %+v", e)
			}
			var over *sandbox.EndedError
			if _, _, err := run(ctx, c, sb.ID, sandbox.ExecSpec{Shell: "true"}); !errors.As(err, &over) || over.End.Reason != k.reason {
				t.Errorf("exec after the end: got %v", err)
			}
		})
	}
	t.Run("under a command", func(t *testing.T) { whoWaitsLearnsTheEnd(t, c) })
	r.nothingLeftOf()
}

// whoWaitsLearnsTheEnd has a sandbox end by its memory under commands that are waited
// for, each in another way: all are told how it ended, and nobody only that it did.
func whoWaitsLearnsTheEnd(t *testing.T, c *client.Client) {
	sb, err := c.Create(t.Context(), sandbox.Spec{Image: "t/task", MemoryMB: 128}, "")
	check(t, err)
	wrong := func(err error) bool {
		var over *sandbox.EndedError
		return !errors.As(err, &over) || over.End.Reason != sandbox.ReasonOOM || over.End.Blame != sandbox.BlameAgent || !strings.Contains(err.Error(), string(sandbox.ReasonOOM))
	}
	answers := make(chan error, 3)
	_, err = c.Start(t.Context(), sb.ID, sandbox.ExecSpec{ID: "sleep", Shell: "echo before; sleep 1000"})
	check(t, err)
	go func() { // these end with the sandbox
		_, err := c.Exec(t.Context(), sb.ID, sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: "oom", Shell: "x=0123456789; while :; do x=$x$x; done"}})
		answers <- err
	}()
	go func() {
		var out, errOff int64
		_, err := c.Follow(t.Context(), sb.ID, "sleep", &out, &errOff, io.Discard, io.Discard)
		answers <- err
	}()
	go func() {
		_, err := c.ExecState(t.Context(), sb.ID, "sleep", time.Minute)
		answers <- err
	}()
	for range 3 {
		if err := <-answers; wrong(err) {
			t.Errorf("a command whose sandbox used up its memory: %v", err)
		}
	}
}

// TestAForkBombHurtsNobodyElse has one guest fork without end beside another.
func TestAForkBombHurtsNobodyElse(t *testing.T) {
	r := newWorkerRig(t, "cold")
	c := r.client()
	ctx := t.Context()
	bomb, err := c.Create(ctx, sandbox.Spec{Image: "t/task", MemoryMB: 512, PIDs: 64}, "")
	check(t, err)
	calm, err := c.Create(ctx, sandbox.Spec{Image: "t/task", MemoryMB: 128}, "")
	check(t, err)
	_, err = c.Start(ctx, bomb.ID, sandbox.ExecSpec{ID: "bomb", Shell: "f() { f | f & }; f; sleep 3"})
	check(t, err)
	for range 5 {
		if code, out, err := run(ctx, c, calm.ID, sandbox.ExecSpec{Shell: "echo calm"}); code != 0 || out != "calm\n" {
			t.Errorf("got %d %q %v", code, out, err)
		}
		time.Sleep(300 * time.Millisecond)
	}
	sb, err := c.Get(ctx, bomb.ID)
	check(t, err)
	if e := sb.End; e != nil && e.Blame != sandbox.BlameAgent {
		t.Errorf("the bomb ended as %+v", e)
	}
	for _, id := range []string{bomb.ID, calm.ID} {
		_, err := c.Delete(ctx, id)
		check(t, err)
	}
	r.nothingLeftOf()
}

// TestADeleteWithAStalledReadIsBounded deletes a sandbox that waits for its image, whose
// reader is stopped.
func TestADeleteWithAStalledReadIsBounded(t *testing.T) {
	r := newWorkerRig(t, "debian")
	c := r.client()
	ctx := t.Context()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task", MemoryMB: 256}, "")
	check(t, err)
	pids := processesNamed(t, r.path("bin", "quarry")+"\x00reader\x00")
	if len(pids) != 1 {
		t.Fatalf("readers: %v", pids)
	}
	check(t, syscall.Kill(pids[0], syscall.SIGSTOP))
	var start sync.WaitGroup
	defer start.Wait()
	cont := sync.OnceFunc(func() { syscall.Kill(pids[0], syscall.SIGCONT) })
	defer cont()
	// Its own program may be what is waited for; it ends with the sandbox.
	start.Go(func() {
		_, _ = c.Start(ctx, sb.ID, sandbox.ExecSpec{ID: "read", Shell: "find / -xdev -type f -exec cat {} + > /dev/null"})
	})
	r.awaitStalledRead(ctx)
	bounded, cancel := context.WithTimeout(ctx, 4*time.Minute) // many times what it takes
	defer cancel()
	for range 2 {
		if _, err := c.Delete(bounded, sb.ID); err != nil {
			t.Errorf("deleted while it waits for its image: %v", err)
		}
	}
	st, err := c.Node(ctx)
	if err != nil || st.Memory.Used != 0 || st.PIDs.Used != 0 || st.Disk.Used != 0 {
		t.Errorf("what it took is not given back: %+v, %v", st, err)
	}
	cont()
	r.nothingLeftOf()
}

// TestLifetimesAreKept is what other services had wrong (bugs.md 81): a call near the
// deadline shortens nothing, one key makes one sandbox, and a delete during the create
// ends it.
func TestLifetimesAreKept(t *testing.T) {
	r := newWorkerRig(t, "cold", "--max-sandboxes", "3")
	c := r.client()
	ctx := t.Context()
	spec := sandbox.Spec{Image: "t/task", MemoryMB: 128, TTL: 3600}
	var g errgroup.Group
	ids := make([]string, 8)
	for i := range ids {
		g.Go(func() error {
			sb, err := c.Create(ctx, spec, "one")
			ids[i] = sb.ID
			return err
		})
	}
	check(t, g.Wait())
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("one key made %q", ids)
		}
	}
	before, err := c.Get(ctx, ids[0])
	check(t, err)
	after, err := c.SetTTL(ctx, ids[0], 5)
	if err != nil || !after.Expires.Equal(*before.Expires) {
		t.Errorf("a shorter time: %v became %v, %v", before.Expires, after.Expires, err)
	}
	_, _, err = run(ctx, c, ids[0], sandbox.ExecSpec{Shell: "true"})
	check(t, err)
	after, err = c.SetTTL(ctx, ids[0], 7200)
	if err != nil || !after.Expires.After(*before.Expires) {
		t.Errorf("a longer time: %v became %v, %v", before.Expires, after.Expires, err)
	}
	// A command that is not there fails the create, and leaves its place to others.
	for range 4 {
		bad := spec
		bad.Entrypoint = []string{"/no/such/program"}
		if _, err := c.Create(ctx, bad, "bad"); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("got %v", err)
		}
	}
	made := make(chan error, 1)
	go func() {
		sb, err := c.Create(ctx, spec, "early")
		if err == nil { // nobody has seen it being made
			_, err = c.Delete(ctx, sb.ID)
		}
		made <- err
	}()
	for range 1000 {
		list, err := c.List(ctx, sandbox.Filter{State: sandbox.StateCreating})
		check(t, err)
		if len(list) == 1 {
			_, err := c.Delete(ctx, list[0].ID)
			check(t, err)
			break
		}
	}
	if err := <-made; err != nil && !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("a create that was deleted: got %v", err)
	}
	// Places are given back by deletes; who finds none is told when to come again.
	var more []string
	for range 2 {
		sb, err := c.Create(ctx, spec, "")
		check(t, err)
		more = append(more, sb.ID)
	}
	var full *sandboxes.Error
	if _, err := c.Create(ctx, spec, ""); !errors.Is(err, sandbox.ErrCapacity) || !errors.As(err, &full) || full.RetryAfter <= 0 {
		t.Errorf("one too many: got %v", err)
	}
	for _, id := range append(more, ids[0]) {
		_, err := c.Delete(ctx, id)
		check(t, err)
	}
	r.nothingLeftOf()
}
