package wait

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Watcher watches the sandboxes of one worker. Its methods may be called at once
// from any number of goroutines.
type Watcher struct {
	cfg   Config
	owned bool // ask for a table that others cannot change
	stop  context.CancelFunc
	done  chan struct{} // closed when run has returned

	mu      sync.Mutex // guards what follows, and every change of the rules
	ends    []netip.AddrPort
	session *session // nil while there is none
	closed  bool

	// sight guards what follows. It is taken after mu, and for each packet alone.
	sight sync.RWMutex
	by    map[netip.Addr]*Watched
	blind bool
}

// New begins to watch. The rules and the socket are there when it returns.
func New(cfg Config) (*Watcher, error) { return open(cfg, true) }

func open(cfg Config, owned bool) (*Watcher, error) {
	cfg = cfg.withDefaults()
	if err := checkEndpoints(cfg.Endpoints); err != nil {
		return nil, err
	}
	if cfg.Name == "" {
		return nil, errors.New("a watcher needs a name for its table")
	}
	s, err := openSession(cfg, cfg.Endpoints, nil, owned)
	if err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	w := &Watcher{
		cfg: cfg, owned: owned, stop: stop, done: make(chan struct{}),
		ends: slices.Clone(cfg.Endpoints), session: s, by: map[netip.Addr]*Watched{},
	}
	cfg.Metrics.watching.Set(1)
	go w.run(ctx, s) // until Close
	return w, nil
}

func checkEndpoints(ends []netip.AddrPort) error {
	if len(ends) > MaxEndpoints {
		return fmt.Errorf("%w: there are %d, and at most %d", ErrEndpoint, len(ends), MaxEndpoints)
	}
	for _, e := range ends {
		if !e.Addr().Is4() || e.Port() == 0 {
			return fmt.Errorf("%w: %s", ErrEndpoint, e)
		}
	}
	return nil
}

// Close resumes what is paused and removes the rules.
func (w *Watcher) Close() error {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	var wg sync.WaitGroup
	for _, x := range w.all() {
		wg.Go(x.Close)
	}
	wg.Wait()
	w.stop()
	<-w.done
	return nil
}

// Watch begins to watch a sandbox. Only what it sends from now on counts.
func (w *Watcher) Watch(s Sandbox) (*Watched, error) {
	if !s.Addr.Is4() || s.Veth == "" || len(s.Veth) >= unix.IFNAMSIZ {
		return nil, fmt.Errorf("sandbox %s cannot be watched at interface %q with address %s", s.ID, s.Veth, s.Addr)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed {
		return nil, ErrClosed
	}
	x := newWatched(w, s)
	w.sight.Lock()
	if w.by[s.Addr] != nil {
		w.sight.Unlock()
		return nil, fmt.Errorf("%w: %s at %s", ErrWatched, s.ID, s.Addr)
	}
	w.by[s.Addr] = x
	x.m.blind = w.blind
	w.sight.Unlock()
	if w.session != nil {
		if err := w.session.rules.addGuest(s); err != nil {
			w.session.fail(err) // the next one begins with all
		}
	}
	w.cfg.Metrics.watched.Inc()
	go x.loop() // until Close of x, which waits for it
	return x, nil
}

// SetEndpoints replaces the endpoints: where a name leads now. Sandboxes that are
// paused are resumed, as the answer may come from one that is watched no more.
func (w *Watcher) SetEndpoints(ends []netip.AddrPort) error {
	if err := checkEndpoints(ends); err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if slices.Equal(w.ends, ends) {
		return nil
	}
	if w.session != nil {
		if err := w.session.rules.setEndpoints(ends); err != nil {
			w.session.fail(err)
		}
	}
	w.ends = slices.Clone(ends)
	w.see(w.isBlind(), Endpoint)
	return nil
}

func (w *Watcher) isBlind() bool {
	w.sight.RLock()
	defer w.sight.RUnlock()
	return w.blind
}

// forget removes a sandbox.
func (w *Watcher) forget(x *Watched) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.sight.Lock()
	known := w.by[x.s.Addr] == x
	if known {
		delete(w.by, x.s.Addr)
	}
	w.sight.Unlock()
	if !known {
		return
	}
	w.cfg.Metrics.watched.Dec()
	if w.session == nil {
		return
	}
	if err := w.session.rules.removeGuest(x.s); err != nil {
		w.session.fail(err)
	}
}

