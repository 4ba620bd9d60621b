package reader_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"quarry/store/cache"
	"quarry/store/chunk"
	"quarry/worker/reader"
)

// slowSource takes long to notice that nobody waits for a chunk any more.
type slowSource struct {
	reader.ChunkSource
	asked   chan struct{} // a request has begun
	running *atomic.Int64
}

func (s slowSource) GetBatch(ctx context.Context, _ []chunk.Digest, _ func(chunk.Digest, []byte, error) error) error {
	s.running.Add(1)
	defer s.running.Add(-1)
	select {
	case s.asked <- struct{}{}:
	default:
	}
	<-ctx.Done()
	time.Sleep(200 * time.Millisecond) // the reader has closed its sockets long before
	return ctx.Err()
}

func TestAReaderThatEndsWaitsForItsPulls(t *testing.T) {
	r := newRig(t)
	_, id := r.fetch(t, "team/task:v1", files)
	src := slowSource{asked: make(chan struct{}, 1), running: new(atomic.Int64)}
	r.end()
	r.wrap = func(s reader.ChunkSource) reader.ChunkSource { src.ChunkSource = s; return src }
	r.start(t, cache.MinLimit)
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := reader.Pull(t.Context(), r.dir, id, false, func(reader.PullProgress) {}); err == nil {
			t.Error("a pull went through without a chunk")
		}
	})
	<-src.asked
	r.end()
	if n := src.running.Load(); n != 0 {
		t.Errorf("%d requests of a pull go on after the reader's end", n)
	}
	wg.Wait()
}

// leases is a source that tells what is said of leases.
type leases struct {
	reader.ChunkSource
	renewed chan struct{} // a renewal has begun
	ended   chan struct{} // the lease was ended
	early   *atomic.Bool  // that was while it was being renewed
}

func (l leases) KeepAlive(context.Context, string, chunk.Digest, chunk.Digest, time.Duration) error {
	select {
	case l.renewed <- struct{}{}:
	default:
	}
	select {
	case <-l.ended:
		l.early.Store(true)
	case <-time.After(300 * time.Millisecond): // long enough to see it end
	}
	return nil
}

func (l leases) EndLease(context.Context, string) error {
	close(l.ended)
	return nil
}

func TestALeaseThatIsRenewedEndsAfterThat(t *testing.T) {
	r := newRig(t)
	_, id := r.fetch(t, "team/task:v1", files)
	l := leases{renewed: make(chan struct{}, 1), ended: make(chan struct{}), early: new(atomic.Bool)}
	r.end()
	r.wrap = func(s reader.ChunkSource) reader.ChunkSource { l.ChunkSource = s; return l }
	r.start(t, cache.MinLimit)
	c := r.open(t, id)
	<-l.renewed
	c.Close()
	<-l.ended
	r.end()
	if l.early.Load() {
		t.Error("a lease was ended while it was being renewed, and may outlive that")
	}
}
