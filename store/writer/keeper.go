package writer

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"quarry/store/bucket"
	"quarry/store/catalog"
)

// KeeperConfig is what a Keeper needs.
type KeeperConfig struct {
	Bucket  bucket.Bucket
	Catalog *catalog.Catalog // opened with Self as its Writer
	Self    catalog.Writer
	Every   time.Duration // between renewals; 0 = Every
	Log     *slog.Logger  // nil = discard
}

// Keeper renews the mark of the process that writes a store, and notices when
// another one has taken the store over.
type Keeper struct {
	cfg KeeperConfig
	now chan struct{} // has an element when Run is to renew at once

	mu    sync.Mutex // guards what follows, and is held during a renewal
	url   string
	count uint64
	left  []byte // the mark as it was left last
}

// NewKeeper returns a keeper that has left no mark yet.
func NewKeeper(cfg KeeperConfig) *Keeper {
	if cfg.Every == 0 {
		cfg.Every = Every
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Keeper{cfg: cfg, now: make(chan struct{}, 1)}
}

// At says where the process listens, from the next mark on, which Run leaves at once.
func (k *Keeper) At(url string) {
	k.mu.Lock()
	k.url = url
	k.mu.Unlock()
	select {
	case k.now <- struct{}{}:
	default: // it is told already
	}
}

// Run renews the mark until ctx ends, and then returns nil, or until another writer
// has taken over: catalog.ErrFenced. A bucket that is away is no reason to end.
func (k *Keeper) Run(ctx context.Context) error {
	tick := time.NewTicker(k.cfg.Every)
	defer tick.Stop()
	said := ""
	for {
		err := k.renew(ctx, false)
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, catalog.ErrFenced):
			return err
		case err != nil && err.Error() != said:
			said = err.Error()
			k.cfg.Log.WarnContext(ctx, "writer's mark not renewed: if that lasts, another node takes the store over", "error", err)
		case err == nil && said != "":
			said = ""
			k.cfg.Log.InfoContext(ctx, "writer's mark renewed again")
		}
		select {
		case <-ctx.Done():
			return nil
		case <-k.cfg.Catalog.Fenced():
			return k.cfg.Catalog.Confirm(ctx) // which says by whom
		case <-tick.C:
		case <-k.now:
		}
	}
}

// Release says that this process writes no more, so that whoever stands by need not
// wait. After it nothing may be changed.
func (k *Keeper) Release(ctx context.Context) error { return k.renew(ctx, true) }

// renew leaves the next mark, unless there is one of somebody else and the journal
// says that it is right. The first one asks the journal whatever there is: it may come
// long after the take-over.
func (k *Keeper) renew(ctx context.Context, release bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	raw, err := readRaw(ctx, k.cfg.Bucket)
	if isAway(err) {
		return err
	}
	if k.left == nil || !bytes.Equal(raw, k.left) {
		if err := k.cfg.Catalog.Confirm(ctx); err != nil {
			return fmt.Errorf("another writer may have left its mark: %w", err)
		}
	}
	m := Mark{
		Version: markVersion, Epoch: k.cfg.Catalog.Epoch().N, Writer: k.cfg.Self.ID, Folder: k.cfg.Self.Folder,
		Host: k.cfg.Self.Host, PID: k.cfg.Self.PID, URL: k.url, Count: k.count + 1, Released: release,
	}
	if raw, err = m.Encode(); err != nil {
		return err
	}
	if err := put(ctx, k.cfg.Bucket, raw); err != nil {
		return err
	}
	k.count, k.left = k.count+1, raw
	return nil
}
