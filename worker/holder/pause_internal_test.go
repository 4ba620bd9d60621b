package holder

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"sync"
	"testing"
	"time"

	"quarry/internal/need"
	"quarry/worker/sentry"
)

// slowSentry answers like a Sentry that counts pauses, and to Pause only when it is
// let: a task of its guest does not stop.
type slowSentry struct {
	t    *testing.T
	let  chan struct{}
	mu   sync.Mutex
	down int // pauses not resumed
	all  int
}

func (s *slowSentry) serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() { // ends with the connection
			defer c.Close()
			for dec := json.NewDecoder(c); ; {
				var r struct {
					Method string `json:"method"`
				}
				if dec.Decode(&r) != nil {
					return
				}
				s.count(r.Method)
				if r.Method == "containerManager.Pause" {
					<-s.let
				}
				c.Write([]byte(`{"success":true,"err":"","result":{}}`))
			}
		}()
	}
}

func (s *slowSentry) count(method string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch method {
	case "containerManager.Pause":
		s.down++
		s.all++
	case "containerManager.Resume":
		s.down--
	}
	if s.down < 0 {
		s.t.Error("a Resume too many: this ends a Sentry")
	}
}

func (s *slowSentry) counts() (down, all int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.down, s.all
}

// A pause that does not come in time is undone, with one Resume, and only once it is
// known to have come.
func TestAPauseThatComesLate(t *testing.T) {
	path := need.ShortDir(t) + "/socket"
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	s := &slowSentry{t: t, let: make(chan struct{})}
	go s.serve(l)
	b := newBox(config{Dir: t.TempDir()}, slog.New(slog.DiscardHandler), nil)
	b.sentry = sentry.New(path, "test")
	defer b.sentry.Close()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := b.pause(ctx, false); !errors.Is(err, ErrBusy) {
		t.Errorf("a guest that does not stop: %v", err)
	}
	if down, all := s.counts(); down != 1 || all != 1 {
		t.Errorf("%d pauses of %d are not undone, want 1 of 1: its answer has not come", down, all)
	}
	if b.isPaused {
		t.Error("it is told as paused")
	}
	close(s.let)
	if err := b.resume(ctx); err != nil { // waits until it is undone, and adds nothing
		t.Error(err)
	}
	if down, all := s.counts(); down != 0 || all != 1 {
		t.Errorf("%d pauses of %d are not undone", down, all)
	}
	if err := errors.Join(b.pause(ctx, false), b.pause(ctx, false)); err != nil {
		t.Error(err)
	}
	if down, all := s.counts(); down != 1 || all != 2 || !b.current().Paused {
		t.Errorf("%d pauses of %d are not undone", down, all)
	}
	if err := errors.Join(b.resume(ctx), b.resume(ctx)); err != nil {
		t.Error(err)
	}
	if down, all := s.counts(); down != 0 || all != 2 || b.current().Paused {
		t.Errorf("%d pauses of %d are not undone", down, all)
	}
	b.tasks.Wait()
}
