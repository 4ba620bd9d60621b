package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"

	"quarry/nbd"
	"quarry/nbd/attach"
)

// errNoReader says that nothing could be mounted for want of a reader.
var errNoReader = errors.New("no reader")

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

// refuse answers every read that has no answer with err: a reader is there, and says
// that it cannot serve the image. Later reads have it asked anew.
func (t *table) refuse(err error) {
	t.mu.Lock()
	var reads []*attach.Read
	for t.first != nil {
		reads = append(reads, t.takeFirst())
	}
	t.mu.Unlock()
	t.fail(reads, err)
}
