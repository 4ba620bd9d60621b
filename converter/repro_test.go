package converter_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"quarry/converter"
	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/rafs"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
	"quarry/store/packed"
)

// Whoever makes the image again without a store gets what Convert signs, to the byte.
func TestAnImageIsRemadeWithoutAStore(t *testing.T) {
	for name, layers := range map[string][]testimage.Layer{
		"two layers": {base, top}, "a layer twice": {base, top, base}, "no file data": {{Entries: []testimage.Entry{testimage.Dir("d")}}},
	} {
		s := newStore(t)
		src := testimage.Build(t, layers...).Source("")
		r := s.convert(t, src)
		var last converter.Event
		made, err := converter.Remake(t.Context(), converter.Config{ChunkSize: testChunk, Progress: func(e converter.Event) { last = e }}, src, oci.Config{Platform: amd64})
		if err != nil {
			t.Fatal(err)
		}
		got, err := image.EncodeStatement(made.Statement)
		want, _ := image.EncodeStatement(r.Statement)
		if err != nil || !bytes.Equal(got, want) || image.ID(got) != r.ImageID || chunk.Sum(made.Bootstrap) != r.Statement.Bootstrap {
			t.Errorf("%s: remade %s, %v; want %s", name, got, err, want)
		}
		if last.Layer != len(layers) || last.Read != last.Size {
			t.Errorf("%s: the last step was %+v", name, last)
		}
	}
	_, err := converter.Remake(t.Context(), converter.Config{ChunkSize: testChunk, Limits: converter.Limits{RecordBytes: 1}}, testimage.Build(t, base).Source(""), oci.Config{})
	if !errors.As(err, new(*converter.InputError)) || !strings.Contains(err.Error(), "RecordBytes") {
		t.Errorf("with a limit: error %v", err)
	}
}

// reproLayers are many small layers upon a large one, in some of which a file
// goes or comes back: whatever is done in parallel or found in the store, the
// last is read long before the first.
func reproLayers() []testimage.Layer {
	noise := make([]byte, 64*testChunk)
	rand.NewChaCha8([32]byte{9}).Read(noise)
	layers := []testimage.Layer{
		layerOf(testimage.File("this-will-be-deleted", "x"), testimage.File("noise", string(noise)), testimage.Dir("n"), testimage.File("n/0", big)),
		layerOf(testimage.File(".wh.this-will-be-deleted", "")),
	}
	for i := range 30 {
		name := fmt.Sprint("n/", i)
		entries := []testimage.Entry{testimage.File("same", fmt.Sprint(i)), testimage.File(name, big[:100*i+1]), testimage.Hardlink(name+"-link", name)}
		if i%10 == 9 {
			entries = append(entries, testimage.File(fmt.Sprint("n/.wh.", i-5), ""))
		}
		layers = append(layers, testimage.Layer{Entries: entries, Codec: []string{"gzip", "zstd", "none"}[i%3]})
	}
	return layers
}

// bytesOf returns what must be the same whoever converts: the payload of the
// image statement, and bootstrap and config that it names.
func (s *store) bytesOf(t *testing.T, r *converter.Result) map[string]string {
	t.Helper()
	st := r.Statement
	all := map[string]string{}
	for _, key := range []string{image.StatementKey(st.Source, st.Platform), image.BootstrapKey(st.Bootstrap), image.ConfigKey(st.Config)} {
		all[key] = string(buckettest.Bytes(t, s.mem, key))
	}
	return all
}

// wantSameBytes converts src in s and compares with what another store has made.
func (s *store) wantSameBytes(t *testing.T, src string, want map[string]string) *converter.Result {
	t.Helper()
	r := s.convert(t, src)
	got := s.bytesOf(t, r)
	for key, body := range want {
		if got[key] != body {
			t.Errorf("%s differs", key)
		}
	}
	return r
}

