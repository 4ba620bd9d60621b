package node

import (
	"errors"
	"os"
	"testing"
)

// adopt has the next node take the sandbox over.
func (r *boxRig) adopt() {
	r.Helper()
	r.next()
	if err := errors.Join(r.b.connect(r.Context()), r.b.takePause()); err != nil {
		r.Fatal(err)
	}
	_ = r.locked(func() error { return nil }) // so it is settled
}

// asked reports whether the mark of a hibernation that a call has asked for stands.
func (r *boxRig) asked() bool {
	_, err := os.Lstat(r.b.askedPath())
	return err == nil
}

// commandWakes reports whether a command does.
func (r *boxRig) commandWakes() bool {
	r.Helper()
	release, err := r.b.stir(r.Context())
	if err != nil {
		r.Fatal(err)
	}
	release()
	return !r.b.napping()
}

// What a call has paused, and the node has put to disk, is for a call to wake, also of the
// next node; what a call has put to disk a command wakes, too.
func TestACommandWakesWhatACallHasPutToDisk(t *testing.T) {
	r := newBoxRig(t)
	for _, asks := range []bool{false, true} {
		n := r.b.n
		if err := n.Pause(t.Context(), r.b.id, 0); err != nil {
			t.Fatal(err)
		}
		nap := func() error { return r.locked(r.b.hibernate) }
		if asks {
			nap = func() error { return n.Hibernate(t.Context(), r.b.id) }
		}
		if err := nap(); err != nil {
			t.Fatal(err)
		}
		if !asks && r.commandWakes() {
			t.Error("a command woke what a call had paused")
		}
		r.adopt()
		if got := r.commandWakes(); got != asks {
			t.Errorf("a call asked for it: %v; a command of the next node woke it: %v", asks, got)
		}
		if err := r.b.n.Wake(t.Context(), r.b.id); err != nil {
			t.Fatal(err)
		}
		if r.asked() {
			t.Error("it runs, and the mark of its hibernation stays")
		}
	}
}

// A node that ends in the middle of a hibernation that a call has asked for leaves the mark
// of that, and the next one finds out what came of it.
func TestAHibernationThatItsNodeDoesNotLiveToSee(t *testing.T) {
	r := newBoxRig(t)
	done := r.stuckIn(func(b *box) error {
		b.pausing.Unlock() // which stuckIn holds, and the call takes
		defer b.pausing.Lock()
		return b.n.Hibernate(t.Context(), b.id)
	}, true)
	r.leave()
	if err := r.soon("a hibernation", done); !errors.Is(err, errLeft) {
		t.Fatalf("at the node's end: %v", err)
	}
	if !r.asked() {
		t.Error("the next node cannot know who asked for it")
	}
	r.goOn()
	r.adopt()
	if !r.b.napping() || !r.asked() || !r.commandWakes() || r.asked() {
		t.Errorf("hibernated %v, asked %v", r.b.napping(), r.asked())
	}

	// One that came to nothing.
	if err := errors.Join(r.b.n.Pause(t.Context(), r.b.id, 0), os.WriteFile(r.b.askedPath(), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	r.adopt()
	if r.b.napping() || r.asked() {
		t.Errorf("hibernated %v, asked %v", r.b.napping(), r.asked())
	}
}
