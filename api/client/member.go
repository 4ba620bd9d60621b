package client

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"time"

	"quarry/api"
	"quarry/store"
)

const (
	// firstAvoid is how long a store that has failed is asked after the others;
	// it doubles with each failed probe up to maxAvoid: then one request in 30 s
	// waits a hedge's delay for a store that stays away.
	firstAvoid = time.Second
	maxAvoid   = 30 * time.Second
	// overtakes in a row, by hedges, are a failure: a store that hangs does not
	// say so. One or two are a chunk that was slow to read.
	overtakes = 3
	// waitsKept is of how many waits a store's quantile is taken: 64 are the reads
	// of some seconds, and 5 % of them are 3.
	waitsKept = 64
)

// member is one store of several, with what was seen of it.
type member struct {
	*Client
	i int // place in the configuration

	mu        sync.Mutex // guards what follows
	fails     int        // in a row; not 0: it is avoided or probed
	avoid     time.Time  // until then the others are asked first
	probing   bool       // a request finds out whether it is back
	well      time.Time  // when it last answered well
	overtaken int        // attempts in a row that hedges have beaten
	waits     [waitsKept]time.Duration
	waited    int // waits there have been
	stats     StoreStats
}

// ranked tells how soon to ask a store: one that is well or to be probed before
// those that are avoided, these by when they are to be probed.
func (m *member) ranked(now time.Time) (avoided bool, until time.Time) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.fails == 0 || (!m.probing && !now.Before(m.avoid)) {
		return false, time.Time{}
	}
	return true, m.avoid
}

// order returns the stores as they are best asked.
func (s *Stores) order(now time.Time) []*member {
	type rank struct {
		m     *member
		last  int
		until time.Time
	}
	ranks := make([]rank, len(s.members))
	for i, m := range s.members {
		ranks[i].m = m
		avoided, until := m.ranked(now)
		if avoided {
			ranks[i].last, ranks[i].until = 1, until
		}
	}
	slices.SortStableFunc(ranks, func(a, b rank) int {
		return cmp.Or(cmp.Compare(a.last, b.last), a.until.Compare(b.until))
	})
	out := make([]*member, len(ranks))
	for i, r := range ranks {
		out[i] = r.m
	}
	return out
}

// asked notes that a request goes out.
func (m *member) asked() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.probing = m.fails > 0
}

// answered notes an answer that was whole.
func (m *member) answered() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.fails, m.overtaken, m.probing, m.well = 0, 0, false, time.Now()
}

// wellSince reports whether the store has answered well after then.
func (m *member) wellSince(then time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.well.After(then)
}

// failed notes that the store gave no answer or a bad one.
func (m *member) failed(now time.Time, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.stats.Failed++
	if errors.Is(err, store.ErrUnauthorised) {
		m.stats.Refused++
	}
	m.failedLocked(now, retryAfter(err))
}

func (m *member) failedLocked(now time.Time, atLeast time.Duration) {
	m.probing, m.overtaken = false, 0
	if m.fails > 0 && now.Before(m.avoid) {
		return // one of many that failed together
	}
	m.fails++
	m.avoid = now.Add(max(min(firstAvoid<<min(m.fails-1, 10), maxAvoid), atLeast))
}

// left notes an attempt that was given up because others had the answers, or
// nobody wanted them any more. silent: it had sent nothing, though it had time.
func (m *member) left(now time.Time, silent bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.probing = false
	if !silent {
		return
	}
	if m.overtaken++; m.overtaken >= overtakes || m.fails > 0 {
		m.failedLocked(now, 0)
	}
}

// retryAfter is how long a server wants to be left alone, within reason.
func retryAfter(err error) time.Duration {
	var e *api.Error
	if errors.As(err, &e) {
		return min(e.RetryAfter, maxRetryAfter)
	}
	return 0
}

// wait notes how long the first chunk of an attempt took, at least.
func (m *member) wait(d time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.waits[m.waited%waitsKept] = d
	m.waited++
}

// usualWait returns what 95 of 100 waits do not exceed, 0 when nothing is known.
func (m *member) usualWait() time.Duration {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := min(m.waited, waitsKept)
	if n == 0 {
		return 0
	}
	sorted := slices.Clone(m.waits[:n])
	slices.Sort(sorted)
	return sorted[n-1-n/20]
}

// count changes the figures of the store.
func (m *member) count(change func(*StoreStats)) {
	m.mu.Lock()
	defer m.mu.Unlock()
	change(&m.stats)
}

// figures returns them.
func (m *member) figures() StoreStats {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.stats
}
