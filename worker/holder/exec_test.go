package holder_test

import (
	"errors"
	"strings"
	"testing"

	"quarry/worker/sandbox"
)

func TestExecsAndTheirEnds(t *testing.T) {
	r := newRig(t)
	for _, c := range []struct {
		command, out, err string
		code              int
		reason            string
	}{
		{"echo hi; echo two >&2", "hi\n", "two\n", 0, sandbox.ExecReasonExited},
		{"true", "", "", 0, sandbox.ExecReasonExited},
		{"exit 1", "", "", 1, sandbox.ExecReasonExited},
		{"exit 126", "", "", 126, sandbox.ExecReasonExited},
		{"exit 127", "", "", 127, sandbox.ExecReasonExited},
		{"exit 137", "", "", 137, sandbox.ExecReasonExited},
		{"kill -9 $$", "", "", 137, sandbox.ExecReasonSignaled},
		{`printf 'a\0b\377\376\n'`, "a\x00b\xff\xfe\n", "", 0, sandbox.ExecReasonExited},
		{"cat", "", "", 0, sandbox.ExecReasonExited}, // its stdin is empty
		{"cat <&-; echo $?", "1\n", "cat: read error: Bad file descriptor\n", 0, sandbox.ExecReasonExited},
	} {
		st := r.run(sandbox.ExecSpec{}, c.command)
		r.want(st, c.code, c.reason)
		if out, err := r.output(st, "stdout"), r.output(st, "stderr"); out != c.out || err != c.err {
			t.Errorf("%s: stdout %q, stderr %q, want %q and %q", c.command, out, err, c.out, c.err)
		}
		if !st.Done() {
			t.Errorf("%s: %s", c.command, describe(st))
		}
	}
	r.wantNobody()
}

func TestWhatCannotRun(t *testing.T) {
	r := newRig(t)
	r.run(sandbox.ExecSpec{}, "echo text > /tmp/text; printf '#!/bin/nothere\n' > /tmp/script; chmod +x /tmp/script")
	for _, c := range []struct {
		argv   string
		cwd    string
		code   int
		reason string
	}{
		{"nothere", "/", 127, sandbox.ExecReasonNotFound},
		{"/bin/nothere", "/", 127, sandbox.ExecReasonNotFound},
		{"/bin/true/nothere", "/", 127, sandbox.ExecReasonNotFound},
		{"/bin/true", "/nothere", 127, sandbox.ExecReasonNotFound},
		{"/bin/true", "/tmp/text", 127, sandbox.ExecReasonNotFound},
		{"/" + strings.Repeat("nothere/", 10_000), "/", 127, sandbox.ExecReasonNotFound}, // the reason is behind the name
		{"/tmp/script", "/", 127, sandbox.ExecReasonNotFound},
		{"/tmp/text", "/", 126, sandbox.ExecReasonNoExec},
		{"/bin", "/", 126, sandbox.ExecReasonNoExec},
	} {
		p := process(c.argv)
		p.WorkDir = c.cwd
		id := r.id()
		st, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: id, Argv: p.Argv}, p)
		if err != nil {
			t.Fatalf("%s: %v", c.argv, err)
		}
		r.want(st, c.code, c.reason)
		if st.Message == "" || len(st.Message) > sandbox.MaxMessage || !st.Done() {
			t.Errorf("%s: %s", c.argv, describe(st))
		}
	}
	r.wantNobody()
}

func TestWhatIsNoExec(t *testing.T) {
	r := newRig(t)
	for name, s := range map[string]sandbox.ExecSpec{
		"no id": {}, "odd id": {ID: "a/b"}, "long id": {ID: string(make([]byte, 200))},
		"timeout": {ID: "a", Timeout: -1}, "output": {ID: "a", MaxOutput: 1 << 40}, "role": {ID: "a", Role: "boss"},
		"window": {ID: "a", PTY: &sandbox.Window{Rows: -3, Cols: 80}}, "large window": {ID: "a", PTY: &sandbox.Window{Cols: 70000}},
		"stdin": {ID: "a", Stdin: make([]byte, 2<<20)},
	} {
		if _, err := r.c.Exec(r.ctx, s, process("true")); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: "a"}, process()); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("no command: %v", err)
	}
	if _, err := r.c.WaitExec(r.ctx, "other", 0, 0); !errors.Is(err, sandbox.ErrExecUnknown) {
		t.Errorf("an exec that is not there: %v", err)
	}
	// Ids are names of folders.
	for _, id := range []string{"..", ".", "-", "a"} {
		if _, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: id}, process("echo", "hi")); err != nil {
			t.Fatal(err)
		}
		if st := r.wait(id); r.output(st, "stdout") != "hi\n" {
			t.Errorf("%q: %s", id, describe(st))
		}
	}
}
