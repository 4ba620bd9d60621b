package writer_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/writer"
)

// All tests run in a bubble of testing/synctest, whose clock goes on when everybody
// waits: hours take no time, and none of them depends on the machine.

// node is a process that wants to write a bucket.
type node struct {
	self    catalog.Writer
	bucket  bucket.Bucket
	journal bucket.Journal
}

func newNode(b *mem.Bucket, folder string) *node {
	return &node{self: writer.New(strings.Repeat(folder, 32)), bucket: b, journal: b}
}

func (n *node) await(ctx context.Context) (*catalog.Catalog, error) {
	return writer.Await(ctx, writer.StandbyConfig{Bucket: n.bucket, Journal: n.journal, Self: n.self})
}

// active is a node that writes.
type active struct {
	*node
	catalog *catalog.Catalog
	keeper  *writer.Keeper
	kill    func()       // ends it as kill -9 does
	ended   <-chan error // what its keeper said
}

// start makes the node the writer, and wants that to take at most limit.
func (n *node) start(t *testing.T, limit time.Duration) *active {
	t.Helper()
	begin := time.Now()
	c, err := n.await(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > limit {
		t.Errorf("it took %s until it writes, at most %s are needed", took, limit)
	}
	return n.keep(t, c)
}

func (n *node) keep(t *testing.T, c *catalog.Catalog) *active {
	k := writer.NewKeeper(writer.KeeperConfig{Bucket: n.bucket, Catalog: c, Self: n.self})
	k.At("http://" + n.self.Folder[:1])
	ctx, kill := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.Run(ctx) }() // ends with ctx
	t.Cleanup(kill)
	synctest.Wait()
	return &active{n, c, k, kill, ended}
}

func setName(t *testing.T, c *catalog.Catalog, tag string) error {
	return c.SetName(t.Context(), catalog.Name{Repo: "r", Tag: tag, Source: chunk.Sum([]byte(tag)), Serial: 1})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func wantFenced(t *testing.T, what string, err error) {
	t.Helper()
	if !errors.Is(err, catalog.ErrFenced) {
		t.Errorf("%s: got error %v, want catalog.ErrFenced", what, err)
	}
}

func TestAStandbyLeavesAWriterThatLivesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := mem.New()
		first := newNode(b, "a").start(t, 0)
		must(t, setName(t, first.catalog, "before"))
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Hour)
		defer cancel()
		var told []string
		second := newNode(b, "b")
		_, err := writer.Await(ctx, writer.StandbyConfig{Bucket: b, Journal: b, Self: second.self, Waiting: func(who string) { told = append(told, who) }})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("await: got error %v, want that it waits for ever", err)
		}
		if len(told) != 1 || !strings.Contains(told[0], "http://a") {
			t.Errorf("it was told of %q, want once of the writer and where it listens", told)
		}
		must(t, setName(t, first.catalog, "after"))
		m, err := writer.Read(t.Context(), b)
		must(t, err)
		if m.Count < uint64(110*time.Minute/writer.Every) || m.Epoch != 1 || m.Released {
			t.Errorf("got mark %+v after two hours", m)
		}
	})
}

func TestAStandbyTakesOverFromAWriterThatDied(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := mem.New()
		first := newNode(b, "a").start(t, 0)
		must(t, setName(t, first.catalog, "before"))
		first.kill()
		second := newNode(b, "b").start(t, writer.After+2*writer.Every)
		if _, ok := second.catalog.Name("r", "before"); !ok {
			t.Error("what the first writer acknowledged is not there")
		}
		wantFenced(t, "a change of the first", setName(t, first.catalog, "after"))
		must(t, setName(t, second.catalog, "after"))
	})
}

func TestNobodyWaitsForAWriterThatSurelyLeft(t *testing.T) {
	for name, test := range map[string]struct {
		folder string
		leave  func(*testing.T, *active)
	}{
		"it released the store": {"b", func(t *testing.T, a *active) { a.kill(); synctest.Wait(); must(t, a.keeper.Release(t.Context())) }},
		"it had this folder":    {"a", func(_ *testing.T, a *active) { a.kill() }},
		"it had this folder, and left no mark": {"a", func(t *testing.T, a *active) {
			a.kill()
			must(t, a.bucket.Delete(t.Context(), writer.Key))
		}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := mem.New()
				first := newNode(b, "a").start(t, 0)
				must(t, setName(t, first.catalog, "before"))
				test.leave(t, first)
				synctest.Wait()
				second := newNode(b, test.folder).start(t, 0)
				if got := second.catalog.Epoch().N; got != 2 {
					t.Errorf("got epoch %d, want 2", got)
				}
			})
		})
	}
}

// Who has taken over and needs an hour to open what it has is left alone meanwhile; one
// that leaves no mark in that time is overtaken, and does not put its own mark over that
// of the next.
func TestAWriterThatIsNotReadyYetIsNotOvertaken(t *testing.T) {
	for name, marks := range map[string]bool{"it leaves its mark": true, "it leaves none": false} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := mem.New()
				first := newNode(b, "a").start(t, 0)
				first.kill()
				slow := newNode(b, "b")
				c, err := slow.await(t.Context())
				must(t, err)
				var opening *active
				if marks {
					opening = slow.keep(t, c)
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
				defer cancel()
				third := newNode(b, "c")
				got, err := third.await(ctx)
				if marks {
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("await: got error %v, want that it waits", err)
					}
					must(t, setName(t, opening.catalog, "ready"))
					return
				}
				must(t, err)
				third.keep(t, got)
				slow.bucket = &buckettest.Faulty{Bucket: b, Before: func(op buckettest.Op) error {
					if op.Method == "Put" {
						t.Errorf("the slow one has put %s", op.Key)
					}
					return nil
				}}
				wantFenced(t, "the keeper of the slow one", <-slow.keep(t, c).ended)
				m, err := writer.Read(t.Context(), b)
				must(t, err)
				if m.Writer != third.self.ID {
					t.Errorf("the mark is of %s, want the third writer", m)
				}
			})
		})
	}
}

