package main

import (
	"archive/tar"
	"context"
	"fmt"
	"os"
)

const (
	// Limits of converting an image again, whose layers are known.
	againBase    = 0.1    // seconds, up to againEntries
	againEntries = 12_000 // a Debian image with Python has so many
	againEntry   = 8e-6   // seconds an entry beyond

	// Limits of the peak resident memory of the process that converts.
	memoryBase    = 300     // MiB, up to memoryEntries
	memoryEntries = 300_000 // an image with several large node_modules
	memoryEntry   = 600     // bytes an entry beyond
)

func (b *bench) judgeAgain(name string, entries int, seconds float64) {
	limit := againBase + againEntry*float64(max(0, entries-againEntries))
	b.atMost(fmt.Sprintf("%s: %d entries, convert again, no layer read", name, entries), 1000*seconds, 1000*limit, "ms")
}

func (b *bench) judgeMemory(name string, entries int, mib float64) {
	limit := memoryBase + memoryEntry*float64(max(0, entries-memoryEntries))/(1<<20)
	b.atMost(fmt.Sprintf("%s: %d entries, peak memory", name, entries), mib, limit, "MiB")
}

// measureEntries converts generated images of very many small files.
func measureEntries(ctx context.Context, b *bench) error {
	for _, n := range []int{memoryEntries, 1_000_000} {
		if err := b.entries(ctx, n); err != nil {
			return fmt.Errorf("image of %d entries: %w", n, err)
		}
	}
	return nil
}

func (b *bench) entries(ctx context.Context, n int) error {
	im, err := generated(b.cache, fmt.Sprintf("entries-%d", n), func(t *tar.Writer) error { return writeEntries(t, n) })
	if err != nil {
		return err
	}
	data := b.lab.Path("entries")
	fresh, err := timed(func() error { _, err := b.lab.Convert(ctx, data, "oci:"+im.dir, imageName(im)); return err })
	if err != nil {
		return err
	}
	b.figure(fmt.Sprintf("%s: converted", im.name()), fmt.Sprintf("%.1f s, %.1f µs an entry", fresh, 1e6*fresh/float64(n)))
	peak, err := b.lab.PeakMemory(data)
	if err != nil {
		return err
	}
	b.judgeMemory(im.name(), n, float64(peak)/(1<<20))
	var again []float64
	for range rounds {
		s, err := timed(func() error { return convertKnown(ctx, b.lab, data, im) })
		if err != nil {
			return err
		}
		again = append(again, s)
	}
	b.judgeAgain(im.name(), n, median(again))
	if err := b.lab.StopOwner(data); err != nil {
		return err
	}
	return os.RemoveAll(data)
}
