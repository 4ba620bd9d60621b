package node

import (
	"errors"
	"testing"
	"time"

	"quarry/worker/sandbox"
)

// On a disk that is low sandboxes are restored one after the other.
func TestWakesOnALowDiskTakeTurns(t *testing.T) {
	r := newBoxRig(t)
	small, _ := smallDisk(t, 64<<20) // less than roomForAll
	r.diskOf(small, 1)
	turns := make(chan struct{}, 1)
	r.b.n.wakes = turns
	nap := func() error { return errors.Join(r.b.hold(byCall), r.b.hibernate()) }
	wake := func() <-chan error {
		done := make(chan error, 1)
		go func() { done <- r.locked(func() error { return r.b.letGo(byCall) }) }() // ends with the sandbox
		return done
	}
	if err := r.locked(nap); err != nil {
		t.Fatal(err)
	}
	r.stopHolder()
	done := wake()
	r.until("its turn", func() bool { return len(turns) == 1 })
	r.goOn()
	if err := r.soon("a wake", done); err != nil || len(turns) != 0 {
		t.Fatalf("a turn is kept: %v, %v", len(turns) != 0, err)
	}

	// While another has its turn, until the sandbox ends.
	if err := r.locked(nap); err != nil {
		t.Fatal(err)
	}
	turns <- struct{}{}
	done = wake()
	select {
	case err := <-done:
		t.Errorf("out of turn: %v", err)
	case <-time.After(time.Second): // in which it would be awake
	}
	r.asleep("a wait for its turn")
	r.b.end(cause{Reason: sandbox.ReasonDeleted})
	if err := r.soon("a wait for its turn", done); !errors.Is(err, sandbox.ErrEnded) || len(turns) != 1 {
		t.Errorf("ended while it waited for its turn: %v, %d", err, len(turns))
	}
}

// On a disk with room nobody waits for others.
func TestWakesOnALargeDiskTakeNoTurns(t *testing.T) {
	r := newBoxRig(t)
	large, _ := smallDisk(t, 2*roomForAll) // of memory that nobody touches
	r.diskOf(large, 1)
	r.b.n.wakes = make(chan struct{}) // whoever wants a turn waits for ever
	if err := r.locked(func() error { return errors.Join(r.b.hold(byCall), r.b.hibernate()) }); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- r.locked(func() error { return r.b.letGo(byCall) }) }() // ends with the sandbox
	t.Cleanup(func() { r.b.end(cause{Reason: sandbox.ReasonDeleted}) })
	if err := r.soon("a wake", done); err != nil {
		t.Error(err)
	}
}
