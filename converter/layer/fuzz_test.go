package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"quarry/converter/layer"
	"quarry/internal/testimage"
	"quarry/store/chunk"
	"quarry/store/image"
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
	f.Add(append(testimage.Gzip(f, tarball[:700]), testimage.Gzip(f, tarball[700:])...))                                                       // several members
	f.Add([]byte("\x50\x2a\x4d\x18\x03\x00\x00\x00abc" + string(testimage.Zstd(f, tarball[:700])) + string(testimage.Zstd(f, tarball[700:])))) // and frames
	var odd []byte
	for _, e := range []testimage.Entry{
		testimage.File("size", "x").WithXattr("LIBARCHIVE.x", "y"),
		{Header: tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "g", PAXRecords: map[string]string{"comment": "c"}}},
		{Header: tar.Header{Typeflag: tar.TypeReg, Name: "sparse", PAXRecords: map[string]string{
			"GNU.sparse.major": "0", "GNU.sparse.minor": "1", "GNU.sparse.map": "1,1,8191,1", "GNU.sparse.size": "9000", "GNU.sparse.numblocks": "2"}}, Body: "ab"},
		testimage.Device("d", tar.TypeBlock, 4095, 1<<20-1),
	} {
		odd = append(odd, testimage.RawTar(e)...)
	}
	f.Add(odd)
	f.Fuzz(func(t *testing.T, p []byte) {
		const limit = 1 << 20
		put := &discard{}
		rec, err := layer.Read(t.Context(), bytes.NewReader(p), layer.Descriptor{Digest: chunk.Sum(p), Size: int64(len(p))}, put,
			layer.Config{ChunkSize: chunk.MinSize, Limits: layer.Limits{MaxBytes: limit, MaxChunks: 1 << 12, MaxEntries: 1000, MaxMetadata: limit}})
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
		if rec.DiffID == chunk.Sum(p) {
			wantContent(t, p, rec)
		}
		// What was read can be kept: a record is written as it is read back.
		key := make([]byte, image.MACKeySize)
		b, err := image.EncodeLayer(rec, key)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := image.DecodeLayer(b, key); err != nil || !cmp.Equal(back, rec, cmpopts.EquateEmpty()) {
			t.Fatalf("the record is read back as (-got +want) %v\n%s", err, cmp.Diff(back, rec, cmpopts.EquateEmpty()))
		}
	})
}

// wantContent compares files with what archive/tar reads of them, holes filled.
func wantContent(t *testing.T, archive []byte, rec *image.LayerRecord) {
	t.Helper()
	r, i := tar.NewReader(bytes.NewReader(archive)), 0
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("archive/tar refuses it: %v", err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		body, err := io.ReadAll(r)
		if err != nil {
			t.Fatalf("archive/tar refuses content of %q: %v", h.Name, err)
		}
		if i == len(rec.Entries) {
			t.Fatalf("%q is left out", h.Name)
		}
		e := rec.Entries[i]
		i++
		if e.Type == image.TypeReg && (int64(len(body)) != e.Size || !slices.Equal(split(body), e.Chunks)) {
			t.Fatalf("%q has %d bytes, want %d", e.Name, e.Size, len(body))
		}
	}
	if i != len(rec.Entries) {
		t.Fatalf("%d entries, want %d", len(rec.Entries), i)
	}
}

func split(p []byte) (ds []chunk.Digest) {
	for c := range slices.Chunk(p, chunk.MinSize) {
		ds = append(ds, chunk.Sum(c))
	}
	return ds
}
