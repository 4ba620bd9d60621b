package layer_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"quarry/converter/layer"
	"quarry/internal/testimage"
	"quarry/store/chunk"
)

// discard is a Putter that keeps nothing.
type discard struct{ bytes int64 }

func (d *discard) Put(_ context.Context, p []byte) (chunk.Digest, error) {
	d.bytes += int64(len(p))
	return chunk.Sum(p), nil
}

// Whatever the bytes of a layer are, reading it ends with a record that
// describes no more than the limits allow, or with an error that is not the
// store's.
func FuzzRead(f *testing.F) {
	tarball := testimage.Tar(f,
		testimage.Dir("d"), testimage.File("d/f", "content"), testimage.Symlink("s", "d/f"),
		testimage.Hardlink("h", "d/f"), testimage.Device("c", '3', 1, 3), testimage.File("x", "y").WithXattr("user.k", "v"))
	f.Add(tarball)
	f.Add(testimage.Gzip(f, tarball))
	f.Add(testimage.Zstd(f, tarball))
	f.Add(tarball[:len(tarball)/2])
	f.Fuzz(func(t *testing.T, p []byte) {
		const limit = 1 << 20
		put := &discard{}
		rec, err := layer.Read(t.Context(), bytes.NewReader(p), layer.Descriptor{Digest: chunk.Sum(p), Size: int64(len(p))}, put,
			layer.Config{ChunkSize: chunk.MinSize, Limits: layer.Limits{MaxBytes: limit, MaxEntries: 1000, MaxMetadata: limit}})
		if errors.As(err, new(*layer.StoreError)) {
			t.Fatalf("the layer is blamed on the store: %v", err)
		}
		if put.bytes > limit {
			t.Fatalf("%d bytes were stored, the limit is %d", put.bytes, limit)
		}
		if err != nil {
			return
		}
		if len(rec.Entries) > 1000 || rec.PlainSize > limit {
			t.Fatalf("record has %d entries and %d bytes", len(rec.Entries), rec.PlainSize)
		}
	})
}
