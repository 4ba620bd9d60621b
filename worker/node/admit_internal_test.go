package node

import (
	"context"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/sandbox"
)

func TestWhatIsNotThereIsNotGiven(t *testing.T) {
	one := amount{sandboxes: 1, memory: 10, disk: 10, pids: 10}
	for what, has := range map[string]amount{
		"sandboxes": {1, 100, 100, 100}, "memory": {9, 19, 100, 100}, "disk": {9, 100, 19, 100}, "pids": {9, 100, 100, 19},
	} {
		l := newLedger(has, 1)
		if err := l.take(one, 9); err != nil {
			t.Fatal(err)
		}
		var busy *sandbox.Busy
		err := l.take(one, 9)
		if !errors.As(err, &busy) || busy.What != what || !errors.Is(err, sandbox.ErrCapacity) || busy.RetryAfter <= 0 {
			t.Errorf("%s: got %v", what, err)
		}
		if !strings.Contains(err.Error(), "left") || !strings.Contains(err.Error(), "--") {
			t.Errorf("%s: %v says neither how much there is nor what helps", what, err)
		}
		if l.refused[what] != 1 {
			t.Errorf("%s: counted %v", what, l.refused)
		}
		l.giveBack(one)
		if err := l.take(one, 9); err != nil {
			t.Errorf("%s: what was given back is not there: %v", what, err)
		}
	}
}

func TestTheQueueOfCreatesIsBounded(t *testing.T) {
	l := newLedger(amount{100, 100, 100, 100}, 2)
	none := amount{sandboxes: 1}
	for range 2 + 3 {
		if err := l.take(none, 3); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.take(none, 3); !errors.Is(err, sandbox.ErrRate) {
		t.Errorf("got %v", err)
	}
	done, err := l.turn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	done()
	l.leave()
	if err := l.take(none, 3); err != nil {
		t.Errorf("a place that was left is not free: %v", err)
	}
	// Both turns are there again.
	var all []func()
	for range 2 {
		done, err := l.turn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, done)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("why")
	cancel(why)
	if _, err := l.turn(ctx); !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
	for _, d := range all {
		d()
	}
}

// Limits of disks may add up to more than there is, and then what is free counts.
func TestTheDiskIsOvercommittedAsOftenAsSaid(t *testing.T) {
	top := filepath.Join(t.TempDir(), "worker")
	dir, err := folder.Open(top)
	if err != nil {
		t.Fatal(err)
	}
	c := Config{Dir: dir, MaxSandboxes: 9, Memory: 100, Disk: 100, PIDs: 100}
	if err := os.MkdirAll(c.boxesDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	for factor, want := range map[float64]int64{0: 100, 1: 100, 2.5: 250} {
		c.DiskOvercommit = factor
		if got := c.gives(); got != (amount{9, 100, want, 100}) {
			t.Errorf("%v: gives %+v", factor, got)
		}
		n := &Node{c: c, ledger: newLedger(c.gives(), 1)}
		var busy *sandbox.Busy
		err := n.hasRoom(amount{disk: math.MaxInt64})
		if factor <= 1 && err != nil || factor > 1 && (!errors.As(err, &busy) || busy.What != "disk" || n.ledger.refused["disk"] != 1) {
			t.Errorf("%v: more than the disk has: %v", factor, err)
		}
	}
	for _, bad := range []float64{-1, 0.5, 101, math.NaN(), math.Inf(1)} {
		if _, err := (Config{Worker: &worker.Worker{}, Fetch: func(context.Context, string) (Fetched, error) { return Fetched{}, nil }, DiskOvercommit: bad}).withDefaults(t.TempDir()); err == nil {
			t.Errorf("%v times the disk is taken", bad)
		}
	}
}

// A create whose key finds a sandbox that an earlier node did not live to make is made
// once that one has ended.
func TestAKeyOfALostCreateIsFreeOnceItHasEnded(t *testing.T) {
	b, leave := testBox(t.TempDir(), nil)
	defer leave()
	n := b.n
	spec := sandbox.Spec{Image: "app:1"}
	body, err := bodyDigest(spec)
	if err != nil {
		t.Fatal(err)
	}
	n.noCreate = errors.New("it is made anew")
	n.keys, n.ended = map[string]keyed{"k": {id: b.id, body: body}}, map[string]record{}
	b.failure = errLost
	close(b.settled)
	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	for range 50 { // one whose create has settled may be found before the context's end
		if _, _, err := n.Create(impatient, spec, "k"); !errors.Is(err, context.Canceled) {
			t.Fatalf("got %v before it has ended", err)
		}
	}
	got := make(chan error, 1)
	go func() {
		_, _, err := n.Create(t.Context(), spec, "k")
		got <- err
	}()
	n.mu.Lock()
	delete(n.keys, "k")
	n.ended[b.id] = record{Failed: true, Sandbox: sandbox.Sandbox{ID: b.id, End: &sandbox.End{}}}
	n.mu.Unlock()
	close(b.over)
	if err := <-got; !errors.Is(err, n.noCreate) {
		t.Errorf("got %v", err)
	}
	// It may have ended after the key had found it.
	if _, _, err := n.existing(t.Context(), keyed{id: b.id}); !errors.Is(err, errLost) {
		t.Errorf("got %v", err)
	}
}