func TestReproEveryStoreAndMachineMakesTheSameBytes(t *testing.T) {
	l := testimage.Build(t, reproLayers()...)
	src := l.Source("")
	first := newStore(t)
	want := first.bytesOf(t, first.convert(t, src))
	_, files := first.verified(t, latest)
	if _, there := files["this-will-be-deleted"]; there || files["same"] != "29" {
		t.Errorf("the image is wrong: %d files, same is %q", len(files), files["same"])
	}
	for name, machine := range map[string]func(t *testing.T) *store{
		"8 workers":               func(t *testing.T) *store { return workers(newStore(t), 8) },
		"a slow and unsteady one": unsteady,
		"another clock": func(t *testing.T) *store {
			s := newStore(t)
			s.Now = func() time.Time { return now.AddDate(30, 5, 7) }
			return s
		},
		"other keys": func(t *testing.T) *store {
			s := newStore(t)
			s.MACKey, s.SigningKey = bytes.Repeat([]byte{8}, image.MACKeySize), nil
			return s
		},
		"a store with other images": func(t *testing.T) *store {
			s := newStore(t)
			s.convert(t, testimage.Build(t, layerOf(testimage.File("z", big), testimage.File("same", "7"))).Source(""))
			s.convert(t, testimage.Build(t, reproLayers()[3:9]...).Source(""))
			return s
		},
		"a store with the image":   func(t *testing.T) *store { s := newStore(t); s.convert(t, src); return s },
		"a store with small packs": func(t *testing.T) *store { return smallPacks(t, newStore(t)) },
		"a store that condemned some chunks": func(t *testing.T) *store {
			s := newStore(t)
			s.convert(t, src)
			condemnSome(t, s)
			return s
		},
		"a store that lost its index": func(t *testing.T) *store {
			s := newStore(t)
			s.convert(t, src)
			return openStore(t, s.mem, nil)
		},
		"another zstd, all chunks raw":      func(t *testing.T) *store { return recoded(t, first, rawFrame) },
		"another zstd, of another level":    func(t *testing.T) *store { return recoded(t, first, bestFrame) },
		"another zstd, and every chunk two": func(t *testing.T) *store { s := recoded(t, first, bestFrame); addPack(t, s, first, rawFrame); return s },
	} {
		t.Run(name, func(t *testing.T) {
			s := machine(t)
			s.wantSameBytes(t, src, want)
			if s.SigningKey == nil {
				return
			}
			if _, got := s.verified(t, latest); len(got) != len(files) || got["noise"] != files["noise"] {
				t.Errorf("%d files of %d read back", len(got), len(files))
			}
		})
	}
}

func workers(s *store, n int) *store {
	s.Workers = n
	return s
}

// unsteady is a store whose bucket answers after random times, so that layers
// end in another order than they begin.
func unsteady(t *testing.T) *store {
	faulty := &buckettest.Faulty{Before: func(buckettest.Op) error {
		time.Sleep(rand.N(3 * time.Millisecond))
		return nil
	}}
	return workers(openStore(t, mem.New(), faulty), 8)
}

// smallPacks gives s packs of a few chunks.
func smallPacks(t *testing.T, s *store) *store {
	t.Helper()
	chunks, err := packed.Open(t.Context(), packed.Config{
		Bucket: s.Bucket, Catalog: s.Catalog, Index: s.index, ChunkSize: testChunk, PackSize: 128, TmpDir: t.TempDir(),
	})
	if err != nil {
		t.Fatal(err)
	}
	s.Store = chunks
	return s
}

// condemnSome takes every third chunk of the image out of use.
func condemnSome(t *testing.T, s *store) {
	t.Helper()
	ds := allChunks(t, s)
	locs, found, err := s.index.LookupBatch(t.Context(), ds)
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(ds); i += 3 {
		if !found[i] {
			t.Fatalf("chunk %s is not there", ds[i])
		}
		if err := s.Store.Condemn(t.Context(), ds[i], locs[i]); err != nil {
			t.Fatal(err)
		}
	}
}

// allChunks are the chunks of the images in s, each once.
func allChunks(t *testing.T, s *store) []chunk.Digest {
	t.Helper()
	var ds []chunk.Digest
	for _, key := range buckettest.Keys(t, s.mem, "bootstraps/") {
		im, err := rafs.Decode(buckettest.Bytes(t, s.mem, key))
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range im.Blob.Chunks {
			ds = append(ds, c.Digest)
		}
	}
	if len(ds) < 10 {
		t.Fatalf("only %d chunks", len(ds))
	}
	return ds
}

// frame is a way to store a chunk that another zstd might have.
type frame func(t *testing.T, p []byte) (pack.Codec, []byte)

func rawFrame(_ *testing.T, p []byte) (pack.Codec, []byte) { return pack.Raw, p }

var bestEncoder = sync.OnceValues(func() (*zstd.Encoder, error) {
	return zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedBestCompression), zstd.WithSingleSegment(true), zstd.WithEncoderConcurrency(1))
})

func bestFrame(t *testing.T, p []byte) (pack.Codec, []byte) {
	t.Helper()
	w, err := bestEncoder()
	if err != nil {
		t.Fatal(err)
	}
	if f := w.EncodeAll(p, nil); len(f) < len(p) {
		return pack.Zstd, f
	}
	return pack.Raw, p
}