func (w *Watcher) all() []*Watched {
	w.sight.RLock()
	defer w.sight.RUnlock()
	out := make([]*Watched, 0, len(w.by))
	for _, x := range w.by {
		out = append(out, x)
	}
	return out
}

// see says whether packets are seen from now on. Nothing that was seen before counts.
func (w *Watcher) see(blind bool, why Reason) {
	now := time.Now()
	w.sight.Lock()
	w.blind = blind
	w.sight.Unlock()
	for _, x := range w.all() {
		x.see(blind, why, now)
	}
	if blind {
		w.cfg.Metrics.watching.Set(0)
	} else {
		w.cfg.Metrics.watching.Set(1)
	}
}

// run reads, and opens another session when one has failed.
func (w *Watcher) run(ctx context.Context, s *session) {
	defer close(w.done)
	for {
		why, err := s.run(ctx, w)
		w.mu.Lock()
		w.session = nil
		w.mu.Unlock()
		if ctx.Err() != nil {
			return
		}
		w.lose(why, err)
		if s = w.reopen(ctx); s == nil {
			return
		}
		w.see(false, why)
		w.cfg.Log.Info("the packets of sandboxes and their models are seen again")
	}
}

// lose resumes everything.
func (w *Watcher) lose(why Reason, err error) {
	w.cfg.Metrics.lost.WithLabelValues(string(why)).Inc()
	w.see(true, why)
	w.cfg.Log.Warn("no sandbox is paused for its model: its packets are not seen", "reason", why, "error", err)
}

// reopen returns another session, or nil when ctx has ended.
func (w *Watcher) reopen(ctx context.Context) *session {
	for pause := 10 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		w.mu.Lock()
		var guests []Sandbox
		for _, x := range w.all() {
			guests = append(guests, x.s)
		}
		s, err := openSession(w.cfg, w.ends, guests, w.owned)
		w.session = s
		w.mu.Unlock()
		if err == nil {
			return s
		}
		w.cfg.Log.Warn("the packets of sandboxes and their models cannot be seen", "error", err)
	}
}

// event takes what the reader says beside packets.
func (w *Watcher) event(e tapEvent) {
	blind := w.isBlind()
	switch {
	case e == tapMissing && !blind:
		w.lose(Overrun, nil)
	case e == tapDrained && blind:
		// The kernel reports the next loss anew only after the socket was empty.
		w.see(false, Overrun)
	}
}

// missing is called when packets are missing and the socket said nothing of it.
func (w *Watcher) missing() {
	w.cfg.Metrics.lost.WithLabelValues(string(Overrun)).Inc()
	now := time.Now()
	for _, x := range w.all() {
		x.doubt(Overrun, now)
	}
}

// packet hands a header to its sandbox.
func (w *Watcher) packet(l logged) {
	asks := l.hook == hookPrerouting
	guest, p, err := parsePacket(l.payload, asks)
	w.sight.RLock()
	x := w.by[guest]
	w.sight.RUnlock()
	m := w.cfg.Metrics
	switch {
	case err != nil || x == nil:
		m.packets.WithLabelValues(fromUnknown).Inc()
		if x != nil && !asks {
			x.doubt(Unclear, time.Now())
		}
		return
	case asks:
		m.packets.WithLabelValues(fromGuest).Inc()
	default:
		m.packets.WithLabelValues(fromModel).Inc()
	}
	x.packet(p, time.Now())
}
