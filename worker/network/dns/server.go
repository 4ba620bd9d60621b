package dns

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	perSecond = 100 // questions of one guest that are looked at
	burst     = 400 // at once after a quiet time
	atOnce    = 16  // questions of one guest that wait for an answer
	maxTTL    = 60  // seconds; a guest that keeps names longer finds addresses that hold no more
)

// Config is what a Server is made of.
type Config struct {
	Conn     net.PacketConn // of this guest alone; Close closes it
	Upstream *Upstream
	// Allowed reports whether a name, in lower case without a dot at its end, may be
	// asked for now.
	Allowed func(name string) bool
	// Admit lets the guest reach addresses of an allowed name, and returns those that
	// it reaches now. Nothing is told to the guest before it returns.
	Admit func(ctx context.Context, name string, addrs []netip.Addr) ([]netip.Addr, error)
	Log   *slog.Logger
}

// Counters are of one server.
type Counters struct {
	Answered int64 // of allowed names
	Refused  int64 // of other names
	Dropped  int64 // over the rate, and what is no question
	Failed   int64 // the resolvers did not answer, or the address could not be admitted
}

// Server answers one guest.
type Server struct {
	cfg   Config
	end   context.Context // of what is under way when Close is called
	stop  context.CancelFunc
	tasks sync.WaitGroup
	slots chan struct{}

	answered, refused, dropped, failed atomic.Int64
}

// Serve answers what comes until Close.
func Serve(cfg Config) *Server {
	s := &Server{cfg: cfg, slots: make(chan struct{}, atOnce)}
	s.end, s.stop = context.WithCancel(context.Background())
	s.tasks.Go(s.read)
	return s
}

// Close ends it, and what is under way.
func (s *Server) Close() error {
	s.stop()
	err := s.cfg.Conn.Close()
	s.tasks.Wait()
	return err
}

// Counters returns what was counted.
func (s *Server) Counters() Counters {
	return Counters{s.answered.Load(), s.refused.Load(), s.dropped.Load(), s.failed.Load()}
}

// read takes one datagram after the other. What can be answered at once is; what has
// to wait has one of atOnce places.
func (s *Server) read() {
	buf := make([]byte, maxQuery+1) // one more, so that a longer one is seen to be
	left, last := float64(burst), time.Now()
	for {
		n, from, err := s.cfg.Conn.ReadFrom(buf)
		if err != nil {
			if s.end.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			select { // of one datagram, or of a socket that is gone: no busy loop
			case <-s.end.Done():
			case <-time.After(10 * time.Millisecond):
			}
			continue
		}
		now := time.Now()
		left = min(burst, left+now.Sub(last).Seconds()*perSecond)
		last = now
		if left < 1 {
			s.dropped.Add(1)
			continue
		}
		left--
		s.take(append([]byte(nil), buf[:n]...), from)
	}
}

func (s *Server) take(b []byte, from net.Addr) {
	q, err := parseQuery(b)
	if err != nil {
		s.dropped.Add(1)
		return
	}
	switch {
	case !s.cfg.Allowed(q.name) || q.class != dnsmessage.ClassINET:
		// "No such name" and not "refused", after which the C library asks again and
		// programs report a failure that may pass.
		s.refused.Add(1)
		s.send(q.answer(dnsmessage.RCodeNameError, nil, 0), from)
		return
	case q.kind != dnsmessage.TypeA:
		// The name exists and has nothing of that type: sandboxes have no IPv6.
		s.answered.Add(1)
		s.send(q.answer(dnsmessage.RCodeSuccess, nil, 0), from)
		return
	}
	select {
	case s.slots <- struct{}{}:
		s.tasks.Go(func() {
			defer func() { <-s.slots }()
			s.answer(q, from)
		})
	default:
		s.dropped.Add(1)
	}
}

func (s *Server) answer(q query, from net.Addr) {
	addrs, ttl, err := s.cfg.Upstream.Lookup(s.end, q.name)
	if err == nil {
		addrs, err = s.cfg.Admit(s.end, q.name, addrs)
		if err == nil && len(addrs) == 0 {
			err = ErrNoName // all of them are addresses that no name may open
		}
	}
	switch {
	case s.end.Err() != nil:
	case err == nil:
		s.answered.Add(1)
		s.send(q.answer(dnsmessage.RCodeSuccess, addrs, uint32(min(maxTTL, max(0, ttl.Seconds())))), from)
	case errors.Is(err, ErrNoName):
		s.answered.Add(1)
		s.send(q.answer(dnsmessage.RCodeNameError, nil, 0), from)
	default:
		s.failed.Add(1)
		s.cfg.Log.Debug("name not answered", "name", q.name, "error", err)
		s.send(q.answer(dnsmessage.RCodeServerFailure, nil, 0), from)
	}
}

func (s *Server) send(b []byte, to net.Addr) {
	// A guest that takes no answer loses it: the write does not wait for the guest.
	s.cfg.Conn.WriteTo(b, to)
}
