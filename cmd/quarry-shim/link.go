package main

import (
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"quarry/nbd"
	"quarry/nbd/attach"
)

const (
	// dialTimeout is for one attempt to reach the reader.
	dialTimeout = 10 * time.Second
	// minRetry and maxRetry bound the pause between attempts: short at first, for
	// a reader that is restarting, and no burden while it stays away.
	minRetry = 20 * time.Millisecond
	maxRetry = 2 * time.Second
)

// link is the connection to the reader, made again when it is lost. While it is
// lost every read fails at once: right bytes or an error, never a hang.
type link struct {
	opts   options
	log    *slog.Logger
	client atomic.Pointer[nbd.Client] // the newest, perhaps lost
	kick   chan struct{}              // ends redial's pause
	cancel context.CancelFunc
	keeper sync.WaitGroup
}

var _ attach.Source = (*link)(nil)

// dialLink makes the first connection; ctx bounds it.
func dialLink(ctx context.Context, o options, log *slog.Logger) (*link, error) {
	c, err := dial(ctx, o)
	if err != nil {
		return nil, err
	}
	keepCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	l := &link{opts: o, log: log, kick: make(chan struct{}, 1), cancel: cancel}
	l.client.Store(c)
	l.keeper.Go(func() { l.keep(keepCtx) })
	return l, nil
}

// dial connects to the reader and checks that it offers the image this mount is
// of: a kernel that cached one image must not be fed another.
func dial(ctx context.Context, o options) (*nbd.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	c, err := nbd.Dial(ctx, "unix", o.socket, o.export)
	if err != nil {
		return nil, err
	}
	if c.Size() != o.size || c.Export() != o.export {
		c.Close()
		return nil, fmt.Errorf("reader offers export %q of %d bytes, this mount is of %q with %d", c.Export(), c.Size(), o.export, o.size)
	}
	return c, nil
}

// Size returns the export's length.
func (l *link) Size() int64 { return l.opts.size }

// View shows bytes of the export; see attach.Source.
func (l *link) View(ctx context.Context, off int64, n int, fn func(p []byte) error) error {
	c := l.client.Load()
	if c.Err() != nil {
		// Somebody reads: look for a new reader now, for the next read.
		select {
		case l.kick <- struct{}{}:
		default:
		}
	}
	return c.View(ctx, off, n, fn)
}

// keep replaces the connection whenever it is lost, until close.
func (l *link) keep(ctx context.Context) {
	for {
		c := l.client.Load()
		select {
		case <-ctx.Done():
			return
		case <-c.Done():
		}
		l.log.WarnContext(ctx, "reader lost", "export", l.opts.export, "err", c.Err())
		if c = l.redial(ctx); c == nil {
			return
		}
		l.client.Store(c)
		l.log.InfoContext(ctx, "reader found again", "export", l.opts.export)
	}
}

// redial tries until a connection stands, and returns nil when ctx ends first.
// It logs the first failure of a row only.
func (l *link) redial(ctx context.Context) *nbd.Client {
	for pause := minRetry; ; pause = min(2*pause, maxRetry) {
		c, err := dial(ctx, l.opts)
		if err == nil {
			return c
		}
		if pause == minRetry {
			l.log.WarnContext(ctx, "reader cannot be reached", "export", l.opts.export, "err", err)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-l.kick:
		case <-time.After(pause):
		}
	}
}

func (l *link) close() {
	l.cancel()
	l.keeper.Wait()
	l.client.Load().Close()
}