// recoded is a store that already has all chunks of from, stored in another way.
func recoded(t *testing.T, from *store, code frame) *store {
	s := newStore(t)
	addPack(t, s, from, code)
	return s
}

// addPack puts the chunks of from into one more pack of s.
func addPack(t *testing.T, s, from *store, code frame) {
	t.Helper()
	var b bytes.Buffer
	w := pack.NewWriter(&b)
	for _, d := range allChunks(t, from) {
		p, err := from.Store.Get(t.Context(), d, nil)
		if err != nil {
			t.Fatal(err)
		}
		codec, stored := code(t, p)
		if _, err := w.Add(d, codec, uint32(len(p)), stored); err != nil {
			t.Fatal(err)
		}
	}
	id, size, err := w.Close()
	if err != nil {
		t.Fatal(err)
	}
	buckettest.Put(t, s.mem, pack.Key(id), b.Bytes())
	if err := s.Catalog.AddPack(t.Context(), id, size); err != nil {
		t.Fatal(err)
	}
	chunks, err := packed.Open(t.Context(), packed.Config{Bucket: s.Bucket, Catalog: s.Catalog, Index: s.index, ChunkSize: testChunk, TmpDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	s.Store = chunks
}

// The same tars compressed in other ways are another source with the same
// bootstrap, and a statement that differs in nothing else.
func TestReproCompressionOfLayersIsNotInTheImage(t *testing.T) {
	var sources []converter.Result
	for _, level := range []int{gzip.NoCompression, gzip.BestSpeed, gzip.BestCompression, gzip.HuffmanOnly} {
		s := newStore(t)
		var layers []testimage.Layer
		for _, y := range reproLayers()[:5] {
			y.Tar = testimage.Tar(t, y.Entries...)
			y.Blob, y.Codec = gzipLevel(t, y.Tar, level), "gzip"
			layers = append(layers, y)
		}
		sources = append(sources, *s.convert(t, testimage.Build(t, layers...).Source("")))
	}
	for _, r := range sources[1:] {
		want := sources[0].Statement
		if r.Source == want.Source {
			t.Fatal("the sources are one: the test shows nothing")
		}
		want.Source = r.Source
		got, err := image.EncodeStatement(r.Statement)
		if err != nil {
			t.Fatal(err)
		}
		if payload, err := image.EncodeStatement(want); err != nil || !bytes.Equal(got, payload) {
			t.Errorf("statement %s, want %s (%v)", got, payload, err)
		}
	}
}

func gzipLevel(t *testing.T, p []byte, level int) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, level)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(p); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Bug 67: file i is full of the byte i, at lengths around chunk ends, its chunks
// in as many packs, some in two. A number mixed up anywhere shows.
func TestReproNoChunkIsTakenForAnother(t *testing.T) {
	var entries []testimage.Entry
	want := map[string]string{"": "/"}
	for i := range 24 {
		size := testChunk*(1+i/3) + i%3 - 1
		name := fmt.Sprintf("f%02d", i)
		want[name] = strings.Repeat(string(rune('A'+i)), size)
		entries = append(entries, testimage.File(name, want[name]))
	}
	src := testimage.Build(t, layerOf(entries[:8]...), layerOf(entries[8:]...), layerOf(entries[4:12]...)).Source("")
	first := smallPacks(t, newStore(t))
	bytesWanted := first.bytesOf(t, first.convert(t, src))
	if n := len(buckettest.Keys(t, first.mem, "packs/")); n < 4 {
		t.Fatalf("only %d packs", n)
	}
	for round := range 10 {
		s := smallPacks(t, newStore(t))
		switch round % 3 {
		case 1: // some chunks are there already
			s.convert(t, testimage.Build(t, layerOf(entries[3:9]...)).Source(""))
		case 2: // and some twice
			s.convert(t, testimage.Build(t, layerOf(entries[3:9]...)).Source(""))
			addPack(t, s, first, bestFrame)
			smallPacks(t, s)
		}
		workers(s, 1+round%4*3).wantSameBytes(t, src, bytesWanted)
		_, got := s.verified(t, latest)
		for name, body := range want {
			if got[name] != body {
				t.Errorf("round %d: %s has %d bytes, of %q, want %d of %q", round, name, len(got[name]), got[name][:1], len(body), body[:1])
			}
		}
		if len(got) != len(want) {
			t.Errorf("round %d: %d files, want %d", round, len(got), len(want))
		}
	}
}
