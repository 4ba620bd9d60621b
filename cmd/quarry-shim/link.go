package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"quarry/nbd"
	"quarry/nbd/attach"
)

const (
	// dialTimeout is for one attempt to reach the reader, its opening of the image
	// included.
	dialTimeout = 10 * time.Second
	// firstPatience is how long the first connection may take that no reader
	// answers at all: one that was killed is back in a tenth of that.
	firstPatience = 3 * time.Second
	// While a reader is away it is looked for after an eighth of the time it has
	// been away, so that its return is seen late by an eighth at most: 5 ms after
	// 40 ms, 50 ms after 400 ms. minPause bounds that below, and maxPause above
	// while a read waits: twenty attempts a second, of some 50 µs each, are 6 % of a
	// processor when 64 shims make them. While no read waits nobody gains by that,
	// so idlePause is the bound then, and the next read ends the pause.
	pauseShare = 8
	minPause   = 5 * time.Millisecond
	maxPause   = 50 * time.Millisecond
	idlePause  = 2 * time.Second
)

// errOtherImage says that a reader offers something else under the export's name
// than this mount is of: a kernel that cached one image must not be fed another.
var errOtherImage = errors.New("reader offers another image")

// errNoReader says that nothing could be mounted for want of a reader.
var errNoReader = errors.New("no reader")

// link is the connection to the reader, made again when it is lost. Reads that
// have no answer then wait, and are sent again to the next reader, until their
// deadline. A reader that offers another image ends the link for ever.
type link struct {
	opts   options
	log    *slog.Logger
	reads  *table
	client atomic.Pointer[nbd.Client] // the newest, perhaps lost
	kick   chan struct{}              // ends the pause of a redial that nobody waited for
	cancel context.CancelFunc
	work   sync.WaitGroup // keep and the watch over deadlines
}

// connect makes the first connection of a link. Errors: errNoReader when no reader
// answered, which may be another one's fault.
func connect(ctx context.Context, o options, counts *attach.Counts, log *slog.Logger) (*link, error) {
	l, err := dialLink(ctx, o, counts, log)
	if err == nil || errors.Is(err, errOtherImage) || errors.As(err, new(*nbd.RefusedError)) {
		return l, err
	}
	return l, fmt.Errorf("%w: %w", errNoReader, err)
}

// explain tells an attach that failed while no reader was there from others.
func (l *link) explain(err error) error {
	select {
	case <-l.client.Load().Done():
		return fmt.Errorf("%w: %w", errNoReader, err)
	default:
		return err
	}
}

// dialLink makes the first connection; ctx bounds it.
func dialLink(ctx context.Context, o options, counts *attach.Counts, log *slog.Logger) (*link, error) {
	l := &link{opts: o, log: log, kick: make(chan struct{}, 1)}
	c, err := l.dialFirst(ctx)
	if err != nil {
		return nil, err
	}
	l.client.Store(c)
	l.reads = newTable(c, o.deadline, counts, l.wanted, log)
	keepCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	l.cancel = cancel
	l.work.Go(func() { l.keep(keepCtx) })
	l.work.Go(func() { l.reads.watch(keepCtx) })
	return l, nil
}

// dialFirst is patient with a reader that is being replaced, not with one that
// refuses.
func (l *link) dialFirst(ctx context.Context) (*nbd.Client, error) {
	for began := time.Now(); ; {
		c, err := l.dial(ctx)
		if err == nil || errors.Is(err, errOtherImage) || errors.As(err, new(*nbd.RefusedError)) || time.Since(began) > firstPatience {
			return c, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(pauseAfter(time.Since(began), maxPause)):
		}
	}
}

// dial connects to the reader and checks what it offers. Errors: errOtherImage,
// and those of nbd.Dial.
func (l *link) dial(ctx context.Context) (*nbd.Client, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	o := l.opts
	c, err := nbd.Dial(ctx, "unix", o.socket, o.export)
	if err != nil {
		return nil, err
	}
	if c.Size() != o.size || c.Export() != o.export {
		c.Close()
		return nil, fmt.Errorf("%w: export %q of %d bytes, this mount is of %q with %d", errOtherImage, c.Export(), c.Size(), o.export, o.size)
	}
	return c, nil
}

// wanted is called when a read waits for a reader.
func (l *link) wanted() {
	select {
	case l.kick <- struct{}{}:
	default: // the last one is still to be seen
	}
}

// keep replaces the connection whenever it is lost, until close, or until a
// reader offers another image.
func (l *link) keep(ctx context.Context) {
	for c := l.client.Load(); ; {
		select {
		case <-ctx.Done():
			return
		case <-c.Done():
		}
		l.reads.lost(c)
		l.log.WarnContext(ctx, "reader lost", "export", l.opts.export, "err", c.Err())
		next, err := l.redial(ctx)
		if err == nil {
			c = next
			l.client.Store(c) // close closes it, also when ctx has ended meanwhile
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			l.log.ErrorContext(ctx, "every read is answered with EIO from now on", "export", l.opts.export, "err", err)
			l.reads.end(err)
			return
		}
		n := l.reads.resume(c)
		l.log.InfoContext(ctx, "reader found again", "export", l.opts.export, "sent_again", n)
	}
}

// redial tries until a connection stands. Errors: errOtherImage, ctx's. It logs
// the first failure of a row only.
func (l *link) redial(ctx context.Context) (*nbd.Client, error) {
	lost := time.Now()
	for first := true; ; first = false {
		c, err := l.dial(ctx)
		if err == nil || errors.Is(err, errOtherImage) {
			return c, err
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		refused := errors.Is(err, nbd.ErrUnknownExport)
		if refused { // not one that is away: waiting is in vain
			l.reads.refuse(err)
		}
		if first {
			l.log.WarnContext(ctx, "reader cannot be reached", "export", l.opts.export, "err", err)
		}
		if err := l.pause(ctx, time.Since(lost), refused); err != nil {
			return nil, err
		}
	}
}

// pause waits before the next attempt. Only a pause that nobody's read has
// waited for ends with the next read: many reads make no more attempts than one.
// A reader that has refused the image has looked at it for that, with all of its
// bootstrap, and is left in peace for maxPause, whatever is read.
func (l *link) pause(ctx context.Context, away time.Duration, refused bool) error {
	if refused {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(maxPause):
		}
		if l.reads.anyWaiting() {
			return nil
		}
	}
	kick, limit := l.kick, idlePause
	if l.reads.anyWaiting() {
		kick, limit = nil, maxPause
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-kick:
	case <-time.After(pauseAfter(away, limit)):
	}
	return nil
}

func pauseAfter(away, limit time.Duration) time.Duration {
	return min(max(away/pauseShare, minPause), limit)
}

func (l *link) close() {
	l.cancel()
	l.work.Wait()
	l.client.Load().Close()
}
