package holder_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

// A disk that is full drops output, to the byte, and stops nothing.
func TestAFullDisk(t *testing.T) {
	r := newRig(t)
	const disk, all = 256 << 10, 4 << 20
	dir := filepath.Join(r.dir, "exec")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, fmt.Sprintf("size=%d", disk)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	for range 3 { // the first fills it
		st := r.run(sandbox.ExecSpec{}, fmt.Sprintf("yes | head -c %d; exit 3", all))
		r.want(st, 3, sandbox.ExecReasonExited)
		if o := st.Stdout; o.Kept+o.Dropped != all || o.Kept > disk || !o.Closed {
			t.Errorf("stdout %+v", o)
		}
		for i, c := range []byte(r.output(st, "stdout")) {
			if c != "y\n"[i%2] {
				t.Fatalf("byte %d is %q", i, c)
			}
		}
	}
	if err := unix.Unmount(dir, 0); err != nil {
		t.Fatal(err)
	}
	r.wantNobody()
}

// A command that writes a gigabyte is not held up, and the holder stays small.
func TestAGigabyteOfOutput(t *testing.T) {
	r := newRig(t)
	const all = 1 << 30
	st := r.run(sandbox.ExecSpec{MaxOutput: 1 << 20}, fmt.Sprintf("dd if=/dev/zero bs=1M count=%d 2>/dev/null", all>>20))
	r.want(st, 0, sandbox.ExecReasonExited)
	if o := st.Stdout; o.Kept != 1<<20 || o.Dropped != all-1<<20 {
		t.Errorf("stdout %+v", o)
	}
}

// Commands at once do not mix.
func TestManyAtOnce(t *testing.T) {
	r := newRig(t)
	var all sync.WaitGroup
	for n := range 50 {
		id := fmt.Sprintf("many%d", n)
		all.Go(func() {
			command := fmt.Sprintf("for i in $(seq 200); do echo %s; done; exit %d", id, n)
			if _, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: id}, process("/bin/sh", "-c", command)); err != nil {
				t.Error(err)
				return
			}
			st, err := r.c.WaitExec(r.ctx, id, 1<<62, 1<<62)
			if err != nil || st.ExitCode == nil || *st.ExitCode != n {
				t.Errorf("%s: %s, %v", id, describe(st), err)
			}
			out := r.output(st, "stdout")
			for len(out) > 0 && out[:min(len(out), len(id)+1)] == id+"\n" {
				out = out[len(id)+1:]
			}
			if out != "" || st.Stdout.Kept != int64(200*(len(id)+1)) {
				t.Errorf("%s says %q", id, out[:min(len(out), 100)])
			}
		})
	}
	all.Wait()
	if list, err := r.c.Execs(r.ctx); err != nil || len(list) != 50 {
		t.Errorf("%d execs, %v", len(list), err)
	}
	r.wantNobody()
}

// More than may run at once are refused by type, and nothing is lost of the others.
func TestTooManyAtOnce(t *testing.T) {
	r := newRig(t)
	var busy *sandbox.Busy
	started := 0
	for n := range holder.MaxRunning + 1 {
		_, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: fmt.Sprintf("s%d", n)}, process("sleep", "1000"))
		if errors.As(err, &busy) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		started++
	}
	if started != holder.MaxRunning || busy == nil || busy.RetryAfter == 0 {
		t.Errorf("%d were started, then %v", started, busy)
	}
	if e, err := r.c.End(r.ctx); err != nil || e.Execs != holder.MaxRunning {
		t.Errorf("%+v, %v", e, err)
	}
	list, err := r.c.Execs(r.ctx)
	if err != nil || len(list) != holder.MaxRunning {
		t.Fatalf("%d execs, %v", len(list), err)
	}
	for _, st := range list {
		if st.State != sandbox.ExecUnknown || !st.Done() {
			t.Errorf("%s: %s", st.ID, describe(st))
		}
	}
}

// A helper runs with what it is given, and is killed when nobody wants it any more.
func TestHelpers(t *testing.T) {
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
	out, to, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	defer out.Close()
	if _, err := feed.WriteString("through"); err != nil {
		t.Fatal(err)
	}
	feed.Close()
	st, err := r.c.RunHelper(r.ctx, holder.Helper{Process: process("echo", "7"), Program: program, Stdin: in, Stdout: to})
	to.Close()
	if err != nil || st.Code != 7 {
		t.Errorf("%+v, %v", st, err)
	}
	if b, err := io.ReadAll(out); err != nil || string(b) != "through" {
		t.Errorf("got %q, %v", b, err)
	}
	ctx, cancel := withTimeout(r.ctx, 300*time.Millisecond)
	defer cancel()
	if _, err := r.c.RunHelper(ctx, holder.Helper{Process: process("sleep", "0"), Program: program}); err == nil {
		t.Error("a helper ended by itself")
	}
	r.waitFor("the helper to end", func() bool { return len(r.commands()) == 0 })
	// One whose streams end with its caller takes away what it had begun.
	in, feed, err = os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	if out, to, err = os.Pipe(); err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	if _, err := feed.WriteString("begun"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel = context.WithCancel(r.ctx)
	begun := make([]byte, 5)
	go func() { // ends with what the helper says
		io.ReadFull(out, begun)
		feed.Close()
		cancel()
	}()
	if _, err := r.c.RunHelper(ctx, holder.Helper{Process: process("undo", "-1"), Program: program, Stdin: in, Stdout: to}); err == nil {
		t.Error("a helper nobody waits for was waited for")
	}
	to.Close()
	if b, err := io.ReadAll(out); err != nil || string(begun)+string(b) != "begunundone" {
		t.Errorf("a helper whose caller left: %q, %v", b, err)
	}
	if list, err := r.c.Execs(r.ctx); err != nil || len(list) != 0 {
		t.Errorf("helpers are no execs: %+v, %v", list, err)
	}
	r.waitFor("a pause", func() bool { return r.c.Pause(r.ctx, false) == nil }) // its end has to be seen first
	if _, err := r.c.RunHelper(r.ctx, holder.Helper{Process: process("echo", "7"), Program: program}); !errors.Is(err, holder.ErrPaused) {
		t.Errorf("in a pause: %v", err)
	}
	if err := r.c.Resume(r.ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := r.c.RunHelper(r.ctx, holder.Helper{Process: process("x")}); !errors.Is(err, sandbox.ErrInvalid) {
		t.Errorf("no program: %v", err)
	}
	r.wantNobody()
}

// What the daemon sends may be anything: it is refused, and the sandbox goes on.
func TestNonsenseOnTheSocket(t *testing.T) {
	r := newRig(t)
	for _, raw := range []string{
		"", "GET / HTTP/1.1\r\n\r\n", "qhld\x00\x02\x00\x00\x00\x00\x00\x00", "qhld\x00\x01\x00\x00\xff\xff\xff\xff", "qhld\x00\x01\x00\x01\x00\x00\x00\x02{}",
		"qhld\x00\x01\x00\x00\x00\x00\x00\x01{", "qhld\x00\x01\x00\x00\x00\x00\x00\x02{}", "qhld\x00\x01\x00\x00\x00\x00\x00\x0e{\"method\":\"x\"}",
		"qhld\x00\x01\x00\x00\x00\x00\x00\x11{\"method\":\"exec\"}", "qhld\x00\x01\x00\x00\x00\x00\x00\x13{\"method\":\"helper\"}", "qhld\x00\x01\x00\x00\x00\x00\x00\x10{\"method\":\"cat\"}",
	} {
		sendRaw(t, filepath.Join(r.dir, "holder.sock"), raw)
	}
	r.wantNobody()
}
