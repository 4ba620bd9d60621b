package holder_test

import (
	"errors"
	"io"
	"os"
	"sync"
	"testing"
	"time"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

func TestPause(t *testing.T) {
	r := newRig(t)
	agent := sandbox.ExecSpec{Role: sandbox.ExecAgent, OpenStdin: true}
	id := r.start(agent, "while :; do date +%s%N; sleep 0.01; done").ID
	r.waitOutput(id, "\n")
	for range 3 { // once is enough
		if err := r.c.Pause(r.ctx, false); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: "p"}, process("true")); !errors.Is(err, holder.ErrPaused) {
		t.Errorf("exec in a pause: %v", err)
	}
	if st, err := r.c.State(r.ctx); err != nil || !st.Paused || st.Pauses != 1 || st.Running != 1 || st.Tools != 0 {
		t.Errorf("state %+v, %v", st, err)
	}
	before, err := r.c.WaitExec(r.ctx, id, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(100 * time.Millisecond)
	after, err := r.c.WaitExec(r.ctx, id, 0, 0)
	if err != nil || after.Stdout != before.Stdout || after.Ran != before.Ran {
		t.Errorf("it went on in the pause: %s, ran %d; before %s, ran %d; %v", describe(after), after.Ran, describe(before), before.Ran, err)
	}
	for range 5 { // one too many would end the Sentry
		if err := r.c.Resume(r.ctx); err != nil {
			t.Fatal(err)
		}
	}
	st, err := r.c.WaitExec(r.ctx, id, after.Stdout.Kept, 0)
	if err != nil || st.Stdout.Kept <= after.Stdout.Kept {
		t.Errorf("after the pause: %s, %v", describe(st), err)
	}
	if s, err := r.c.State(r.ctx); err != nil || s.Paused || s.PausedFor < 100 {
		t.Errorf("state %+v, %v", s, err)
	}
	if err := r.c.Signal(r.ctx, id, 9); err != nil {
		t.Fatal(err)
	}
	r.wait(id)
	r.wantNobody()
}

// Files are read in a pause, without a task of the guest.
func TestCatInAPause(t *testing.T) {
	r := newRig(t)
	r.run(sandbox.ExecSpec{}, "echo content > /tmp/f")
	if err := r.c.Pause(r.ctx, false); err != nil {
		t.Fatal(err)
	}
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer read.Close()
	if err := r.c.Cat(r.ctx, "/tmp/f", write); err != nil {
		t.Fatal(err)
	}
	if err := r.c.Cat(r.ctx, "/tmp/nothere", write); !errors.Is(err, sandbox.ErrFileNotFound) {
		t.Errorf("no file: %v", err)
	}
	write.Close()
	if b, err := io.ReadAll(read); err != nil || string(b) != "content\n" {
		t.Errorf("got %q, %v", b, err)
	}
	if f, err := r.c.MemoryFile(r.ctx); err != nil {
		t.Error(err)
	} else {
		f.Close()
	}
	if u, err := r.c.Usage(r.ctx); err != nil || u.PIDs != 1 {
		t.Errorf("usage %+v, %v", u, err)
	}
	if err := errors.Join(r.c.Reduce(r.ctx), r.c.Resume(r.ctx)); err != nil {
		t.Fatal(err)
	}
	r.wantNobody()
}

// A tool is not paused but by force, and its timeout does not run in a pause.
func TestAToolInAPause(t *testing.T) {
	r := newRig(t)
	id, timeout := "", int64(1000)
	for ; ; timeout *= 4 { // a busy machine may need as long until it is paused
		id = r.start(sandbox.ExecSpec{Timeout: timeout}, "echo ready; while :; do sleep 0.01; done").ID
		r.waitOutput(id, "ready")
		busy := r.c.Pause(r.ctx, false)
		if err := r.c.Pause(r.ctx, true); err != nil {
			t.Fatal(err)
		}
		if st, err := r.c.WaitExec(r.ctx, id, 0, 0); err != nil || st.State == sandbox.ExecRunning && st.Ran < timeout || timeout > 10_000 {
			if !errors.Is(busy, holder.ErrBusy) {
				t.Errorf("with a tool: %v", busy)
			}
			break
		}
		if err := r.c.Resume(r.ctx); err != nil {
			t.Fatal(err)
		}
		r.wait(id)
	}
	time.Sleep(time.Duration(timeout+500) * time.Millisecond)
	st, err := r.c.WaitExec(r.ctx, id, 0, 0)
	if err != nil || st.State != sandbox.ExecRunning || st.Ran >= timeout {
		t.Errorf("in the pause: %s, ran %d, %v", describe(st), st.Ran, err)
	}
	if err := r.c.Resume(r.ctx); err != nil {
		t.Fatal(err)
	}
	st = r.wait(id)
	r.want(st, 137, sandbox.ExecReasonTimeout)
	if lasted := st.Ended.Sub(st.Started).Milliseconds(); st.Ran < timeout || lasted < st.Ran+timeout+400 {
		t.Errorf("ran for %d ms of %d", st.Ran, lasted)
	}
	r.wantNobody()
}

// A kill in a pause takes effect when it is over, and the end of a sandbox does not
// wait for that.
func TestKillsInAPause(t *testing.T) {
	r := newRig(t)
	id := r.start(sandbox.ExecSpec{Role: sandbox.ExecAgent}, "echo ready; sleep 1000").ID
	r.waitOutput(id, "ready")
	if err := r.c.Pause(r.ctx, false); err != nil {
		t.Fatal(err)
	}
	if err := r.c.Signal(r.ctx, id, 9); err != nil {
		t.Fatal(err)
	}
	if err := r.c.Resume(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.want(r.wait(id), 137, sandbox.ExecReasonKilled)
	if err := r.c.Pause(r.ctx, false); err != nil {
		t.Fatal(err)
	}
	if e, err := r.c.End(r.ctx); err != nil || !e.Killed || e.Pauses != 2 {
		t.Errorf("%+v, %v", e, err)
	}
	if err := r.c.Resume(r.ctx); !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("resume after the end: %v", err)
	}
}

// Many callers at once pause, resume and start commands, and the count stays right.
func TestPausesFromManySides(t *testing.T) {
	r := newRig(t)
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for range 25 {
				if err := r.c.Pause(r.ctx, false); err != nil && !errors.Is(err, holder.ErrBusy) {
					t.Error(err)
				}
				if err := r.c.Resume(r.ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for n := range 20 {
		id := string(rune('a' + n))
		_, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: id}, process("echo", id))
		if errors.Is(err, holder.ErrPaused) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		st := r.wait(id)
		r.want(st, 0, sandbox.ExecReasonExited)
		if out := r.output(st, "stdout"); out != id+"\n" {
			t.Errorf("%s says %q", id, out)
		}
	}
	all.Wait()
	if err := r.c.Resume(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.wantNobody()
}
