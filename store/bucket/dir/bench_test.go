package dir_test

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"quarry/store/bucket/buckettest"
)

// BenchmarkReadAt reads chunks of a pack as the store does, through the bucket,
// which opens the file each time, and from one open file, the best that a cache
// of open files could do.
func BenchmarkReadAt(b *testing.B) {
	const packSize, chunkSize = 64 << 20, 100 << 10
	path := b.TempDir()
	buckettest.Put(b, open(b, path), "packs/a", make([]byte, packSize))
	d := open(b, path)
	file, err := os.Open(filepath.Join(path, "packs", "a"))
	if err != nil {
		b.Fatal(err)
	}
	defer file.Close()
	for _, bench := range []struct {
		name string
		read func(p []byte, off int64) error
	}{
		{"bucket", func(p []byte, off int64) error { return d.ReadAt(b.Context(), "packs/a", p, off) }},
		{"open file", func(p []byte, off int64) error { _, err := file.ReadAt(p, off); return err }},
	} {
		b.Run(bench.name, func(b *testing.B) {
			p := make([]byte, chunkSize)
			b.SetBytes(chunkSize)
			b.ReportAllocs()
			for b.Loop() {
				if err := bench.read(p, rand.Int64N(packSize-chunkSize)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
