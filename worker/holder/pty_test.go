package holder_test

import (
	"strings"
	"testing"

	"quarry/worker/sandbox"
)

func (r *rig) terminal(command string) string {
	r.Helper()
	id := r.start(sandbox.ExecSpec{PTY: &sandbox.Window{Rows: 24, Cols: 80}, OpenStdin: true}, command).ID
	return id
}

// typeIn gives an exec what follows on its stdin.
func (r *rig) typeIn(id string, offset *int64, text string) {
	r.Helper()
	next, err := r.c.Stdin(r.ctx, id, *offset, []byte(text), false)
	if err != nil {
		r.Fatal(err)
	}
	*offset = next
}

func TestATerminal(t *testing.T) {
	r := newRig(t)
	id := r.terminal("trap 'stty size; echo resized' WINCH; test -t 0 && test -t 2 && stty size; until read line; do :; done; echo got $line; while read more; do echo $more; done; exit 4")
	r.waitOutput(id, "24 80")
	if err := r.c.Resize(r.ctx, id, sandbox.Window{Rows: 50, Cols: 132}); err != nil {
		t.Fatal(err)
	}
	var at int64
	r.waitOutput(id, "50 132\r\nresized")
	r.typeIn(id, &at, "hello\n")
	r.waitOutput(id, "got hello")
	r.typeIn(id, &at, "end\n\x04")
	st := r.wait(id)
	r.want(st, 4, sandbox.ExecReasonExited)
	if out := r.output(st, "stdout"); !strings.HasPrefix(out, "24 80") || !strings.HasSuffix(out, "end\r\nend\r\n") {
		t.Errorf("got %q", out)
	}
	if st.Stderr.Kept != 0 || !st.Done() {
		t.Error(describe(st))
	}
	r.wantNobody()
}

// What is typed reaches what runs in front: a shell's command, and not the shell.
func TestTypedSignals(t *testing.T) {
	r := newRig(t)
	id := r.terminal("exec sh -i")
	var at int64
	r.typeIn(id, &at, "sleep 1000; echo first $?\n")
	r.waitFor("sleep", func() bool { return strings.Contains(strings.Join(r.commands(), " "), "sleep") })
	r.typeIn(id, &at, "\x03")
	r.waitFor("the end of sleep", func() bool { return !strings.Contains(strings.Join(r.commands(), " "), "sleep") })
	r.typeIn(id, &at, "echo second; exit 6\n")
	st := r.wait(id)
	r.want(st, 6, sandbox.ExecReasonExited)
	if out := r.output(st, "stdout"); !strings.Contains(out, "second\r\n") {
		t.Errorf("got %q", out)
	}
	r.wantNobody()
}

// A program that takes characters as they are gets them.
func TestRawTerminal(t *testing.T) {
	r := newRig(t)
	id := r.terminal("stty raw -echo; echo ready; head -c 3 | od -An -tx1")
	r.waitOutput(id, "ready")
	var at int64
	r.typeIn(id, &at, "\x03\x04\x1c")
	st := r.wait(id)
	r.want(st, 0, sandbox.ExecReasonExited)
	if out := r.output(st, "stdout"); !strings.Contains(out, "03 04 1c") {
		t.Errorf("got %q", out)
	}
}

// Much output through a terminal comes whole, and its end is not lost.
func TestATerminalsOutput(t *testing.T) {
	r := newRig(t)
	for range 5 {
		st := r.run(sandbox.ExecSpec{PTY: &sandbox.Window{Rows: 24, Cols: 80}}, "seq 5000; echo end")
		r.want(st, 0, sandbox.ExecReasonExited)
		out := r.output(st, "stdout")
		if lines := strings.Count(out, "\r\n"); lines != 5001 || !strings.HasSuffix(out, "\r\nend\r\n") {
			t.Fatalf("%d lines, ending in %q", lines, out[max(0, len(out)-20):])
		}
	}
	if err := r.c.Resize(r.ctx, r.run(sandbox.ExecSpec{}, "true").ID, sandbox.Window{Rows: 1, Cols: 1}); err == nil {
		t.Error("a pipe has a size")
	}
	r.want(r.run(sandbox.ExecSpec{PTY: &sandbox.Window{}, Timeout: 500}, "trap '' TERM HUP; sleep 60 & wait; sleep 60"), 137, sandbox.ExecReasonTimeout)
	r.wantNobody()
}
