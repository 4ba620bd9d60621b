package node

import (
	"testing"

	"quarry/worker/sandbox"
)

// A command that failed is told the end of its sandbox when memory ran out: the kernel
// may have killed it before all the others.
func TestWhoseEndACommandsIs(t *testing.T) {
	zero, one, killed := 0, 1, 137
	exited := func(code *int, signal int) sandbox.ExecState {
		return sandbox.ExecState{State: sandbox.ExecExited, ExitCode: code, Signal: signal}
	}
	for _, c := range []struct {
		name     string
		st       sandbox.ExecState
		oomKills int64
		want     bool
	}{
		{"killed, with memory", exited(&killed, 9), 0, false},
		{"killed, without memory", exited(&killed, 9), 1, true},
		{"its child was killed", exited(&one, 0), 1, true},
		{"it succeeded before", exited(&zero, 0), 1, false},
		{"it runs", sandbox.ExecState{State: sandbox.ExecRunning}, 1, false},
		{"lost", sandbox.ExecState{State: sandbox.ExecUnknown, Reason: sandbox.ExecReasonLost}, 0, true},
	} {
		if got := endsWithAll(c.st, func() int64 { return c.oomKills }); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}
