package holder_test

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"quarry/worker/sandbox"
)

// Sizes that pipes and buffers have trouble with, to one stream and the other, by
// processes that exit at once after writing, 500 times; and what is more than is kept,
// which takes longer, once to each (no. 80 of the collected bugs).
func TestOutputIsExact(t *testing.T) {
	r := newRig(t)
	r.run(sandbox.ExecSpec{}, "head -c 300000 /dev/urandom > /tmp/data")
	all := r.run(sandbox.ExecSpec{}, "cat /tmp/data")
	data := r.output(all, "stdout")
	if len(data) != 300000 {
		t.Fatalf("data has %d bytes", len(data))
	}
	sizes := []int{0, 1, 64<<10 - 1, 64 << 10, 64<<10 + 1, 300000}
	for i := range 500 {
		n := sizes[i%len(sizes)]
		stream, to := "stdout", ""
		if i/len(sizes)%2 == 1 {
			stream, to = "stderr", " >&2"
		}
		st := r.run(sandbox.ExecSpec{}, fmt.Sprintf("head -c %d /tmp/data%s", n, to))
		r.want(st, 0, sandbox.ExecReasonExited)
		if out := r.output(st, stream); out != data[:n] {
			t.Fatalf("exec %d: %d bytes of %s, want %d", i, len(out), stream, n)
		}
		if st.Stdout.Kept+st.Stderr.Kept != int64(n) || st.Stdout.Dropped+st.Stderr.Dropped != 0 || !st.Done() {
			t.Fatalf("exec %d: %s", i, describe(st))
		}
	}
	much := int64(256<<20 + len(data))
	for i := range 2 {
		stream, to := "stdout", ""
		if i == 1 {
			stream, to = "stderr", " >&2"
		}
		st := r.run(sandbox.ExecSpec{MaxOutput: int64(len(data))}, "{ cat /tmp/data; dd if=/dev/zero bs=1M count=256 2>/dev/null; }"+to)
		r.want(st, 0, sandbox.ExecReasonExited)
		o, other := st.Stdout, st.Stderr
		if i == 1 {
			o, other = other, o
		}
		if out := r.output(st, stream); out != data || o.Kept+o.Dropped != much || !st.Done() || other.Kept+other.Dropped != 0 {
			t.Fatalf("%d bytes: %d bytes of %s, %s", much, len(out), stream, describe(st))
		}
	}
	r.wantNobody()
}

// What comes after the limit is counted to the byte, and the writer is never held up.
func TestOutputIsBounded(t *testing.T) {
	r := newRig(t)
	const most, all = 1000, 64 << 20
	st := r.run(sandbox.ExecSpec{MaxOutput: most}, fmt.Sprintf("yes | head -c %d; yes no | head -c %d >&2", all, most))
	r.want(st, 0, sandbox.ExecReasonExited)
	if o := st.Stdout; o.Kept != most || o.Dropped != all-most || !o.Closed {
		t.Errorf("stdout %+v", o)
	}
	if o := st.Stderr; o.Kept != most || o.Dropped != 0 || !o.Closed {
		t.Errorf("stderr %+v", o)
	}
	if out := r.output(st, "stdout"); out != strings.Repeat("y\n", most/2) {
		t.Errorf("kept %q", out[:20])
	}
	if b, err := os.ReadFile(r.dir + "/exec/x" + st.ID + "/stdout"); err != nil || len(b) != most {
		t.Errorf("the file has %d bytes, %v", len(b), err)
	}
}

