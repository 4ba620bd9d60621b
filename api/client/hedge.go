package client

import (
	"sync"
	"time"
)

const (
	// A hedge is sent when nothing has come for twice the wait that 95 of 100
	// requests do not exceed: fewer than one in twenty is then hedged, whatever
	// the distance to the store. floor: on a busy machine a goroutine may wait
	// tens of milliseconds for a processor, which is no stall of the store.
	// ceiling: a reader that waits a second is seen by people.
	hedgeFactor  = 2
	hedgeFloor   = 200 * time.Millisecond
	hedgeCeiling = time.Second
	// hedgeUnknown holds before a store has answered: connecting with TLS and
	// asking takes 4 round trips, 400 ms at 100 ms each.
	hedgeUnknown = 500 * time.Millisecond

	// hedgeEvery requests earn one hedge, so that a store that is slow for all
	// gets 5 % more to do, not twice as much; hedgeBurst may be saved up, for the
	// reads that stall together when one connection or one disk does.
	hedgeEvery = 20
	hedgeBurst = 8
)

// hedgeAfter is how long to wait for a sign of life from m before a hedge.
func (s *Stores) hedgeAfter(m *member) time.Duration {
	if s.cfg.HedgeAfter > 0 {
		return s.cfg.HedgeAfter
	}
	usual := m.usualWait()
	if usual == 0 {
		return hedgeUnknown
	}
	return min(max(hedgeFactor*usual, hedgeFloor), hedgeCeiling)
}

// budget bounds hedges. Safe for concurrent use.
type budget struct {
	mu     sync.Mutex // guards earned
	earned int        // a hedge costs hedgeEvery
}

func newBudget() *budget { return &budget{earned: hedgeBurst * hedgeEvery} }

// earn notes one request that is no hedge.
func (b *budget) earn() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.earned = min(b.earned+1, hedgeBurst*hedgeEvery)
}

// spend reports whether a hedge may be sent.
func (b *budget) spend() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.earned < hedgeEvery {
		return false
	}
	b.earned -= hedgeEvery
	return true
}
