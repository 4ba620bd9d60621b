package holder_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

// daemonOf starts a sleep that has left its session and lost its parent, as daemons do.
func daemonOf(seconds string) string {
	return "(setsid sleep " + seconds + " >/dev/null 2>&1 </dev/null &); "
}

// looked lets the holder find out that a command began alone before it is not any more:
// the two run beside each other.
const looked = "sleep 1; "

// sleeping lists how long the sleeps in the guest are.
func (r *rig) sleeping() []string {
	r.Helper()
	st := r.run(sandbox.ExecSpec{}, "for f in /proc/[0-9]*/cmdline; do tr '\\0' ' ' <$f; echo; done 2>/dev/null | sed -n 's/^sleep \\([0-9]*\\) *$/\\1/p' | sort")
	return strings.Fields(r.output(st, "stdout"))
}

// A command that began alone takes its daemons along at its timeout.
func TestADaemonDoesNotOutliveATimeout(t *testing.T) {
	r := newRig(t)
	for range 2 {
		st := r.run(sandbox.ExecSpec{Timeout: 3000}, looked+daemonOf("70")+daemonOf("71")+"sleep 72")
		if st.Reason != sandbox.ExecReasonTimeout {
			t.Error(describe(st))
		}
		r.wantNobody()
	}
	// One that ends by itself leaves them, and they are not the next one's.
	r.run(sandbox.ExecSpec{Timeout: 60_000}, looked+daemonOf("73")+"true")
	r.run(sandbox.ExecSpec{Timeout: 1000}, "sleep 74")
	if got := r.sleeping(); !slices.Equal(got, []string{"73"}) {
		t.Errorf("left are %v, want what an earlier command has left", got)
	}
}

// What others have begun beside a command is theirs.
func TestADaemonOfAnotherOutlivesATimeout(t *testing.T) {
	r := newRig(t)
	id := r.start(sandbox.ExecSpec{Timeout: 5000}, looked+"echo ready; sleep 70").ID
	r.waitOutput(id, "ready")
	r.run(sandbox.ExecSpec{}, daemonOf("71")+"true")
	if st := r.wait(id); st.Reason != sandbox.ExecReasonTimeout {
		t.Error(describe(st))
	}
	if got := r.sleeping(); !slices.Equal(got, []string{"71"}) {
		t.Errorf("left are %v", got)
	}
}

// A file call under way is nothing that a command has left.
func TestAHelperOutlivesATimeout(t *testing.T) {
	r := newRig(t)
	program, err := os.Open(helperProgram(t))
	if err != nil {
		t.Fatal(err)
	}
	defer program.Close()
	in, feed, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	defer feed.Close()
	id := r.start(sandbox.ExecSpec{Timeout: 5000}, looked+daemonOf("72")+"echo ready; sleep 73").ID
	r.waitOutput(id, "ready")
	code := make(chan int, 1)
	go func() { // ends with feed
		st, err := r.c.RunHelper(r.ctx, holder.Helper{Process: process("echo", "7"), Program: program, Stdin: in})
		if err != nil {
			t.Error(err)
		}
		code <- st.Code
	}()
	if st := r.wait(id); st.Reason != sandbox.ExecReasonTimeout {
		t.Error(describe(st))
	}
	feed.Close()
	if got := <-code; got != 7 {
		t.Errorf("the helper ended with %d", got)
	}
	r.wantNobody()
}
