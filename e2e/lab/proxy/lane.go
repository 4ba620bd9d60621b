package proxy

import (
	"context"
	"errors"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// pieceBytes is how much is delivered at once: 32 KiB are 0.26 ms at 1 Gbit/s,
	// well below the delays that are measured.
	pieceBytes = 32 << 10
	// maxFlying is how much of one direction of a connection may be under way.
	// It is five times what 1 Gbit/s moves in 100 ms, so that the delay does not
	// limit what a client may send ahead.
	maxFlying = 64 << 20
	// stallPoll is how often a stalled lane looks whether it may go on.
	stallPoll = 5 * time.Millisecond
)

// lane is one direction of the network, shared by all connections.
type lane struct {
	delay time.Duration
	bits  int64 // a second, 0 is no limit
	bytes atomic.Int64

	mu      sync.Mutex // guards what follows
	free    time.Time  // when the last byte that was let in has left
	flip    int        // least length of a piece to damage; 0 is none
	stalled bool
}

// piece is some bytes on their way.
type piece struct {
	p   []byte
	due time.Time
}

// fault sets what goes wrong.
func (l *lane) fault(flip int, stalled bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.flip, l.stalled = flip, stalled
}

// enter gives a piece its place in the lane: after everything that was let in
// before it, and at its far end a delay later.
func (l *lane) enter(p []byte, notBefore time.Time) piece {
	l.bytes.Add(int64(len(p)))
	l.mu.Lock()
	defer l.mu.Unlock()
	at := time.Now()
	if at.Before(notBefore) {
		at = notBefore
	}
	if l.bits > 0 {
		if at.Before(l.free) {
			at = l.free
		}
		at = at.Add(time.Duration(float64(len(p)) * 8 / float64(l.bits) * float64(time.Second)))
		l.free = at
	}
	if l.flip > 0 && len(p) >= l.flip {
		p[len(p)/2] ^= 1
	}
	return piece{p: p, due: at.Add(l.delay)}
}

// move forwards from one end to the other until there is no more, which is nil,
// or one of them fails.
func (l *lane) move(ctx context.Context, to io.Writer, from io.Reader, opened time.Time) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	flying := make(chan piece, maxFlying/pieceBytes)
	read := make(chan error, 1)
	go func() { // ends with from, or with ctx when nobody takes its pieces
		defer close(flying)
		read <- l.read(ctx, from, flying, opened)
	}()
	for f := range flying {
		if err := l.wait(ctx, f.due); err != nil {
			return err
		}
		if _, err := to.Write(f.p); err != nil {
			return err
		}
	}
	return <-read
}

func (l *lane) read(ctx context.Context, from io.Reader, flying chan<- piece, opened time.Time) error {
	for {
		p := make([]byte, pieceBytes)
		n, err := from.Read(p)
		if n > 0 {
			select {
			case flying <- l.enter(p[:n], opened):
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
	}
}

// wait returns when a piece is due and the lane is not stalled.
func (l *lane) wait(ctx context.Context, due time.Time) error {
	for {
		pause := time.Until(due)
		if pause <= 0 {
			l.mu.Lock()
			stalled := l.stalled
			l.mu.Unlock()
			if !stalled {
				return nil
			}
			pause = stallPoll
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}
