package writer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"quarry/store/bucket"
	"quarry/store/catalog"
)

// StandbyConfig is what Await needs.
type StandbyConfig struct {
	Bucket  bucket.Bucket
	Journal bucket.Journal
	Self    catalog.Writer
	// Lazy leaves the epoch to the first change: of a process that may never make one.
	Lazy  bool
	After time.Duration // how long a mark stands still before it is taken for left; 0 = After
	Log   *slog.Logger  // nil = discard
	// Clock is the catalog's, for how long gc keeps what lost its name; nil = it keeps no time.
	Clock func() time.Time
	// Waiting, when not nil, is told whom it waits for, when that changes.
	Waiting func(who string)
}

// Await returns the catalog of a bucket when no other process writes it any more: at
// once when the writer before has released it, or had the same data folder, which
// this process holds the lock of; else when its mark has not changed for After, as
// this process's clock alone measures it. Times of two machines are never compared.
//
// Of several that wait, the one whose epoch is in the journal first goes on, and the
// others wait for that one.
func Await(ctx context.Context, cfg StandbyConfig) (*catalog.Catalog, error) {
	if cfg.After == 0 {
		cfg.After = After
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Waiting == nil {
		cfg.Waiting = func(string) {}
	}
	for {
		c, err := catalog.Open(ctx, catalog.Config{Journal: cfg.Journal, Writer: &cfg.Self, Log: cfg.Log, Clock: cfg.Clock})
		if err != nil {
			return nil, err
		}
		s := &standby{cfg: cfg, catalog: c}
		if err := s.wait(ctx); err != nil {
			return nil, err
		}
		if cfg.Lazy {
			return c, nil
		}
		err = c.Claim(ctx)
		if err == nil || !errors.Is(err, catalog.ErrFenced) {
			return c, err
		}
		cfg.Log.InfoContext(ctx, "another node took the store over first", "error", err)
	}
}

// standby watches the mark of one writer after the other.
type standby struct {
	cfg     StandbyConfig
	catalog *catalog.Catalog

	seen  []byte    // the mark, as it was last
	epoch uint64    // of the journal, as it was last
	since time.Time // when one of them last changed, or could not be read
	told  string    // to Waiting
	away  string    // why the bucket cannot be read
}

// wait returns nil when the writer is gone.
func (s *standby) wait(ctx context.Context) error {
	// However long it waits for a mark that stands still, one that was released is seen soon.
	tick := time.NewTicker(max(min(s.cfg.After/20, Every), time.Millisecond))
	defer tick.Stop()
	for first := true; ; first = false {
		free, err := s.look(ctx, first)
		if err != nil || free {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// look reads the mark, and the journal when the mark has changed or stood still for
// long enough: somebody else may have taken over meanwhile.
func (s *standby) look(ctx context.Context, first bool) (free bool, err error) {
	raw, err := readRaw(ctx, s.cfg.Bucket)
	if isAway(err) {
		// The writer may be there and unable to renew it: it gets the whole time again.
		s.since = time.Now()
		return false, s.say(ctx, err)
	}
	still := !first && bytes.Equal(raw, s.seen)
	if still && time.Since(s.since) < s.cfg.After {
		return false, nil
	}
	if err := s.catchUp(ctx); err != nil {
		s.since = time.Now()
		return false, s.say(ctx, err)
	}
	s.away = ""
	epoch := s.catalog.Epoch()
	if still && epoch.N == s.epoch {
		s.cfg.Log.WarnContext(ctx, "the writer's mark stands still: this node takes the store over", "writer", s.told, "epoch", epoch.N, "after", s.cfg.After)
		return true, nil
	}
	s.seen, s.epoch, s.since = raw, epoch.N, time.Now()
	who, left := s.former(raw, epoch)
	if !left && s.told != who {
		s.told = who
		s.cfg.Log.InfoContext(ctx, "standing by: another process writes this store", "writer", who, "epoch", epoch.N)
		s.cfg.Waiting(who)
	}
	return left, nil
}

// former says who wrote last, by mark or by epoch, and whether it surely has left.
func (s *standby) former(raw []byte, epoch catalog.Epoch) (who string, left bool) {
	m, err := Decode(raw)
	switch {
	case raw == nil && epoch.N == 0:
		return "", true // no writer of this version ever was
	case err != nil && epoch.N == 0:
		return "a process of another version", false
	case err != nil || m.Epoch < epoch.N:
		// The epoch is newer than the mark, which its writer has yet to leave.
		m = Mark{Host: epoch.Host, PID: epoch.PID, Folder: epoch.Folder}
	}
	return m.String(), m.Folder == s.cfg.Self.Folder || m.Released
}

func (s *standby) catchUp(ctx context.Context) error {
	for {
		if whole, err := s.catalog.CatchUp(ctx, nil); err != nil || whole {
			return err
		}
	}
}

// say logs that the bucket is away, once, and ends the wait for an error that does
// not go away.
func (s *standby) say(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, catalog.ErrDamaged), errors.Is(err, catalog.ErrNewer), errors.Is(err, catalog.ErrDiverged):
		return fmt.Errorf("stand by: %w", err)
	}
	if s.away != err.Error() {
		s.away = err.Error()
		s.cfg.Log.WarnContext(ctx, "standing by: the bucket cannot be read", "error", err)
	}
	return nil
}
