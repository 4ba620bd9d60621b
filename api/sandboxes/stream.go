package sandboxes

import (
	"context"
	"sync"
	"time"
)

// streaming returns a context that ends with the request or with the server.
func (h *Handler) streaming(c call) (context.Context, func()) {
	ctx, cancel := context.WithCancel(c.r.Context())
	stop := context.AfterFunc(h.stopping, cancel)
	return ctx, func() { stop(); cancel() }
}

// stream writes frames to a client that waits for them, and a pulse when there are
// none, so that both sides know of a connection that is lost.
type stream struct {
	c    call
	stop chan struct{}
	done sync.WaitGroup

	mu  sync.Mutex // guards the writer and err
	err error
}

// newStream begins the pulses; pulse makes one of an empty comment.
func newStream(h *Handler, c call, pulse func([]byte) []byte) *stream {
	s := &stream{c: c, stop: make(chan struct{})}
	beat := pulse([]byte(":\n\n"))
	s.done.Go(func() { // ends with end
		tick := time.NewTicker(h.cfg.Pulse)
		defer tick.Stop()
		for {
			select {
			case <-s.stop:
				return
			case <-tick.C:
				_ = s.write(beat) // the next frame tells
			}
		}
	})
	return s
}

// write sends one frame. Errors: errClientGone.
func (s *stream) write(b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return s.err
	}
	if _, s.err = s.c.w.Write(b); s.err == nil {
		s.err = s.c.w.flush()
	}
	return s.err
}

// end ends the pulses.
func (s *stream) end() {
	close(s.stop)
	s.done.Wait()
}
