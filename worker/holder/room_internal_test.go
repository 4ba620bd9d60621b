package holder

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"quarry/worker/sandbox"
)

// writer is an exec that has ended once end is called.
type writer struct {
	*execution
	t    *testing.T
	pipe *os.File
	done chan struct{}
}

func newWriter(t *testing.T, b *box, id string, limit int64) *writer {
	t.Helper()
	x, made, err := b.enter(sandbox.ExecSpec{ID: id})
	if err != nil || !made {
		t.Fatalf("exec %s: made %t, %v", id, made, err)
	}
	read, write, err := outputPipe()
	if err != nil {
		t.Fatal(err)
	}
	x.out, x.err = x.newStream(OutputPath(b.dir, id, "stdout"), limit, read), closedStream()
	w := &writer{execution: x, t: t, pipe: write, done: make(chan struct{})}
	go func() { defer close(w.done); x.out.drain() }() // ends with end
	return w
}

func (w *writer) end(n int) sandbox.Output {
	w.t.Helper()
	if _, err := w.pipe.Write(bytes.Repeat([]byte("x"), n)); err != nil {
		w.t.Fatal(err)
	}
	w.pipe.Close()
	<-w.done
	close(w.started)
	w.finish(func(st *sandbox.ExecState) { st.State = sandbox.ExecExited })
	return w.out.state()
}

func roomBox(t *testing.T, blocks int64) *box {
	t.Helper()
	b := newBox(config{Dir: t.TempDir(), ID: "x"}, slog.New(slog.DiscardHandler), nil)
	b.room.left = blocks * block
	var err error
	if b.journal, err = openJournal(b.dir, 1<<20); err != nil {
		t.Fatal(err)
	}
	return b
}

// bytesBelow is what files take of the disk, with a block for each folder of an exec.
func bytesBelow(t *testing.T, dir string) (total int64) {
	t.Helper()
	err := filepath.Walk(filepath.Join(dir, "exec"), func(path string, info os.FileInfo, err error) error {
		if err == nil && !info.IsDir() {
			total += (info.Size()+block-1)/block*block + block
		}
		return nil
	})
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	return total
}

func TestTheOutputOfAllExecsIsBounded(t *testing.T) {
	b := roomBox(t, 8)
	first := newWriter(t, b, "first", 1<<20)
	if o := first.end(5 * block); o.Kept != 5*block || o.Dropped != 0 || o.DroppedBy != "" {
		t.Fatalf("first: %+v", o)
	}
	// 2 blocks are left: the first has to go.
	second := newWriter(t, b, "second", 1<<20)
	if o := second.end(3*block - 1); o.Kept != 3*block-1 || o.Dropped != 0 {
		t.Errorf("second: %+v", o)
	}
	if o := first.out.state(); o.Kept != 0 || o.Dropped != 5*block || o.DroppedBy != sandbox.DroppedOld {
		t.Errorf("first, forgotten: %+v", o)
	}
	if _, err := os.Stat(execDir(b.dir, "first")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its folder: %v", err)
	}
	// One that is larger than all: what fits is kept, without a hole, and counted.
	third := newWriter(t, b, "third", 1<<20)
	if o := third.end(12 * block); o.Kept != 7*block || o.Dropped != 5*block || o.DroppedBy != sandbox.DroppedSandbox {
		t.Errorf("third: %+v", o)
	}
	if n := bytesBelow(t, b.dir); n > 8*block {
		t.Errorf("%d blocks are on the disk, want 8", n/block)
	}
}

func TestWhoHearsOfAnEndHasThePlace(t *testing.T) {
	b := roomBox(t, 4)
	w := newWriter(t, b, "first", 1<<20)
	w.pipe.Close()
	<-w.done
	close(w.started)
	w.finish(func(st *sandbox.ExecState) { // nobody knows of it before this
		st.State = sandbox.ExecExited
		b.mu.Lock()
		running, tools := b.running, b.tools
		b.mu.Unlock()
		if running != 0 || tools != 0 {
			t.Errorf("%d commands run, %d of role tool, and the last one is about to be told of as ended", running, tools)
		}
		b.room.mu.Lock()
		defer b.room.mu.Unlock()
		if !slices.Contains(b.room.ended, w.execution) {
			t.Error("its output cannot be forgotten yet")
		}
	})
}

