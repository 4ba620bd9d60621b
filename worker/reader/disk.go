package reader

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"quarry/nbd/blockdev"
	"quarry/store/cache"
	"quarry/store/chunk"
)

const (
	// maxDefaultDisk is as much as 64 images of which 300 MB are touched, with no
	// chunk in common, and need not be chosen.
	maxDefaultDisk = 20 << 30
	// defaultDiskShare of the disk is the default where that is less: a worker's
	// disk also has the sandboxes' writable layers.
	defaultDiskShare = 10
)

// disk is the reader's cache on this machine's disk.
type disk struct {
	*cache.Cache // nil when there is none
	why          string
}

// openDisk opens the disk cache in the worker folder. One that cannot be opened
// costs speed alone, so the reader does without.
func openDisk(ctx context.Context, cfg Config) disk {
	if cfg.DiskBytes < 0 {
		return disk{why: "switched off"}
	}
	c, err := func() (*cache.Cache, error) {
		limit := cfg.DiskBytes
		if limit == 0 {
			var err error
			if limit, err = defaultDiskBytes(cfg.Dir.Path()); err != nil {
				return nil, err
			}
		}
		return cache.Open(cache.Config{Dir: cfg.Dir.Cache(), Limit: limit, Log: cfg.Log})
	}()
	if err != nil {
		cfg.Log.ErrorContext(ctx, "no disk cache", "err", err)
		return disk{why: err.Error()}
	}
	return disk{Cache: c}
}

// defaultDiskBytes is the cache's limit on the disk of a folder.
func defaultDiskBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("size of the disk of %s: %w", dir, err)
	}
	total := int64(st.Blocks) * st.Bsize
	return max(min(maxDefaultDisk, total/defaultDiskShare), cache.MinLimit), nil
}

// device is the cache as devices take it.
func (k disk) device() blockdev.Disk {
	if k.Cache == nil {
		return nil
	}
	return k.Cache
}

func (k disk) close() error {
	if k.Cache == nil {
		return nil
	}
	return k.Close()
}

// errNoDisk says that there is no disk cache to keep something in.
var errNoDisk = errors.New("this worker has no disk cache")

func (k disk) need() error {
	if k.Cache == nil {
		return fmt.Errorf("%w: %s", errNoDisk, k.why)
	}
	return nil
}

// Cached is what the disk cache holds. Sizes are in bytes.
type Cached struct {
	Missing   string      `json:"missing,omitempty"` // why there is no cache; nothing else is set then
	Limit     int64       `json:"limit_bytes"`
	Disk      int64       `json:"disk_bytes"`
	Chunks    int64       `json:"chunks"`
	Bytes     int64       `json:"chunk_bytes"`
	Pinned    int64       `json:"pinned_bytes"` // in whole pages
	MaxPinned int64       `json:"max_pinned_bytes"`
	Paused    bool        `json:"paused"` // not written for a while, after the disk failed
	Images    []PinnedNow `json:"pinned_images"`
}

// PinnedNow is a pinned image and how much of it is in the cache.
type PinnedNow struct {
	ID     chunk.Digest `json:"image_id"`
	All    Count        `json:"all"`
	Cached Count        `json:"cached"`
}

func (k disk) cached() Cached {
	if k.Cache == nil {
		return Cached{Missing: k.why, Images: []PinnedNow{}}
	}
	st := k.Cache.Stats()
	c := Cached{
		Limit: st.Limit, Disk: st.DiskBytes, Chunks: st.Chunks, Bytes: st.Bytes,
		Pinned: st.PinnedBytes, MaxPinned: st.MaxPinned, Paused: st.Paused, Images: []PinnedNow{},
	}
	for _, p := range k.Cache.Pinned() {
		c.Images = append(c.Images, PinnedNow{p.Image, Count{int64(p.Chunks), p.Bytes}, Count{int64(p.Cached), p.CachedBytes}})
	}
	return c
}
