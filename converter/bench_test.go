package converter_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"quarry/chunkindex"
	"quarry/converter"
	"quarry/internal/testimage"
	"quarry/store/bucket/dir"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/packed"
)

// benchSource is the source that QUARRY_BENCH_SOURCE names, or a layer of 64 MiB
// of words in 2000 files.
func benchSource(b *testing.B) string {
	if src := os.Getenv("QUARRY_BENCH_SOURCE"); src != "" {
		return src
	}
	r := rand.New(rand.NewPCG(1, 2))
	var entries []testimage.Entry
	for i := range 2000 {
		var body bytes.Buffer
		for body.Len() < 32<<10 {
			fmt.Fprintf(&body, "%x word ", r.Uint32N(1<<20))
		}
		entries = append(entries, testimage.File(fmt.Sprintf("dir/%d", i), body.String()))
	}
	return testimage.Build(b, layerOf(entries...)).Source("")
}

// openFolder opens a store in a folder on disk, as a data folder has it.
func openFolder(b *testing.B, path string) converter.Config {
	b.Helper()
	objects, err := dir.Open(filepath.Join(path, "bucket"))
	if err != nil {
		b.Fatal(err)
	}
	index, err := chunkindex.Open(chunkindex.Config{Dir: filepath.Join(path, "index")})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { index.Close() })
	names, err := catalog.Open(b.Context(), catalog.Config{Journal: objects})
	if err != nil {
		b.Fatal(err)
	}
	chunks, err := packed.Open(b.Context(), packed.Config{Bucket: objects, Catalog: names, Index: index, ChunkSize: chunk.DefaultSize, TmpDir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	return converter.Config{
		Store: chunks, Bucket: objects, Catalog: names, ChunkSize: chunk.DefaultSize,
		MACKey: macKey, SigningKey: signingKey(b),
	}
}

func BenchmarkConvert(b *testing.B) {
	src := benchSource(b)
	convert := func(cfg converter.Config) *converter.Result {
		r, err := converter.Convert(b.Context(), cfg, request(src))
		if err != nil {
			b.Fatal(err)
		}
		return r
	}
	b.Run("new", func(b *testing.B) {
		for b.Loop() {
			b.StopTimer()
			cfg := openFolder(b, b.TempDir())
			b.StartTimer()
			b.SetBytes(convert(cfg).NewPlainBytes)
		}
	})
	b.Run("known", func(b *testing.B) {
		cfg := openFolder(b, b.TempDir())
		convert(cfg)
		for b.Loop() {
			if r := convert(cfg); r.LayersReused != r.Layers {
				b.Fatalf("a layer was read: %+v", r)
			}
		}
	})
}