func TestWhatRunsIsNotForgotten(t *testing.T) {
	b := roomBox(t, 4)
	runs := newWriter(t, b, "runs", 1<<20)
	if _, err := runs.pipe.Write(bytes.Repeat([]byte("x"), 3*block)); err != nil {
		t.Fatal(err)
	}
	for runs.out.state().Kept != 3*block {
		<-b.soon()
	}
	other := newWriter(t, b, "other", 1<<20)
	if o := other.end(10); o.Kept != 0 || o.Dropped != 10 || o.DroppedBy != sandbox.DroppedSandbox {
		t.Errorf("another beside it: %+v", o)
	}
	if o := runs.end(1); o.Kept != 3*block || o.Dropped != 1 || o.DroppedBy != sandbox.DroppedSandbox {
		t.Errorf("it: %+v", o)
	}
}

func (b *box) soon() <-chan struct{} { // a moment in which others run
	c := make(chan struct{})
	go close(c)
	return c
}

func TestManySmallOutputsAreBoundedToo(t *testing.T) {
	b := roomBox(t, 20)
	for i := range 50 {
		if o := newWriter(t, b, fmt.Sprint(i), 1<<20).end(1); o.Kept != 1 {
			t.Fatalf("exec %d: %+v", i, o)
		}
		if n := bytesBelow(t, b.dir); n > 20*block {
			t.Fatalf("after %d execs with a byte each %d blocks are on the disk", i, n/block)
		}
	}
}

// A disk that takes nothing is told of: the output is not just short.
func TestOutputThatCannotBeWrittenIsToldOf(t *testing.T) {
	b := roomBox(t, 1000)
	if err := os.WriteFile(filepath.Join(b.dir, "exec"), nil, 0o600); err != nil { // no folder can be made
		t.Fatal(err)
	}
	if o := newWriter(t, b, "a", 1<<20).end(100); o.Kept != 0 || o.Dropped != 100 || o.DroppedBy != sandbox.DroppedDisk || o.Error == "" {
		t.Errorf("%+v", o)
	}
}

func TestOldExecsAreForgottenAndNotRunAgain(t *testing.T) {
	b := roomBox(t, 1<<20)
	for i := range KeptExecs {
		x, made, err := b.enter(sandbox.ExecSpec{ID: fmt.Sprint(i)})
		if err != nil || !made {
			t.Fatal(made, err)
		}
		if i != 0 && i != 2 {
			x.finish(func(st *sandbox.ExecState) { st.State = sandbox.ExecExited })
		}
	}
	out := newWriter(t, b, "out", 1<<20)
	for range 3 {
		b.retire() // 1 and 3, then there are not too many: the others run
	}
	for _, id := range []string{"1", "3"} {
		if _, err := b.find(id); !errors.Is(err, sandbox.ErrExecUnknown) || !strings.Contains(err.Error(), "has ended") {
			t.Errorf("exec %s: %v", id, err)
		}
		if _, _, err := b.enter(sandbox.ExecSpec{ID: id}); !errors.Is(err, sandbox.ErrExecEnded) {
			t.Errorf("exec %s may run again: %v", id, err)
		}
	}
	for _, id := range []string{"0", "2", "4", "out"} {
		if _, err := b.find(id); err != nil {
			t.Errorf("exec %s: %v", id, err)
		}
	}
	if o := out.end(10); o.Kept != 10 {
		t.Errorf("%+v", o)
	}
	if st := b.current(); st.Execs != KeptExecs+1 || len(b.order) != KeptExecs-1 || len(b.execs) != len(b.order) {
		t.Errorf("%d execs, %d kept", st.Execs, len(b.order))
	}
}

func TestTheJournalIsBounded(t *testing.T) {
	b := roomBox(t, 1)
	var err error
	if b.journal, err = openJournal(b.dir, 2000); err != nil {
		t.Fatal(err)
	}
	for i := range 100 {
		x, _, err := b.enter(sandbox.ExecSpec{ID: fmt.Sprint(i)})
		if err != nil {
			t.Fatal(err)
		}
		x.journal(x.state)
	}
	st, err := os.Stat(journalPath(b.dir))
	if err != nil || st.Size() > 2000 {
		t.Errorf("%d bytes, %v", st.Size(), err)
	}
	if list, err := ReadExecs(b.dir); err != nil || len(list) == 0 {
		t.Errorf("%d execs can be read, %v", len(list), err)
	}
}
