package holder_test

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
)

func withTimeout(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, d)
}

// After a timeout nothing of the command is left, whatever it does about it.
func TestTimeouts(t *testing.T) {
	r := newRig(t)
	for name, c := range map[string]struct {
		command string
		grace   int64
		code    int
	}{
		"a child that is waited for":   {"sleep 60 & wait", 0, 137},
		"without end":                  {"yes", 0, 137},
		"SIGTERM is enough":            {"sleep 60", 60_000, 143},
		"it cleans up":                 {"trap 'echo bye; exit 3' TERM; while :; do sleep 0.01; done", 60_000, 3},
		"SIGTERM is ignored":           {"trap '' TERM; sleep 60; sleep 60", 100, 137},
		"children in other sessions":   {"setsid sleep 60 & setsid sh -c 'setsid sleep 61 & sleep 62' & sleep 63", 0, 137},
		"those, with SIGTERM":          {"setsid sleep 60 & setsid sh -c 'setsid sleep 61 & sleep 62' & sleep 63", 100, 143},
		"the leader ends, a child not": {"trap 'exit 4' TERM; sh -c \"trap '' TERM; while :; do sleep 0.1; done\" & wait", 60_000, 4},
	} {
		st := r.run(sandbox.ExecSpec{Timeout: 1500, KillGrace: c.grace, MaxOutput: 100}, c.command)
		if st.Reason != sandbox.ExecReasonTimeout || st.ExitCode == nil || *st.ExitCode != c.code || st.Ran < 1500 {
			t.Errorf("%s: %s, ran %d", name, describe(st), st.Ran)
		}
		if names := r.commands(); len(names) > 0 {
			t.Errorf("%s: left are %v", name, names)
		}
	}
	r.want(r.run(sandbox.ExecSpec{Timeout: 60_000}, "true"), 0, sandbox.ExecReasonExited)
	r.wantNobody()
}

func TestSignals(t *testing.T) {
	r := newRig(t)
	id := r.start(sandbox.ExecSpec{}, "trap 'echo usr1' USR1; trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done").ID
	r.waitOutput(id, "ready")
	for _, sig := range []unix.Signal{unix.SIGUSR1, unix.SIGTERM} {
		if err := r.c.Signal(r.ctx, id, int(sig)); err != nil {
			t.Fatal(err)
		}
		if sig == unix.SIGUSR1 {
			r.waitOutput(id, "usr1")
		}
	}
	r.want(r.wait(id), 9, sandbox.ExecReasonExited)
	for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
		id = r.start(sandbox.ExecSpec{}, "setsid sleep 70 & echo ready; sleep 60").ID
		r.waitOutput(id, "ready")
		if err := r.c.Signal(r.ctx, id, int(sig)); err != nil {
			t.Fatal(err)
		}
		r.want(r.wait(id), 128+int(sig), sandbox.ExecReasonKilled)
		if sig == unix.SIGTERM {
			r.run(sandbox.ExecSpec{}, "killall sleep") // a signal goes to the group, a kill to all
		}
		r.waitFor("nobody to be left", func() bool { return len(r.commands()) == 0 })
	}
	for _, sig := range []int{0, -1, 65} {
		if err := r.c.Signal(r.ctx, id, sig); err == nil {
			t.Errorf("signal %d", sig)
		}
	}
	if err := r.c.Signal(r.ctx, id, 15); err == nil {
		t.Error("an exec that has ended takes signals")
	}
	r.wantNobody()
}

// A second kill does not wait for the grace of the first.
func TestAKillInTheGraceOfATimeout(t *testing.T) {
	r := newRig(t)
	id := r.start(sandbox.ExecSpec{Timeout: 2000, KillGrace: 3_600_000}, "trap 'echo term' TERM; while :; do sleep 0.01; done").ID
	r.waitOutput(id, "term")
	if err := r.c.Signal(r.ctx, id, 9); err != nil {
		t.Fatal(err)
	}
	r.want(r.wait(id), 137, sandbox.ExecReasonTimeout)
	r.wantNobody()
}