// However patient who stands by is, it sees soon that the writer has released the store.
func TestAPatientStandbySeesThatTheWriterLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := mem.New()
		first := newNode(b, "a").start(t, 0)
		time.AfterFunc(time.Minute, func() {
			first.kill()
			<-first.ended
			if err := first.keeper.Release(t.Context()); err != nil {
				t.Error(err)
			}
		})
		begin := time.Now()
		_, err := writer.Await(t.Context(), writer.StandbyConfig{Bucket: b, Journal: b, Self: newNode(b, "b").self, After: time.Hour})
		must(t, err)
		if took := time.Since(begin); took > time.Minute+2*writer.Every {
			t.Errorf("it took over after %s, the writer has left after a minute", took)
		}
	})
}

// TestAStoppedWriterIsFenced: it is stopped for an hour, as by SIGSTOP, and goes on.
func TestAStoppedWriterIsFenced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := mem.New()
		n := newNode(b, "a")
		stopped := make(chan struct{})
		var stop atomic.Bool
		n.bucket = &buckettest.Faulty{Bucket: b, Before: func(buckettest.Op) error {
			if stop.Load() {
				<-stopped
			}
			return nil
		}}
		first := n.start(t, 0)
		must(t, setName(t, first.catalog, "before"))
		stop.Store(true)
		second := newNode(b, "b").start(t, writer.After+2*writer.Every)
		time.Sleep(time.Hour)
		must(t, setName(t, second.catalog, "between"))
		stop.Store(false)
		close(stopped)
		wantFenced(t, "its keeper", <-first.ended)
		wantFenced(t, "its change", setName(t, first.catalog, "after"))
		wantFenced(t, "its release", first.keeper.Release(t.Context()))
		time.Sleep(time.Minute)
		m, err := writer.Read(t.Context(), b)
		must(t, err)
		if m.Writer != second.self.ID {
			t.Errorf("the mark is of %s, want the second writer", m)
		}
		must(t, setName(t, second.catalog, "after"))
	})
}

// TestOneOfManyTakesOver: each time the writer dies, one of those who stand by goes on.
func TestOneOfManyTakesOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := mem.New()
		won := make(chan *active)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for _, folder := range strings.Split("abcdef", "") {
			n := newNode(b, folder)
			wg.Go(func() {
				if c, err := n.await(ctx); err == nil {
					won <- n.keep(t, c)
				} else if ctx.Err() == nil {
					t.Errorf("await: %v", err)
				}
			})
		}
		for epoch := uint64(1); epoch <= 4; epoch++ {
			a := <-won
			for i := range 10 {
				time.Sleep(writer.After)
				must(t, setName(t, a.catalog, fmt.Sprintf("%d-%d", epoch, i)))
			}
			if got := a.catalog.Epoch().N; got != epoch {
				t.Errorf("got epoch %d, want %d: another node took over from one that lived", got, epoch)
			}
			a.kill()
		}
		cancel()
		wg.Wait()
	})
}

// TestABucketThatIsAwayIsNoDeadWriter: neither can reach it, and the writer renews its
// mark once it is back.
func TestABucketThatIsAwayIsNoDeadWriter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := mem.New()
		var away atomic.Bool
		f := &buckettest.Faulty{Bucket: b, Journal: b, Before: func(buckettest.Op) error {
			if away.Load() {
				return buckettest.ErrInjected
			}
			return nil
		}}
		n, s := newNode(b, "a"), newNode(b, "b")
		n.bucket, n.journal, s.bucket, s.journal = f, f, f, f
		first := n.start(t, 0)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Hour)
		defer cancel()
		go func() { // ends by itself
			time.Sleep(time.Hour)
			away.Store(true)
			time.Sleep(time.Hour)
			away.Store(false)
		}()
		if _, err := s.await(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("await: got error %v, want that it still waits", err)
		}
		must(t, setName(t, first.catalog, "after"))
	})
}

// TestTakingOverWithLostReplies fails each call of a take-over, applied and not.
func TestTakingOverWithLostReplies(t *testing.T) {
	for _, applied := range []bool{false, true} {
		for k := int64(1); k <= 12; k++ {
			synctest.Test(t, func(t *testing.T) {
				b := mem.New()
				first := newNode(b, "a").start(t, 0)
				must(t, setName(t, first.catalog, "before"))
				first.kill()
				n := newNode(b, "b")
				f := &buckettest.Faulty{Bucket: b, Journal: b}
				if applied {
					f.After = buckettest.FailNth(k)
				} else {
					f.Before = buckettest.FailNth(k)
				}
				n.bucket, n.journal = f, f
				c, err := n.await(t.Context())
				for tries := 0; err != nil && tries < 2; tries++ { // as systemd starts it again
					if !errors.Is(err, buckettest.ErrInjected) {
						t.Fatalf("call %d: %v", k, err)
					}
					n.self = writer.New(n.self.Folder)
					c, err = n.await(t.Context())
				}
				must(t, err)
				must(t, setName(t, c, "after"))
				wantFenced(t, "the first", setName(t, first.catalog, "late"))
				again, err := catalog.Open(t.Context(), catalog.Config{Journal: b})
				must(t, err)
				if got := len(again.Names()); got != 2 {
					t.Errorf("call %d, applied %t: the journal has %d names, want 2", k, applied, got)
				}
			})
		}
	}
}
