package client

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	"quarry/api"
	"quarry/store"
	"quarry/store/chunk"
)

var (
	_ store.Getter      = (*Stores)(nil)
	_ store.BatchGetter = (*Stores)(nil)
)

// StoresConfig describes several stores of the same content.
type StoresConfig struct {
	Clients []*Client // the store asked first comes first; one is enough

	// HedgeAfter is how long a batch may go without a sign of life before a second
	// request for its open chunks is sent. 0 = twice the usual wait, from 200 ms to
	// 1 s; negative = never.
	HedgeAfter time.Duration
	// AttemptTimeout is the patience of a first attempt: it has failed when less
	// than 16 KiB come in so long a wait. It doubles with each attempt at the same
	// store, up to the client's IdleTimeout. 0 = 5 s: a third of what a server
	// waits for its bucket, as another server or another try may be faster.
	AttemptTimeout time.Duration
	Attempts       int // for one chunk at one store; 0 = 4
	// Outage is how long a store that has answered well is expected to come back:
	// so long after that it is asked beyond Attempts when it gives no answer. 0 =
	// 10 s, for a server that is restarted; negative = no longer.
	Outage  time.Duration
	Backoff time.Duration // before a store is asked for the same chunk again, doubling, with jitter; 0 = 100 ms
}

// Stores reads from several stores of the same content as from one. A chunk that
// one has not, not well or not now is asked of the others, and only when no
// store gives it has it an error: a *StoreError for each store that was asked,
// of which store.OutcomeOf makes one outcome. A store that fails is asked after
// the others for a while. Safe for concurrent use.
type Stores struct {
	cfg     StoresConfig
	members []*member
	budget  *budget

	hedges, hedgesWon, again atomic.Uint64
}

// StoresStats counts what Stores has done since it was made.
type StoresStats struct {
	Stats            // of all clients
	Hedges    uint64 // second requests for chunks that did not come
	HedgesWon uint64 // those that brought a chunk first
	Again     uint64 // chunks asked for once more, by hedges and after failures: as often they may come in vain
	Stores    []StoreStats
}

// StoreStats are the figures of one store.
type StoreStats struct {
	Store     string // URL or socket
	Failed    uint64 // requests without a whole answer
	Corrupt   uint64 // copies of chunks that were not good
	Missing   uint64 // chunks it has not
	Refused   uint64 // requests refused: 401 and 403
	Avoided   bool   // now: the others are asked first
	UsualWait time.Duration
}

// NewStores returns a reader of the stores of cfg, at least one.
func NewStores(cfg StoresConfig) *Stores {
	if len(cfg.Clients) == 0 {
		panic("client: no stores")
	}
	if cfg.AttemptTimeout == 0 {
		cfg.AttemptTimeout = 5 * time.Second
	}
	if cfg.Attempts == 0 {
		cfg.Attempts = 4
	}
	if cfg.Outage == 0 {
		cfg.Outage = 10 * time.Second
	}
	if cfg.Backoff == 0 {
		cfg.Backoff = 100 * time.Millisecond
	}
	s := &Stores{cfg: cfg, budget: newBudget()}
	for i, c := range cfg.Clients {
		s.members = append(s.members, &member{Client: c, i: i})
	}
	return s
}

// Get implements store.Getter.
func (s *Stores) Get(ctx context.Context, d chunk.Digest, dst []byte) ([]byte, error) {
	return getOne(ctx, s, d, dst)
}

// getOne is a batch of one.
func getOne(ctx context.Context, from store.BatchGetter, d chunk.Digest, dst []byte) ([]byte, error) {
	err := from.GetBatch(ctx, []chunk.Digest{d}, func(_ chunk.Digest, p []byte, err error) error {
		if err == nil {
			dst = append(dst[:0], p...)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return dst, nil
}

// GetBatch implements store.BatchGetter. Each chunk is given to fn as its first
// verified copy comes, whatever the others of the batch wait for. When ctx has a
// deadline and it passes, chunks whose copies were all bad by then have that
// error.
func (s *Stores) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	return inGroups(ds, func(group []chunk.Digest) error { return s.newFetch(group, fn).run(ctx) })
}

// inGroups calls get for the different digests of ds, api.MaxBatch at a time.
func inGroups(ds []chunk.Digest, get func([]chunk.Digest) error) error {
	seen := make(map[chunk.Digest]bool, len(ds))
	var group []chunk.Digest
	for _, d := range ds {
		if seen[d] {
			continue
		}
		seen[d] = true
		if group = append(group, d); len(group) == api.MaxBatch {
			if err := get(group); err != nil {
				return err
			}
			group = nil
		}
	}
	if len(group) == 0 {
		return nil
	}
	return get(group)
}

// patience is how long attempt n at a store may be silent. A server on this
// machine may have to be started first.
func (s *Stores) patience(m *member, n int) time.Duration {
	if m.cfg.Socket != "" {
		return m.cfg.IdleTimeout
	}
	return min(s.cfg.AttemptTimeout<<min(n-1, 10), m.cfg.IdleTimeout)
}

// backoff is the wait before a store is asked again, having failed n times.
func (s *Stores) backoff(n int, err error) time.Duration {
	wait := min(s.cfg.Backoff<<min(n-1, 10), maxBackoff)
	return max(wait/2+rand.N(wait/2+1), retryAfter(err))
}

// Stats returns the counters.
func (s *Stores) Stats() StoresStats {
	st := StoresStats{Hedges: s.hedges.Load(), HedgesWon: s.hedgesWon.Load(), Again: s.again.Load()}
	now := time.Now()
	for _, m := range s.members {
		c := m.Client.Stats()
		st.Requests += c.Requests
		st.Retries += c.Retries
		st.BytesIn += c.BytesIn
		st.BytesOut += c.BytesOut
		st.BucketBytes += c.BucketBytes
		one := m.figures()
		one.Store, one.UsualWait = m.String(), m.usualWait()
		one.Avoided, _ = m.ranked(now)
		st.Stores = append(st.Stores, one)
	}
	return st
}

// Close closes the idle connections of all clients.
func (s *Stores) Close() {
	for _, m := range s.members {
		m.Client.Close()
	}
}

// reason says what a store did instead of answering.
func reason(m *member, err error) error {
	if errors.As(err, new(*StoreError)) {
		return err
	}
	return &StoreError{Store: m.String(), Outcome: store.OutcomeOf(err), Err: err}
}

// hopeless: asking the same store again does not help. What is not of a quarry
// server, nor a refusal, may be gone the next time.
func hopeless(err error) bool {
	if final(err) || errors.Is(err, store.ErrUnauthorised) {
		return true
	}
	var e *api.Error
	return errors.As(err, &e) && !errors.As(err, new(*foreign)) && !e.Retryable
}

// reasons is what each of several stores did.
type reasons []error

func (r reasons) Error() string {
	texts := make([]string, len(r))
	for i, err := range r {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

// Unwrap returns all of them.
func (r reasons) Unwrap() []error { return r }

// joined returns the reasons there are as one error; nil for none.
func joined(errs []error) error {
	var r reasons
	for _, err := range errs {
		if err != nil {
			r = append(r, err)
		}
	}
	switch len(r) {
	case 0:
		return nil
	case 1:
		return r[0]
	}
	return r
}
