package cache_test

import (
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/store/cache"
	"quarry/store/chunk"
)

// modes are the two ways to read and write.
var modes = map[string]bool{"direct": false, "buffered": true}

// filled is a cache of 1 GiB of chunks of 256 KiB, on the disk.
func filled(b *testing.B, buffered bool) (*cache.Cache, []chunk.Digest) {
	b.Helper()
	c := open(b, cache.Config{Dir: b.TempDir(), Buffered: buffered})
	p, ds := content(1, chunk.DefaultSize), []chunk.Digest{}
	for i := range 4096 {
		d := chunk.Digest{}
		binary.LittleEndian.PutUint64(d[:], uint64(i)) // the cache does not look
		if err := c.Put(b.Context(), d, p); err != nil {
			b.Fatal(err)
		}
		ds = append(ds, d)
	}
	unix.Sync()
	return c, ds
}

func BenchmarkReadAt(b *testing.B) {
	for mode, buffered := range modes {
		c, ds := filled(b, buffered)
		for _, size := range []int{4 << 10, 128 << 10, 256 << 10} {
			b.Run(fmt.Sprintf("%s/%dKiB", mode, size>>10), func(b *testing.B) {
				rnd := rand.New(rand.NewPCG(rand.Uint64(), 1))
				p := make([]byte, size)
				var took []time.Duration
				b.SetBytes(int64(size))
				for b.Loop() {
					off := rnd.IntN((chunk.DefaultSize-size)/4096+1) * 4096
					start := time.Now()
					if err := c.ReadAt(ds[rnd.IntN(len(ds))], p, int64(off)); err != nil {
						b.Fatal(err)
					}
					took = append(took, time.Since(start))
				}
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
				b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
			})
		}
	}
}

func BenchmarkWrite(b *testing.B) {
	for mode, buffered := range modes {
		b.Run(mode, func(b *testing.B) {
			b.SetBytes(1 << 30)
			for b.Loop() {
				filled(b, buffered)
			}
		})
	}
}

// BenchmarkOpen opens a folder of 250 000 chunks, of 4 KiB so that it fits here:
// opening reads no data, so their size does not matter.
func BenchmarkOpen(b *testing.B) {
	const chunks = 250_000
	cfg := cache.Config{Dir: b.TempDir()}
	c := open(b, cfg)
	p, last := content(1, 4096), chunk.Digest{}
	for i := range chunks {
		binary.LittleEndian.PutUint64(last[:], uint64(i)*0x9e3779b97f4a7c15)
		for c.Offer(last, p); i%2000 == 1999; {
			if err := c.Put(b.Context(), last, p); err != nil {
				b.Fatal(err)
			}
			break
		}
	}
	c.Close()
	for b.Loop() {
		c, err := cache.Open(cfg)
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if n := c.Stats().Chunks; n != chunks {
			b.Fatalf("%d chunks", n)
		}
		c.Close()
		b.StartTimer()
	}
}
