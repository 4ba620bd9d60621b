package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
	"quarry/store/bucket/ranges"
	"quarry/store/cache"
)

const (
	// maxDefaultRanges is what of packs a node keeps on its disk unless it is told
	// otherwise, and defaultRangesShare of the disk where that is less.
	maxDefaultRanges   = 64 << 30
	defaultRangesShare = 10
)

func (d dataDir) cache() string { return filepath.Join(string(d), "cache") }

const rangeCacheHelp = "bytes of packs of an S3 bucket kept on disk, in DIR/cache, as 512M or 100G, or none; default is a tenth of the disk, and 64G at most"

// openRanges opens the cache before a remote bucket. A folder has none: it would be a
// second copy. A server that a command started has none either: nobody told it how much
// of the disk it may have. One that cannot be opened costs reads of the bucket, so the node does
// without.
func (o *owner) openRanges(ctx context.Context, cfg ownerConfig, at place) error {
	limit, err := cfg.cache.bytes()
	if err != nil {
		return err
	}
	if _, remote := at.url.remote(); !remote {
		if cfg.cache.text != "" && limit > 0 {
			return fmt.Errorf("%w: --cache-size %s: the bucket is a folder, and is read where it is", errUsage, cfg.cache.text)
		}
		return nil
	}
	if limit < 0 || cfg.background {
		return nil
	}
	if limit == 0 {
		if limit, err = defaultRanges(string(cfg.dir)); err != nil {
			return cfg.dir.wrap(err)
		}
	}
	o.ranges, err = ranges.Open(ranges.Config{Bucket: o.bucket, Dir: cfg.dir.cache(), Limit: limit, Log: cfg.log})
	if errors.Is(err, proc.ErrLocked) {
		return cfg.dir.wrap(err)
	}
	if err != nil {
		cfg.log.ErrorContext(ctx, "no range cache: every read asks the bucket", "dir", cfg.dir.cache(), "error", err)
	}
	return nil
}

// defaultRanges is the cache's limit on the disk of a folder.
func defaultRanges(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("size of the disk: %w", err)
	}
	return max(min(maxDefaultRanges, int64(st.Blocks)*st.Bsize/defaultRangesShare), cache.MinLimit), nil
}
