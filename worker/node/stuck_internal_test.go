package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"quarry/worker/sandbox"
)

// stuckCalls are what has a sandbox stand or run, and what is to be so before.
var stuckCalls = map[string]struct {
	before func(*box) error
	call   func(*box) error
}{
	"a pause":       {func(*box) error { return nil }, func(b *box) error { return b.hold(byCall) }},
	"a resume":      {func(b *box) error { return b.hold(byCall) }, func(b *box) error { return b.letGo(byCall) }},
	"a hibernation": {func(b *box) error { return b.hold(byCall) }, (*box).hibernate},
	"a wake": {
		func(b *box) error { return errors.Join(b.hold(byCall), b.hibernate()) },
		func(b *box) error { return b.letGo(byCall) },
	},
}

// stuckIn has the holder stand in the middle of a call, for which a hibernation has to be
// under way: before, the guest is asked what is mounted there, which has a bound.
func (r *boxRig) stuckIn(call func(*box) error, naps bool) <-chan error {
	r.Helper()
	if !naps {
		r.stopHolder()
	}
	for {
		done := make(chan error, 1)
		go func() { done <- r.locked(func() error { return call(r.b) }) }() // ends with the sandbox or the node
		if !naps {
			r.until("a call under way", func() bool {
				if r.b.pausing.TryLock() {
					r.b.pausing.Unlock()
					return false
				}
				return true
			})
			return done
		}
		r.until("a checkpoint", func() bool { _, err := os.Lstat(filepath.Join(r.b.dir, "hibernated")); return err == nil })
		r.stopHolder()
		select {
		case <-time.After(2 * time.Second): // longer than an answer takes that was on its way
			return done
		case err := <-done: // it was faster
			r.goOn()
			if err = errors.Join(err, r.locked(func() error { return errors.Join(r.b.letGo(byCall), r.b.hold(byCall)) })); err != nil {
				r.Fatal(err)
			}
		}
	}
}

// A holder that stands in the middle of a pause or the like is noticed by who looks after
// it, and neither a delete nor the node's end waits for it.
func TestAHolderThatStands(t *testing.T) {
	for name, c := range stuckCalls {
		for _, end := range []string{"delete", "close"} {
			t.Run(name+", "+end, func(t *testing.T) {
				t.Parallel()
				r := newBoxRig(t)
				if err := r.locked(func() error { return c.before(r.b) }); err != nil {
					t.Fatal(err)
				}
				done := r.stuckIn(c.call, name == "a hibernation")
				short, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
				defer cancel()
				if err := r.b.answers(short); err == nil {
					t.Error("nobody sees that it does not answer")
				}
				if end == "close" {
					r.leave()
					if err := r.soon(name, done); err == nil || errors.Is(err, sandbox.ErrEnded) {
						t.Errorf("at the node's end: %v", err)
					}
					if r.b.ending() {
						t.Errorf("the node's end ends the sandbox: %+v", r.b.cause)
					}
					return
				}
				r.b.end(cause{Reason: sandbox.ReasonDeleted})
				if err := r.soon(name, done); !errors.Is(err, sandbox.ErrEnded) {
					t.Errorf("deleted: %v", err)
				}
			})
		}
	}
}

// What a node that ends does not know, the next one finds out: the mark of a pause that
// may have been stays.
func TestAPauseAtTheNodesEnd(t *testing.T) {
	r := newBoxRig(t)
	r.stopHolder()
	done := make(chan error, 1)
	go func() { done <- r.b.pauseForModel(context.Background()) }() // ends with the node
	r.until("its mark", func() bool { _, err := os.Lstat(r.b.waitingPath()); return err == nil })
	r.leave()
	if err := r.soon("a pause", done); err == nil {
		t.Error("it was paused")
	}
	if _, err := os.Lstat(r.b.waitingPath()); err != nil {
		t.Errorf("the next node cannot know why it stands: %v", err)
	}
}

// A holder that says that it is there, and has no answer to a call, ends the sandbox.
func TestACallThatNobodyAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := &Node{c: Config{Now: time.Now}, life: t.Context()}
		b := n.newBox(journal{ID: testID})
		err := b.alter(0, func(ctx context.Context) error { <-ctx.Done(); return context.Cause(ctx) })
		if !errors.Is(err, sandbox.ErrEnded) || b.cause == nil || b.cause.Reason != sandbox.ReasonRuntime {
			t.Errorf("got %v, and it is ended for %+v", err, b.cause)
		}
	})
}
