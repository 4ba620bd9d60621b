package node

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/worker/folder"
	"quarry/worker/sandbox"
)

// cannotRestore takes away what a restore wants of the sandbox's folder, until the
// returned function is called.
func (r *boxRig) cannotRestore() (mayAgain func()) {
	r.Helper()
	// The places of its shares are looked up in the bundle.
	r.b.j.Asked.Shares = []sandbox.Share{{Name: "data", Target: "/data"}}
	at := filepath.Join(r.b.dir, "config.json")
	if err := os.Rename(at, at+".away"); err != nil {
		r.Fatal(err)
	}
	return func() {
		r.Helper()
		if err := os.Rename(at+".away", at); err != nil {
			r.Fatal(err)
		}
	}
}

// asleep checks that the sandbox is hibernated, and not ended.
func (r *boxRig) asleep(after string) {
	r.Helper()
	if st, err := r.b.h.State(r.Context()); err != nil || !st.Hibernated || !r.b.napping() || r.b.ending() {
		r.Fatalf("after %s: %+v, %v, its end: %+v", after, st, err, r.b.cause)
	}
}

// A restore that could not begin leaves the checkpoint as it is: whoever asks for it is
// told to try again, or, on a disk that is low, that there is no room.
func TestAWakeThatCannotBegin(t *testing.T) {
	r := newBoxRig(t)
	if err := r.locked(func() error { return errors.Join(r.b.hold(byCall), r.b.hibernate()) }); err != nil {
		t.Fatal(err)
	}
	mayAgain := r.cannotRestore()
	wake := func() error { return r.b.n.Wake(t.Context(), r.b.id) }
	if err := wake(); !errors.Is(err, sandbox.ErrNotReady) || !strings.Contains(err.Error(), "try again") {
		t.Errorf("without its bundle: %v", err)
	}
	r.asleep("a wake that could not begin")
	r.diskOf(t.TempDir(), 1<<60)
	var busy *sandbox.Busy
	if err := wake(); !errors.As(err, &busy) || busy.What != "disk" || !errors.Is(err, sandbox.ErrCapacity) || busy.RetryAfter == 0 {
		t.Errorf("without its bundle, on a disk that is low: %v", err)
	}
	r.asleep("a wake that could not begin on a low disk")
	mayAgain()
	if err := wake(); err != nil || r.b.napping() {
		t.Errorf("hibernated %v, %v", r.b.napping(), err)
	}
}

// A sandbox that an earlier node has paused for its model, and that cannot be restored now,
// is told of as such by all that needs it, and runs for the first that finds it can.
func TestWhoWaitedUnderAnEarlierNode(t *testing.T) {
	r := newBoxRig(t)
	if err := errors.Join(r.b.pauseForModel(t.Context()), r.locked(r.b.hibernate)); err != nil {
		t.Fatal(err)
	}
	r.next()
	if err := r.b.connect(t.Context()); err != nil {
		t.Fatal(err)
	}
	mayAgain := r.cannotRestore()
	if err := r.b.takePause(); err != nil {
		t.Fatal(err)
	}
	n, ctx, command := r.b.n, t.Context(), sandbox.ExecSpec{ID: "command", Argv: []string{"/bin/true"}}
	for what, call := range map[string]func() error{
		"a command":     func() error { _, err := n.Exec(ctx, r.b.id, command); return err },
		"a signal":      func() error { return n.Signal(ctx, r.b.id, "begun", 1) },
		"a resume":      func() error { return n.Resume(ctx, r.b.id) },
		"a wake":        func() error { return n.Wake(ctx, r.b.id) },
		"a read":        func() error { _, err := r.b.glance(ctx); return err },
		"another write": func() error { _, err := r.b.stir(ctx); return err },
	} {
		if err := call(); !errors.Is(err, sandbox.ErrNotReady) || !strings.Contains(err.Error(), errNotBegun.Error()) {
			t.Errorf("%s: %v", what, err)
		}
		r.asleep(what)
	}
	mayAgain()
	if _, err := n.Exec(ctx, r.b.id, command); err != nil || r.b.napping() {
		t.Errorf("a command, when it can be restored: hibernated %v, %v", r.b.napping(), err)
	}
	if _, err := os.Lstat(r.b.waitingPath()); err == nil {
		t.Error("it runs, and the next node takes it for one that waits")
	}
}

// A node ends while its holder begins a hibernation, which the next one does not see yet: it
// finds out as it resumes the sandbox, and tells nobody that it runs while it does not.
func TestWhoseHibernationNoNodeSaw(t *testing.T) {
	r := newBoxRig(t)
	if err := r.b.pauseForModel(t.Context()); err != nil {
		t.Fatal(err)
	}
	r.next()
	if err := r.b.connect(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := r.b.h.Hibernate(t.Context()); err != nil {
		t.Fatal(err)
	}
	mayAgain := r.cannotRestore()
	if err := r.locked(r.b.takeHeld); err != nil {
		t.Fatal(err)
	}
	if err := r.b.n.Resume(t.Context(), r.b.id); !errors.Is(err, sandbox.ErrNotReady) {
		t.Errorf("a resume that cannot restore it: %v", err)
	}
	r.asleep("a resume that cannot restore it")
	if r.b.nap.bytes == 0 {
		t.Error("it takes nothing of the disk")
	}
	mayAgain()
	if err := r.b.n.Resume(t.Context(), r.b.id); err != nil || r.b.napping() {
		t.Errorf("hibernated %v, %v", r.b.napping(), err)
	}
}

// diskOf has the node keep its sandboxes on the disk of a folder, as far as it looks, and so
// much of it free.
func (r *boxRig) diskOf(dir string, reserve int64) {
	r.Helper()
	d, err := folder.Open(filepath.Join(dir, "w"))
	r.b.n.c.Dir, r.b.n.c.DiskReserve = d, reserve
	if err = errors.Join(err, os.MkdirAll(r.b.n.c.boxesDir(), 0o700)); err != nil {
		r.Fatal(err)
	}
}
