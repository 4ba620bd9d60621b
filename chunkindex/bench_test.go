package chunkindex_test

import (
	"fmt"
	"os"
	"testing"

	"quarry/chunkindex"
	"quarry/chunkindex/indextest"
	"quarry/store/chunk"
)

// benchIndex returns an index of 200 000 keys or, when QUARRY_BENCH_INDEX names
// a folder to keep it in, of ten million.
func benchIndex(b *testing.B) (dir string, keys uint64) {
	b.Helper()
	dir, keys = os.Getenv("QUARRY_BENCH_INDEX"), 10_000_000
	if dir == "" {
		dir, keys = b.TempDir(), 200_000
	}
	dir, _, err := indextest.Kept(b.Context(), dir, keys)
	if err != nil {
		b.Fatal(err)
	}
	return dir, keys
}

// BenchmarkLookupBatch looks up 128 chunks at a time, as a conversion does.
func BenchmarkLookupBatch(b *testing.B) {
	dir, keys := benchIndex(b)
	for _, cache := range []int64{64 << 20, 1 << 30} {
		for _, known := range []bool{false, true} {
			b.Run(fmt.Sprintf("cache=%dMiB/known=%t", cache>>20, known), func(b *testing.B) {
				benchLookups(b, chunkindex.Config{Dir: dir, CacheSize: cache}, keys, known)
			})
		}
	}
}

func benchLookups(b *testing.B, cfg chunkindex.Config, keys uint64, known bool) {
	ix, err := chunkindex.Open(cfg)
	if err != nil {
		b.Fatal(err)
	}
	defer ix.Close()
	ds := make([]chunk.Digest, 128)
	n := uint64(0)
	for b.Loop() {
		b.StopTimer()
		for i := range ds {
			n = (n + 7919) % keys // a prime: from pack to pack, and through all keys
			ds[i] = indextest.Digest(n)
			if !known {
				ds[i] = indextest.Digest(n + keys)
			}
		}
		b.StartTimer()
		_, found, err := ix.LookupBatch(b.Context(), ds)
		if err != nil || found[0] != known {
			b.Fatalf("found %t, want %t, error %v", found, known, err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(ds)), "ns/key")
	b.ReportMetric(float64(ix.Stats().DiskBytes)/float64(keys), "B/key")
}

// BenchmarkHasBatch asks for known chunks as a conversion does: in the order of
// the packs, in which the content of an image comes again, and from pack to pack.
func BenchmarkHasBatch(b *testing.B) {
	dir, keys := benchIndex(b)
	for name, step := range map[string]uint64{"in order": 1, "spread": 7919} {
		b.Run(name, func(b *testing.B) {
			ix, err := chunkindex.Open(chunkindex.Config{Dir: dir})
			if err != nil {
				b.Fatal(err)
			}
			defer ix.Close()
			ds := make([]chunk.Digest, 128)
			n := uint64(0)
			for b.Loop() {
				b.StopTimer()
				for i := range ds {
					n = (n + step) % keys
					ds[i] = indextest.Digest(n)
				}
				b.StartTimer()
				found, _, err := ix.HasBatch(b.Context(), ds)
				if err != nil || !found[0] {
					b.Fatalf("found %t, error %v", found[0], err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(ds)), "ns/key")
		})
	}
}

func BenchmarkInsertBatch(b *testing.B) {
	ix, err := chunkindex.Open(chunkindex.Config{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer ix.Close()
	const count = 1000
	n := uint64(0)
	for b.Loop() {
		b.StopTimer()
		id, entries := indextest.Pack(n, count)
		n += count
		b.StartTimer()
		if err := ix.InsertBatch(b.Context(), id, entries); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*count), "ns/key")
}
