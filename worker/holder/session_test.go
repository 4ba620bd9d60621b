package holder_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
	"quarry/worker/sentry/sentrytest"
)

// newBashRig is a sandbox whose image has bash.
func newBashRig(t testing.TB) *rig {
	root := sentrytest.Root(t)
	sentrytest.AddBash(t, root)
	return startRig(t, configIn(t, root))
}

// say starts a command of the session called s.
func (r *rig) say(s sandbox.ExecSpec, text string) sandbox.ExecState {
	r.Helper()
	s.ID, s.Session, s.Shell = r.id(), "s", text
	st, err := r.c.Exec(r.ctx, s, process())
	if err != nil {
		r.Fatalf("%q: %v", text, err)
	}
	return st
}

// said runs it to its end and compares.
func (r *rig) said(s sandbox.ExecSpec, text string, code int, reason, out, errs string) sandbox.ExecState {
	r.Helper()
	st := r.wait(r.say(s, text).ID)
	r.want(st, code, reason)
	if gotOut, gotErr := r.output(st, "stdout"), r.output(st, "stderr"); gotOut != out || gotErr != errs || !st.Done() {
		r.Errorf("%q: stdout %q, stderr %q, want %q and %q: %s", text, gotOut, gotErr, out, errs, describe(st))
	}
	return st
}

func TestASessionKeepsWhatItsCommandsDo(t *testing.T) {
	r := newBashRig(t)
	r.said(sandbox.ExecSpec{}, "cd /tmp; export A=1; { sleep 1000 & } 2>/dev/null; echo $PPID", 0, sandbox.ExecReasonExited, "0\n", "")
	r.said(sandbox.ExecSpec{}, "pwd; echo $A; jobs -p | wc -l; false", 1, sandbox.ExecReasonExited, "/tmp\n1\n1\n", "")
	r.said(sandbox.ExecSpec{}, "cat; printf 'a\\0b\\377'; (exit 3)", 3, sandbox.ExecReasonExited, "a\x00b\xff", "")
	st := r.said(sandbox.ExecSpec{}, "echo '", 2, sandbox.ExecReasonSyntax, "", "bash: line 1: unexpected EOF while looking for matching `''\n")
	if !strings.Contains(st.Message, "unexpected EOF") {
		t.Errorf("%q", st.Message)
	}
	r.said(sandbox.ExecSpec{}, "pwd", 0, sandbox.ExecReasonExited, "/tmp\n", "")
	// The same id is the same command.
	s := sandbox.ExecSpec{ID: "once", Session: "s", Shell: "echo x >> /tmp/once"}
	for range 3 {
		if _, err := r.c.Exec(r.ctx, s, process()); err != nil {
			t.Fatal(err)
		}
	}
	r.wait("once")
	r.said(sandbox.ExecSpec{}, "cat /tmp/once", 0, sandbox.ExecReasonExited, "x\n", "")
	// More than is kept.
	st = r.wait(r.say(sandbox.ExecSpec{MaxOutput: 1000}, "yes | head -c 500000").ID)
	if st.Stdout.Kept != 1000 || st.Stdout.Dropped != 499000 || !st.Stdout.Closed {
		t.Error(describe(st))
	}
}

func TestATimeoutEndsTheCommandAndNotTheSession(t *testing.T) {
	r := newBashRig(t)
	r.said(sandbox.ExecSpec{}, "cd /tmp; { sleep 1000 & } 2>/dev/null", 0, sandbox.ExecReasonExited, "", "")
	st := r.wait(r.say(sandbox.ExecSpec{Timeout: 2000}, "echo a; sleep 1000; echo b").ID)
	if st.Reason != sandbox.ExecReasonTimeout || *st.ExitCode != 137 || r.output(st, "stdout") != "a\n" || st.Message != "" {
		t.Error(describe(st))
	}
	st = r.wait(r.say(sandbox.ExecSpec{Timeout: 2000, KillGrace: 60_000}, "sh -c 'trap \"echo term; exit\" TERM; while :; do sleep 0.01; done'; echo b").ID)
	if st.Reason != sandbox.ExecReasonTimeout || r.output(st, "stdout") != "term\n" {
		t.Errorf("%s: %q", describe(st), r.output(st, "stdout"))
	}
	// True comes first: an interrupt keeps a status of 128 and more, and until something
	// of the command has ended bash has that of the command before.
	started := r.say(sandbox.ExecSpec{}, "true; echo began; while :; do :; done")
	if _, err := r.c.WaitExec(r.ctx, started.ID, 0, 0); err != nil {
		t.Fatal(err)
	}
	if err := r.c.Signal(r.ctx, started.ID, 2); err != nil {
		t.Fatal(err)
	}
	r.want(r.wait(started.ID), 130, sandbox.ExecReasonExited)
	started = r.say(sandbox.ExecSpec{}, "true; echo began; sleep 1000")
	if _, err := r.c.WaitExec(r.ctx, started.ID, 0, 0); err != nil {
		t.Fatal(err)
	}
	r.waitFor("both of sleep", func() bool { // killed before it began, the status would be bash's own
		n := 0
		for _, name := range r.commands() {
			if name == "sleep" {
				n++
			}
		}
		return n == 2
	})
	if err := r.c.Signal(r.ctx, started.ID, 9); err != nil {
		t.Fatal(err)
	}
	r.want(r.wait(started.ID), 137, sandbox.ExecReasonKilled)
	r.said(sandbox.ExecSpec{}, "pwd; jobs -p | wc -l", 0, sandbox.ExecReasonExited, "/tmp\n1\n", "")
	// One that cannot be had without the session.
	st = r.wait(r.say(sandbox.ExecSpec{Timeout: 2000}, "mkfifo p; trap '' INT 41; read x <>p").ID)
	if st.Reason != sandbox.ExecReasonTimeout || !strings.Contains(st.Message, "session ended") {
		t.Error(describe(st))
	}
	r.said(sandbox.ExecSpec{}, "pwd", 0, sandbox.ExecReasonExited, "/\n", "")
}

