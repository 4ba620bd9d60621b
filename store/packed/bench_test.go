package packed_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"

	"quarry/chunkindex"
	"quarry/store"
	"quarry/store/bucket/dir"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/packed"
	"quarry/store/storetest"
)

// benchContent is what layers are made of: machine code and tables, which this
// test's own program is, and a tenth that does not compress.
func benchContent(b *testing.B) []byte {
	exe, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	p, err := os.ReadFile(exe)
	if err != nil {
		b.Fatal(err)
	}
	return append(p, storetest.Content(1, len(p)/9)...)
}

// realStore opens a store in a folder, with every sync a real one has.
func realStore(b *testing.B, path string) (*packed.Store, func()) {
	bucket, err := dir.Open(filepath.Join(path, "bucket"))
	if err != nil {
		b.Fatal(err)
	}
	cat, err := catalog.Open(b.Context(), catalog.Config{Journal: bucket})
	if err != nil {
		b.Fatal(err)
	}
	ix, err := chunkindex.Open(chunkindex.Config{Dir: filepath.Join(path, "index")})
	if err != nil {
		b.Fatal(err)
	}
	s, err := packed.Open(b.Context(), packed.Config{Bucket: bucket, Catalog: cat, Index: ix, TmpDir: path})
	if err != nil {
		b.Fatal(err)
	}
	return s, func() { ix.Close() }
}

func writeContent(ctx context.Context, s *packed.Store, p []byte) error {
	return s.Write(ctx, func(ctx context.Context, w store.Putter) error {
		for off := 0; off < len(p); off += chunk.DefaultSize {
			if _, err := w.Put(ctx, p[off:min(off+chunk.DefaultSize, len(p))]); err != nil {
				return err
			}
		}
		return nil
	})
}

// BenchmarkWrite stands beside BenchmarkGunzip of the same bytes: the claim is
// about their ratio, with both at work in one conversion.
func BenchmarkWrite(b *testing.B) {
	p := benchContent(b)
	for name, known := range map[string]bool{"new": false, "known": true} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(p)))
			s, done := realStore(b, b.TempDir())
			if err := writeContent(b.Context(), s, p); err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if !known {
					b.StopTimer()
					done()
					s, done = realStore(b, b.TempDir())
					b.StartTimer()
				}
				if err := writeContent(b.Context(), s, p); err != nil {
					b.Fatal(err)
				}
			}
			done()
		})
	}
}

func BenchmarkGunzip(b *testing.B) {
	p := benchContent(b)
	var z bytes.Buffer
	w := gzip.NewWriter(&z)
	if _, err := w.Write(p); err != nil {
		b.Fatal(err)
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		r, err := gzip.NewReader(bytes.NewReader(z.Bytes()))
		if err != nil {
			b.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, r); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkGet(b *testing.B) {
	p := benchContent(b)[:16<<20]
	s, done := realStore(b, b.TempDir())
	defer done()
	if err := writeContent(b.Context(), s, p); err != nil {
		b.Fatal(err)
	}
	d := chunk.Sum(p[:chunk.DefaultSize])
	b.SetBytes(chunk.DefaultSize)
	var buf []byte
	for b.Loop() {
		var err error
		if buf, err = s.Get(b.Context(), d, buf); err != nil {
			b.Fatal(err)
		}
	}
}
