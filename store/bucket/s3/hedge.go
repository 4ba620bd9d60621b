package s3

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

const (
	// maxHedged bounds what is read twice, and held in memory for it: chunks and
	// ranges of packs. A whole pack is slow because it is large.
	maxHedged = 4 << 20
	// samples is how many reads the delay is taken from, and slowRank which of them
	// it is: 61 of 64 is the 95th percentile.
	samples  = 64
	slowRank = 61
	// minHedge and maxHedge bound the delay: nothing is gained below a round trip,
	// and beyond two seconds something is wrong with the first request.
	minHedge = 20 * time.Millisecond
	maxHedge = 2 * time.Second
	// hedgeCost is how many reads pay for one second request, so that they are 5 %
	// of all, and hedgeSaved how many may come at once.
	hedgeCost  = 20
	hedgeSaved = 16
)

// pace knows how long reads take, and how many second requests they may have.
type pace struct {
	mu    sync.Mutex // guards all
	took  [samples]time.Duration
	n     int // reads so far
	saved int // in reads
}

// add notes a read that succeeded.
func (p *pace) add(d time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.took[p.n%samples] = d
	p.n++
	p.saved = min(p.saved+1, hedgeCost*hedgeSaved)
}

// delay returns when a read is slow.
func (p *pace) delay() time.Duration {
	p.mu.Lock()
	took := p.took // a copy
	n := p.n
	p.mu.Unlock()
	if n < samples {
		return maxHedge
	}
	slices.Sort(took[:])
	return min(max(took[slowRank-1], minHedge), maxHedge)
}

// spend says whether one more second request may be made.
func (p *pace) spend() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.n < samples && p.saved < hedgeCost {
		p.saved += hedgeCost // the first few are on credit
	}
	if p.saved < hedgeCost {
		return false
	}
	p.saved -= hedgeCost
	return true
}

// hedged is get with a second request when the first is slow. Both have ended
// when it returns.
func (b *Bucket) hedged(ctx context.Context, key string, p []byte, off int64) error {
	if len(p) > maxHedged {
		return b.get(ctx, key, p, off)
	}
	begun := time.Now()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	first := make(chan error, 1)
	go func() { first <- b.get(ctx, key, p, off) }() // ends with ctx; awaited on every path
	timer := time.NewTimer(b.pace.delay())
	defer timer.Stop()
	select {
	case err := <-first:
		if err == nil {
			b.pace.add(time.Since(begun))
		}
		return err
	case <-timer.C:
	}
	if !b.pace.spend() {
		return <-first
	}
	b.metrics.hedges.Inc()
	return b.second(ctx, cancel, first, key, p, off)
}

// second makes the second request and returns what the better of the two says.
func (b *Bucket) second(ctx context.Context, cancel func(), first <-chan error, key string, p []byte, off int64) error {
	q := make([]byte, len(p))
	second := make(chan error, 1)
	go func() { second <- b.get(ctx, key, q, off) }() // ends with ctx; awaited on every path
	select {
	case err := <-first:
		if settles(err) {
			cancel()
			<-second
			return err
		}
		if err = <-second; err == nil {
			copy(p, q)
		}
		return err
	case err := <-second:
		if !settles(err) {
			return <-first
		}
		cancel()
		<-first // nothing writes to p any more
		if err == nil {
			copy(p, q)
		}
		return err
	}
}

// settles says whether an answer makes the other request needless.
func settles(err error) bool {
	var f final
	return err == nil || errors.As(err, &f)
}