func TestASessionEndsAndBeginsAgain(t *testing.T) {
	r := newBashRig(t)
	st := r.said(sandbox.ExecSpec{}, "cd /tmp; exit 4", 4, sandbox.ExecReasonExited, "", "exit\n")
	if !strings.Contains(st.Message, "session ended") {
		t.Error(describe(st))
	}
	r.said(sandbox.ExecSpec{}, "pwd", 0, sandbox.ExecReasonExited, "/\n", "")
	st = r.said(sandbox.ExecSpec{}, "kill -9 $$", 137, sandbox.ExecReasonSignaled, "", "")
	if st.Signal != 9 {
		t.Error(describe(st))
	}
	r.said(sandbox.ExecSpec{}, "pwd", 0, sandbox.ExecReasonExited, "/\n", "")
}

func TestWhatIsNoSession(t *testing.T) {
	r := newBashRig(t)
	for name, s := range map[string]sandbox.ExecSpec{
		"a terminal": {PTY: &sandbox.Window{Rows: 1, Cols: 1}}, "stdin": {Stdin: []byte("x")}, "an open stdin": {OpenStdin: true},
	} {
		s.ID, s.Session, s.Shell = r.id(), "s", "true"
		if _, err := r.c.Exec(r.ctx, s, process()); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: "a", Session: "a/b", Shell: "true"}, process()); !errors.Is(err, sandbox.ErrInvalid) {
		t.Error(err)
	}
	st := r.say(sandbox.ExecSpec{User: "root"}, "echo began; sleep 1000")
	if _, err := r.c.WaitExec(r.ctx, st.ID, 0, 0); err != nil {
		t.Fatal(err)
	}
	var busy *sandbox.Busy
	_, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: "b", Session: "s", Shell: "true"}, process())
	if !errors.As(err, &busy) || !errors.Is(err, sandbox.ErrRate) {
		t.Error(err)
	}
	if err := r.c.Signal(r.ctx, st.ID, 9); err != nil {
		t.Fatal(err)
	}
	r.wait(st.ID)
	for user, want := range map[string]error{"root": nil, "": nil, "other": sandbox.ErrInvalid} {
		id := r.id()
		_, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: id, Session: "s", Shell: "true", User: user}, process())
		if !errors.Is(err, want) {
			t.Errorf("user %q: %v", user, err)
		}
		if err == nil {
			r.wait(id)
		}
	}
	for i := range 20 {
		id := r.id()
		_, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: id, Session: id, Shell: "true"}, process())
		if want := error(nil); i >= 15 {
			want = sandbox.ErrRate
			if !errors.Is(err, want) {
				t.Errorf("session %d: %v", i, err)
			}
		} else if err != nil {
			t.Errorf("session %d: %v", i, err)
		} else {
			r.wait(id)
		}
	}
	plain := newRig(t) // its image has no bash
	st = plain.wait(plain.say(sandbox.ExecSpec{}, "true").ID)
	plain.want(st, 127, sandbox.ExecReasonNotFound)
	if !strings.Contains(st.Message, "has no bash") {
		t.Error(describe(st))
	}
}

// The daemon that began a session's command may end; the next one finds all of it.
func TestASessionOutlivesTheDaemon(t *testing.T) {
	r := newBashRig(t)
	r.said(sandbox.ExecSpec{}, "cd /tmp; B=2", 0, sandbox.ExecReasonExited, "", "")
	st := r.say(sandbox.ExecSpec{}, "sleep 0.3; echo late; pwd; (exit 5)")
	r.c.Close()
	time.Sleep(10 * time.Millisecond)
	c, err := holder.Connect(r.ctx, r.dir)
	if err != nil {
		t.Fatal(err)
	}
	r.c = c
	st = r.wait(st.ID)
	r.want(st, 5, sandbox.ExecReasonExited)
	if out := r.output(st, "stdout"); out != "late\n/tmp\n" {
		t.Errorf("%q", out)
	}
	r.said(sandbox.ExecSpec{}, "echo $B", 0, sandbox.ExecReasonExited, "2\n", "")
	if err := r.c.Pause(r.ctx, false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: "p", Session: "s", Shell: "true"}, process()); !errors.Is(err, holder.ErrPaused) {
		t.Error(err)
	}
	if err := r.c.Resume(r.ctx); err != nil {
		t.Fatal(err)
	}
	r.said(sandbox.ExecSpec{}, "echo $B", 0, sandbox.ExecReasonExited, "2\n", "")
}
