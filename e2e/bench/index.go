package main

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"quarry/chunkindex"
	"quarry/chunkindex/indextest"
	"quarry/store/chunk"
)

const (
	indexKeys = 10_000_000
	// lookupBatch is the store's: how many digests a conversion asks for at once.
	lookupBatch = 128
	// lookups of one measurement: far more than a cache could hold by chance.
	lookups = 200_000
	// maxLookups is the limit of the look-ups' time, in percent of the conversion
	// that makes as many.
	maxLookups = 5.0

	// The steps from one chunk that is looked up to the next. Content comes again
	// in the order in which it came first; imageStep is an image that has every
	// third chunk of a pack. spread, a prime, goes from pack to pack and meets no
	// key twice.
	imageStep = 3
	spread    = 7919
)

// measureIndex looks chunks up in an index of ten million, one batch after the
// other, and compares the time for as many as an image has with the image's
// conversion.
func measureIndex(ctx context.Context, b *bench) error {
	start := time.Now()
	dir, made, err := indextest.Kept(ctx, filepath.Join(b.cache, "index"), indexKeys)
	if err != nil {
		return err
	}
	if made {
		b.figure("index: filled", fmt.Sprintf("%.0f keys/s", indexKeys/time.Since(start).Seconds()))
	}
	for _, cache := range []int64{chunkindex.DefaultCacheSize, 1 << 30} {
		fresh, known, err := b.lookUps(ctx, dir, cache)
		if err != nil {
			return err
		}
		if cache == chunkindex.DefaultCacheSize {
			b.judgeLookups(fresh, known)
		}
	}
	return nil
}

// lookUps returns the seconds that one look-up of a new and of a known chunk
// take.
func (b *bench) lookUps(ctx context.Context, dir string, cache int64) (fresh, known float64, err error) {
	ix, err := chunkindex.Open(chunkindex.Config{Dir: dir, CacheSize: cache})
	if err != nil {
		return 0, 0, err
	}
	defer ix.Close()
	name := fmt.Sprintf("index of %d million keys, %d MiB cache: ", indexKeys/1_000_000, cache>>20)
	var scattered float64
	// The first of each fills the cache, as an hour of a store's work would.
	for range 2 {
		if fresh, err = lookUp(ctx, ix, indexKeys, spread, false); err != nil {
			return 0, 0, err
		}
		if scattered, err = lookUp(ctx, ix, 0, spread, true); err != nil {
			return 0, 0, err
		}
		if known, err = lookUp(ctx, ix, 0, imageStep, true); err != nil {
			return 0, 0, err
		}
	}
	b.figure(name+"new chunks", fmt.Sprintf("%.0f keys/s", 1/fresh))
	b.figure(name+"known chunks", fmt.Sprintf("%.0f keys/s", 1/known))
	b.figure(name+"known chunks, each of another pack", fmt.Sprintf("%.0f keys/s", 1/scattered))
	b.figure(name+"disk", fmt.Sprintf("%.1f bytes a key", float64(ix.Stats().DiskBytes)/indexKeys))
	return fresh, known, nil
}

// lookUp returns the seconds of one look-up, of chunks that are all known or all
// new, step after step.
func lookUp(ctx context.Context, ix *chunkindex.Index, first, step uint64, want bool) (float64, error) {
	ds := make([]chunk.Digest, lookupBatch)
	var spent time.Duration
	n := uint64(0)
	for range lookups / lookupBatch {
		for i := range ds {
			ds[i] = indextest.Digest(first + n)
			n = (n + step) % indexKeys
		}
		start := time.Now()
		found, _, err := ix.HasBatch(ctx, ds)
		spent += time.Since(start)
		if err != nil {
			return 0, err
		}
		for _, f := range found {
			if f != want {
				return 0, fmt.Errorf("a chunk was found: %t, want %t", f, want)
			}
		}
	}
	return spent.Seconds() / float64(lookups/lookupBatch*lookupBatch), nil
}

// judgeLookups holds the look-ups of each image that was converted against its
// conversion, as if the other chunks of the index had been there.
func (b *bench) judgeLookups(fresh, known float64) {
	for _, im := range b.images {
		c := b.spent[im.dir]
		if len(c.fresh) > 0 {
			b.atMost(im.name()+": look-ups of new chunks ÷ conversion", 100*fresh*float64(c.holds.chunks)/median(c.fresh), maxLookups, "%")
		}
		if len(c.known) > 0 {
			b.atMost(im.name()+": look-ups of known chunks ÷ conversion", 100*known*float64(c.holds.chunks)/median(c.known), maxLookups, "%")
		}
	}
}
