package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"time"

	"quarry/e2e/lab"
)

const (
	// Limits of a conversion's time, in gzip -dc of the same layers.
	maxNew   = 1.6  // nothing of it is in the store
	maxKnown = 1.15 // a build of its own whose files are

	rounds = 3 // of interleaved runs, of which the median counts
	// A family with an image whose gunzip takes longer is measured once, but for
	// -all: the rest of make bench shall not wait.
	longImage = 1.5 // seconds
	// Below this the start of two processes and some twenty synced writes decide,
	// 50 to 200 ms together: the ratio is printed and has no limit.
	shortImage = 0.3 // seconds
	// perFamily is how many images of a family are measured without -all: one
	// as new content, one as known files.
	perFamily = 2
)

// conversion is what one image took, in seconds or as a ratio to gunzip in the
// same round.
type conversion struct {
	gunzip              []float64
	fresh, known, again []float64
	freshRatio          []float64
	knownRatio          []float64
	memory              []float64 // MiB
	holds               contents
}

// measureConvert converts each family's first image as new content and the
// others after it, as builds of files that the store has, beside gunzip of
// the same layers.
func measureConvert(ctx context.Context, b *bench) error {
	for _, family := range families(b.images) {
		if !b.all {
			family = family[:min(len(family), perFamily)]
		}
		if err := b.family(ctx, family); err != nil {
			return err
		}
		for _, im := range family[1:] {
			if b.all {
				if err := b.family(ctx, []layout{im}); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// family converts images one after another into one data folder, several times.
func (b *bench) family(ctx context.Context, images []layout) error {
	took := make([]conversion, len(images))
	for round := range rounds {
		data := b.lab.Path("convert")
		slow := false
		for i, im := range images {
			if err := b.one(ctx, data, im, i > 0, &took[i]); err != nil {
				return fmt.Errorf("%s: %w", im.name(), err)
			}
			slow = slow || took[i].gunzip[round] > longImage
			if round > 0 {
				continue
			}
			if err := b.wire(ctx, data, im); err != nil {
				return fmt.Errorf("%s: %w", im.name(), err)
			}
		}
		if err := b.lab.StopOwner(data); err != nil {
			return err
		}
		if err := os.RemoveAll(data); err != nil {
			return err
		}
		if slow && !b.all {
			break
		}
	}
	for i, im := range images {
		var err error
		if took[i].holds, err = im.contents(); err != nil {
			return err
		}
		b.judgeConversion(im, took[i])
		b.spent[im.dir] = took[i]
	}
	return nil
}

// one measures one image once.
func (b *bench) one(ctx context.Context, data string, im layout, known bool, c *conversion) error {
	gunzip, err := timed(func() error { return gunzipAll(ctx, im.layers) })
	if err != nil {
		return err
	}
	c.gunzip = append(c.gunzip, gunzip)
	var res lab.Result
	s, err := timed(func() (err error) { res, err = b.lab.Convert(ctx, data, "oci:"+im.dir, imageName(im)); return err })
	if err != nil {
		return err
	}
	if res.LayersSkipped != 0 {
		return fmt.Errorf("%d layers were known already", res.LayersSkipped)
	}
	if known {
		c.known, c.knownRatio = append(c.known, s), append(c.knownRatio, s/gunzip)
	} else {
		c.fresh, c.freshRatio = append(c.fresh, s), append(c.freshRatio, s/gunzip)
	}
	if s, err = timed(func() error { return convertKnown(ctx, b.lab, data, im) }); err != nil {
		return err
	}
	c.again = append(c.again, s)
	peak, err := b.lab.PeakMemory(data)
	c.memory = append(c.memory, float64(peak)/(1<<20))
	return err
}

func imageName(im layout) string { return "bench/" + im.name() }

func (b *bench) judgeConversion(im layout, c conversion) {
	b.judgeRatio(im.name()+": new content ÷ gzip -dc", c.gunzip, c.freshRatio, maxNew)
	b.judgeRatio(im.name()+": known files in other layers ÷ gzip -dc", c.gunzip, c.knownRatio, maxKnown)
	b.judgeAgain(im.name(), c.holds.entries, median(c.again))
	b.judgeMemory(im.name(), c.holds.entries, median(c.memory))
}

// judgeRatio prints a ratio to gunzip, if it was measured.
func (b *bench) judgeRatio(name string, gunzip, ratio []float64, limit float64) {
	switch {
	case len(ratio) == 0:
	case median(gunzip) < shortImage:
		b.figure(name, fmt.Sprintf("%.3g × (no limit, gzip -dc takes %.0f ms)", median(ratio), 1000*median(gunzip)))
	default:
		b.atMost(name, median(ratio), limit, "×")
	}
}

// timed returns how many seconds f took.
func timed(f func() error) (float64, error) {
	start := time.Now()
	err := f()
	return time.Since(start).Seconds(), err
}

// convertKnown converts an image whose layers the store has read.
func convertKnown(ctx context.Context, l *lab.Lab, data string, im layout) error {
	res, err := l.Convert(ctx, data, "oci:"+im.dir, imageName(im))
	if err == nil && res.LayersSkipped != res.Layers {
		return fmt.Errorf("converting a known image read %d of %d layers", res.Layers-res.LayersSkipped, res.Layers)
	}
	return err
}

func gunzipAll(ctx context.Context, layers []string) error {
	cmd := exec.CommandContext(ctx, "gzip", append([]string{"-dc"}, layers...)...)
	cmd.Stdout = nil // /dev/null
	return cmd.Run()
}