// A child that keeps the pipe open is no part of the command: its exec has exited.
// What it writes soon is still kept, and what it writes later does not hold it up.
func TestAChildThatStays(t *testing.T) {
	r := newRig(t)
	st := r.run(sandbox.ExecSpec{}, "(sleep 0.2; echo late; sleep 2; echo never; echo done > /tmp/done) & echo hi")
	r.want(st, 0, sandbox.ExecReasonExited)
	if out := r.output(st, "stdout"); !strings.HasPrefix(out, "hi\n") {
		t.Errorf("stdout %q", out)
	}
	if st.Ran > 1500 {
		t.Errorf("it ran for %d ms", st.Ran)
	}
	r.waitFor("the output to close", func() bool {
		st = r.wait(st.ID)
		return st.Done()
	})
	if out := r.output(st, "stdout"); out != "hi\nlate\n" {
		t.Errorf("closed with %q", out)
	}
	r.waitFor("the child to go on", func() bool {
		return r.output(r.run(sandbox.ExecSpec{}, "cat /tmp/done"), "stdout") == "done\n"
	})
	if st = r.wait(st.ID); r.output(st, "stdout") != "hi\nlate\n" {
		t.Errorf("afterwards %s", describe(st))
	}
	st = r.run(sandbox.ExecSpec{}, "yes & echo $!; sleep 0.1") // one that writes for ever
	r.want(st, 0, sandbox.ExecReasonExited)
	r.run(sandbox.ExecSpec{}, "killall yes")
	r.waitFor("yes to end", func() bool { return len(r.commands()) == 0 })
}

func TestStdin(t *testing.T) {
	r := newRig(t)
	big := bytes.Repeat([]byte("0123456789abcde\n"), 64<<10) // a MiB, more than a pipe holds
	st := r.run(sandbox.ExecSpec{Stdin: big}, "md5sum; wc -c < /dev/null")
	r.want(st, 0, sandbox.ExecReasonExited)
	sum := r.output(st, "stdout")
	// The same in pieces, some of them twice.
	id := r.start(sandbox.ExecSpec{Stdin: big[:10], OpenStdin: true}, "md5sum; wc -c < /dev/null").ID
	next := int64(10)
	for n := range 20 {
		to := int64(len(big)) * int64(n+1) / 20
		from := max(10, next-100) // what was given before is passed over
		got, err := r.c.Stdin(r.ctx, id, from, big[from:to], n == 19)
		if err != nil || got != to {
			t.Fatalf("at %d: %v, at %d", next, err, got)
		}
		next = got
	}
	if got, err := r.c.Stdin(r.ctx, id, next, nil, true); err != nil && !strings.Contains(err.Error(), "ended") || got != next {
		t.Errorf("the end once more: %d, %v", got, err)
	}
	if st = r.wait(id); r.output(st, "stdout") != sum {
		t.Errorf("got %q, want %q", r.output(st, "stdout"), sum)
	}
	// Who does not read is waited for, and the offset tells how much was taken.
	id = r.start(sandbox.ExecSpec{OpenStdin: true}, "sleep 1000").ID
	ctx, cancel := withTimeout(r.ctx, 300*time.Millisecond)
	defer cancel()
	if _, err := r.c.Stdin(ctx, id, 0, big, false); err != nil {
		t.Errorf("a full pipe: %v", err)
	}
	if _, err := r.c.Stdin(r.ctx, id, 1<<40, []byte("x"), false); err == nil || !strings.Contains(err.Error(), "go on") {
		t.Errorf("a gap: %v", err)
	}
	if err := r.c.Signal(r.ctx, id, 9); err != nil {
		t.Fatal(err)
	}
	r.want(r.wait(id), 137, sandbox.ExecReasonKilled)
	if _, err := r.c.Stdin(r.ctx, id, 1<<20, []byte("x"), false); err == nil {
		t.Error("an exec that has ended takes stdin")
	}
	r.wantNobody()
}

// Much output is as exact as little, on both streams at once.
func TestMuchOutputIsExact(t *testing.T) {
	r := newRig(t)
	const line, all = "0123456789abcde\n", 64 << 20
	st := r.run(sandbox.ExecSpec{MaxOutput: all}, fmt.Sprintf("yes %s | head -c %d >&2 & yes %[1]s | head -c %[2]d; wait", line[:15], all))
	r.want(st, 0, sandbox.ExecReasonExited)
	for stream, o := range map[string]sandbox.Output{"stdout": st.Stdout, "stderr": st.Stderr} {
		if o.Kept != all || o.Dropped != 0 || r.output(st, stream) != strings.Repeat(line, all/len(line)) {
			t.Errorf("%s is not what was written: %+v", stream, o)
		}
	}
}
