package layer_test

import (
	"bufio"
	"bytes"
	stdgzip "compress/gzip"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/klauspost/compress/gzip"

	"quarry/converter/layer"
	"quarry/internal/testimage"
	"quarry/store/chunk"
)

// benchLayer is the layer that QUARRY_BENCH_LAYER names, or 64 MiB of words in
// 2000 files, which deflate to a quarter as programs do.
func benchLayer(b *testing.B) (blob []byte, plainSize int64) {
	b.Helper()
	if path := os.Getenv("QUARRY_BENCH_LAYER"); path != "" {
		blob, err := os.ReadFile(path)
		if err != nil {
			b.Fatal(err)
		}
		return blob, gunzipAll(b, blob, klauspost)
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
	plain := testimage.Tar(b, entries...)
	return testimage.Gzip(b, plain), int64(len(plain))
}

func klauspost(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }
func standard(r io.Reader) (io.Reader, error)  { return stdgzip.NewReader(r) }

func gunzipAll(b *testing.B, blob []byte, open func(io.Reader) (io.Reader, error)) int64 {
	z, err := open(bufio.NewReader(bytes.NewReader(blob)))
	if err != nil {
		b.Fatal(err)
	}
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{z}, make([]byte, 256<<10))
	if err != nil {
		b.Fatal(err)
	}
	return n
}

// BenchmarkGunzip says why the decompressor is not the standard library's.
func BenchmarkGunzip(b *testing.B) {
	blob, size := benchLayer(b)
	for name, open := range map[string]func(io.Reader) (io.Reader, error){"klauspost": klauspost, "standard": standard} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(size)
			for b.Loop() {
				gunzipAll(b, blob, open)
			}
		})
	}
}

type digester struct{}

func (digester) Put(_ context.Context, p []byte) (chunk.Digest, error) { return chunk.Sum(p), nil }

// BenchmarkRead is all of Read but the store.
func BenchmarkRead(b *testing.B) {
	blob, size := benchLayer(b)
	d := layer.Descriptor{Digest: chunk.Sum(blob), Size: int64(len(blob))}
	b.SetBytes(size)
	for b.Loop() {
		if _, err := layer.Read(b.Context(), bytes.NewReader(blob), d, digester{}, layer.Config{ChunkSize: chunk.DefaultSize}); err != nil {
			b.Fatal(err)
		}
	}
}
