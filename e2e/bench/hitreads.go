package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"quarry/e2e/lab"
	"quarry/store/chunk"
)

// pageBytes is what one random read asks for.
const pageBytes = 4096

// measure reads both files through every target, several times.
func (h *hits) measure(ctx context.Context, rounds int) error {
	if err := h.fill(ctx); err != nil {
		return err
	}
	reads := func(tier string, fn func(t *target) error) error {
		before, beforeAll, err := h.tierReads(ctx, tier)
		if err != nil {
			return err
		}
		for range rounds {
			for _, t := range h.targets {
				if t.root == "" {
					continue
				}
				if err := fn(t); err != nil {
					return fmt.Errorf("%s: %w", t.name, err)
				}
			}
		}
		after, afterAll, err := h.tierReads(ctx, tier)
		if share := (after - before) / (afterAll - beforeAll); err == nil && share < minHits {
			err = fmt.Errorf("%.0f %% of the reads were hits in %s: too few to measure that", 100*share, tier)
		}
		return err
	}
	if err := reads("memory", func(t *target) error {
		return t.random(memoryFile, memoryBytes, nil, &t.memory)
	}); err != nil {
		return err
	}
	// Neither a device's file nor the cache disk's is in the page cache: the reader
	// keeps its own out of it, so that no page is in memory twice.
	dropped := func() error { return errors.Join(forgetFiles(h.device), forgetFiles(filepath.Join(h.worker, "cache"))) }
	for range 2 { // the second time, nothing of it comes from the store
		for _, t := range h.targets {
			if t.reader {
				if _, err := t.through(diskFile, diskBytes); err != nil {
					return err
				}
			}
		}
		if err := h.settle(ctx); err != nil {
			return err
		}
	}
	if err := reads("disk", func(t *target) error { return t.random(diskFile, diskBytes, dropped, &t.disk) }); err != nil {
		return err
	}
	return reads("disk", func(t *target) error {
		if err := dropped(); err != nil {
			return err
		}
		took, err := t.through(diskFile, diskBytes)
		t.seq = append(t.seq, diskBytes/1e6/took.Seconds())
		return err
	})
}

// tierReads counts the reads that the reader answered from a tier, and all.
func (h *hits) tierReads(ctx context.Context, tier string) (n, all float64, err error) {
	const name = "quarry_reader_reads_total"
	if n, err = lab.ReaderMetric(ctx, h.worker, name, `tier="`+tier+`"`); err != nil {
		return 0, 0, err
	}
	all, err = lab.ReaderMetric(ctx, h.worker, name, "")
	return n, all, err
}

// fill brings every chunk of memoryFile into the reader's memory by a page of it:
// a chunk of which the kernel has had every page need not stay there.
func (h *hits) fill(ctx context.Context) error {
	for _, t := range h.targets {
		if !t.reader {
			continue
		}
		f, err := os.Open(filepath.Join(t.root, memoryFile))
		if err != nil {
			return err
		}
		defer f.Close()
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM); err != nil {
			return err
		}
		page := make([]byte, pageBytes)
		for off := int64(0); off < memoryBytes; off += chunk.DefaultSize {
			if _, err := f.ReadAt(page, off); err != nil {
				return err
			}
		}
		break // all targets have one reader
	}
	return h.settle(ctx)
}

// settle waits until nothing more is written to the cache disk.
func (h *hits) settle(ctx context.Context) error {
	const name = "quarry_reader_disk_bytes"
	last, still := -1.0, 0
	for range 300 { // 30 s
		now, err := lab.ReaderMetric(ctx, h.worker, name, "")
		if err != nil {
			return err
		}
		if still++; now != last {
			last, still = now, 0
		}
		if still == 5 {
			return nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return errors.New("the cache disk does not come to rest")
}

// forgetFiles drops the pages of files from the page cache.
func forgetFiles(root string) error {
	return filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		return errors.Join(f.Sync(), forget(f)) // dirty pages stay
	})
}

// forget drops a file's pages, so that the next read reaches the device.
func forget(f *os.File) error {
	return unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// through reads a file from end to end, past the page cache.
func (t *target) through(name string, size int64) (time.Duration, error) {
	f, err := os.Open(filepath.Join(t.root, name))
	if err != nil {
		return 0, err
	}
	defer f.Close()
	if err := forget(f); err != nil {
		return 0, err
	}
	buf := make([]byte, 1<<20)
	started := time.Now()
	_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, io.NewSectionReader(f, 0, size), buf)
	return time.Since(started), err
}

// random appends the median of reads of a page, in µs, past the page cache; drop
// empties more of it before.
func (t *target) random(name string, size int, drop func() error, to *[]float64) error {
	f, err := os.Open(filepath.Join(t.root, name))
	if err != nil {
		return err
	}
	defer f.Close()
	if err := errors.Join(forget(f), unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_RANDOM)); err != nil {
		return err
	}
	if drop != nil {
		if err := drop(); err != nil {
			return err
		}
	}
	page := make([]byte, pageBytes)
	var took []float64
	for _, i := range rand.Perm(size / pageBytes)[:hitReads] {
		started := time.Now()
		if _, err := f.ReadAt(page, int64(i*pageBytes)); err != nil {
			return err
		}
		took = append(took, float64(time.Since(started).Nanoseconds())/1e3)
	}
	*to = append(*to, median(took))
	return nil
}
