package main

import (
	"context"
	"fmt"
	"log/slog"

	"golang.org/x/sys/unix"

	"quarry/store/catalog"
	"quarry/store/registry"
)

const (
	// startRoom is what must be free for a node to start: the index needs 18 MiB at most
	// to open, and 32 MiB for its first change.
	startRoom = 64 << 20
	// keepFree is what uploads leave, so that conversions go on and the node can start
	// again: beside that, a pack that is made and, where the bucket is in the folder, the
	// same once more.
	keepFree = startRoom + 2*64<<20
)

// minUploadSpace is the least that --upload-space may be: less would refuse common
// layers.
const minUploadSpace = 64 << 20

// uploadSpace is the room for unfinished uploads as --upload-space says it.
type uploadSpace struct{ text string }

// bytes returns what registry.Config takes: 0 for the default.
func (s uploadSpace) bytes() (int64, error) {
	if s.text == "" {
		return 0, nil
	}
	n, err := parseSize(s.text)
	if err == nil && n < minUploadSpace {
		err = fmt.Errorf("%s: want %d MiB at least", s.text, minUploadSpace>>20)
	}
	if err != nil {
		return 0, fmt.Errorf("%w: --upload-space %w", errUsage, err)
	}
	return n, nil
}

// makeRoom removes unfinished uploads when the disk is too full to start. Their clients
// send them anew; without a node they could not either.
func (d dataDir) makeRoom(log *slog.Logger) error {
	n, size, err := registry.MakeRoom(d.uploads(), startRoom)
	if n > 0 {
		log.Warn("the disk was full: unfinished uploads were removed, their clients have to send them anew", "folder", d.uploads(), "uploads", n, "bytes", size)
	}
	return err
}

// openRegistry opens what is pushed to /v2/, and the uploads that were under way.
func (o *owner) openRegistry(cfg ownerConfig) (err error) {
	at, _, err := cfg.dir.remembered()
	if err != nil {
		return err
	}
	_, remote := at.url.remote()
	o.registry, err = registry.Open(registry.Config{
		Bucket: o.bucket, Names: o.catalog, Key: o.signing, Dir: o.dir.uploads(),
		UploadSpace: cfg.uploadSpace, KeepFree: keepFree, SameDisk: !remote && sameDisk(at.url.folder(o.dir), string(o.dir)), Log: o.log,
		Pushed: o.pushed, Confirm: o.catalog.Confirm, LayersGo: cfg.jobs.retain.drop,
	})
	return err
}

// sameDisk reports whether two folders are on one file system.
func sameDisk(a, b string) bool {
	var x, y unix.Stat_t
	return unix.Stat(a, &x) == nil && unix.Stat(b, &y) == nil && x.Dev == y.Dev
}

// start does what goes on beside requests until stop is called, which waits for it, or
// another writer has taken the store over: what a fenced process does for the store comes
// to nothing. A node that only reads does none of it.
func (o *owner) start(ctx context.Context) (stop func()) {
	if o.follower != nil {
		return func() {}
	}
	ctx, cancel := context.WithCancelCause(ctx)
	o.working.Go(func() {
		select {
		case <-ctx.Done():
		case <-o.catalog.Fenced():
			cancel(catalog.ErrFenced)
		}
	})
	o.working.Go(func() { o.registry.Run(ctx) })
	o.working.Go(func() { o.jobs.Serve(ctx) })
	o.working.Go(func() { o.retainLayers(ctx) })
	o.working.Go(func() { o.collectEvery(ctx) })
	return func() {
		cancel(nil)
		o.working.Wait()
	}
}
