// Package apitest makes a small real store behind the HTTP handler, for the
// tests of the handler, of its client, and of whoever reads over the network.
package apitest

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http/httptest"
	"testing"
	"time"

	"quarry/api"
	"quarry/chunkindex"
	"quarry/rafs"
	"quarry/signer"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
	"quarry/store/packed"
	"quarry/store/trace"
)

// ChunkSize is S of the images made here: small, so that they have many chunks.
const ChunkSize = chunk.MinSize

// World is a store with a catalog, and a key to sign what is put in it.
type World struct {
	Bucket  *mem.Bucket
	Catalog *catalog.Catalog
	Chunks  *packed.Store
	Key     *signer.Key
	index   *chunkindex.Index
}

// New returns an empty world.
func New(t testing.TB) *World {
	t.Helper()
	b := mem.New()
	c, err := catalog.Open(t.Context(), catalog.Config{Journal: b})
	if err != nil {
		t.Fatal(err)
	}
	index, err := chunkindex.Open(chunkindex.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := index.Close(); err != nil {
			t.Error(err)
		}
	})
	chunks, err := packed.Open(t.Context(), packed.Config{
		Bucket: b, Catalog: c, Index: index, TmpDir: t.TempDir(),
	})
	if err != nil {
		t.Fatal(err)
	}
	key, err := signer.Generate()
	if err != nil {
		t.Fatal(err)
	}
	return &World{Bucket: b, Catalog: c, Chunks: chunks, Key: key, index: index}
}

// Serve starts a server of the world on a loopback port. change, when not nil,
// edits the configuration first.
func (w *World) Serve(t testing.TB, change func(*api.Config)) (*httptest.Server, *api.Handler) {
	t.Helper()
	cfg := api.Config{Chunks: w.Chunks, Names: w.Catalog, Bucket: w.Bucket}
	if change != nil {
		change(&cfg)
	}
	h := api.NewHandler(cfg)
	srv := httptest.NewUnstartedServer(h)
	srv.Config = api.NewServer(h)
	srv.Listener = h.Listen(srv.Listener, 0)
	srv.Start()
	t.Cleanup(srv.Close)
	return srv, h
}

// PutChunk stores one chunk.
func (w *World) PutChunk(t testing.TB, p []byte) chunk.Digest {
	t.Helper()
	return w.PutChunks(t, p)[0]
}

// PutChunks stores chunks, new ones one after another in one pack.
func (w *World) PutChunks(t testing.TB, ps ...[]byte) (ds []chunk.Digest) {
	t.Helper()
	err := w.Chunks.Write(t.Context(), func(ctx context.Context, to store.Putter) error {
		for _, p := range ps {
			d, err := to.Put(ctx, p)
			if err != nil {
				return err
			}
			ds = append(ds, d)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return ds
}

// Damage flips a bit of the stored copy of a chunk.
func (w *World) Damage(t testing.TB, d chunk.Digest) { w.damage(t, d, 0) }

// DamageHeader flips a bit of the header that the copy has in its pack.
func (w *World) DamageHeader(t testing.TB, d chunk.Digest) { w.damage(t, d, -1) }

func (w *World) damage(t testing.TB, d chunk.Digest, off int64) {
	t.Helper()
	loc := w.locate(t, d)
	key := pack.Key(loc.Pack)
	obj, err := w.Bucket.Stat(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	p := make([]byte, obj.Size)
	if err := w.Bucket.ReadAt(t.Context(), key, p, 0); err != nil {
		t.Fatal(err)
	}
	p[loc.Off+off] ^= 1
	w.PutObject(t, key, p)
}

func (w *World) locate(t testing.TB, d chunk.Digest) chunkindex.Location {
	t.Helper()
	locs, ok, err := w.index.LookupBatch(t.Context(), []chunk.Digest{d})
	if err != nil || !ok[0] {
		t.Fatalf("chunk %s: found %v, error %v", d, ok, err)
	}
	return locs[0]
}

// StoredSizes returns what chunks take in packs, -1 for one that is in none.
func (w *World) StoredSizes(ctx context.Context, ds []chunk.Digest) ([]int64, error) {
	return w.index.StoredSizes(ctx, ds)
}

// PackOf returns the key of the object that holds a chunk.
func (w *World) PackOf(t testing.TB, d chunk.Digest) string {
	t.Helper()
	return pack.Key(w.locate(t, d).Pack)
}

// Over returns the chunks as they are read through b, which leads to w.Bucket.
func (w *World) Over(t testing.TB, b bucket.Bucket) *packed.Store {
	t.Helper()
	return w.open(t, packed.Config{Bucket: b})
}

// InFiles returns the chunks as they are read through b, which leads to w.Bucket, and
// sent as records whenever that can be.
func (w *World) InFiles(t testing.TB, b buckettest.Files) *packed.Store {
	t.Helper()
	return w.open(t, packed.Config{Bucket: b, MinExtent: 1})
}

func (w *World) open(t testing.TB, cfg packed.Config) *packed.Store {
	t.Helper()
	cfg.Catalog, cfg.Index, cfg.TmpDir = w.Catalog, w.index, t.TempDir()
	chunks, err := packed.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return chunks
}

// PutObject stores an object of the bucket.
func (w *World) PutObject(t testing.TB, key string, body []byte) {
	t.Helper()
	if err := w.Bucket.Put(t.Context(), key, bytes.NewReader(body), int64(len(body))); err != nil {
		t.Fatal(err)
	}
}

// Image is what Publish stored.
type Image struct {
	Ref       image.Ref
	Source    chunk.Digest
	Platform  image.Platform
	Config    []byte
	Bootstrap []byte
	Blob      *rafs.Blob
	Data      []byte // the packed chunks: the virtual blob without its tail
}

// Publish stores a signed image of the given number of files under a name. Equal
// seeds make equal files.
func (w *World) Publish(t testing.TB, name string, files int, seed uint64) *Image {
	t.Helper()
	img := &Image{Platform: image.HostPlatform(), Config: fmt.Appendf(nil, `{"seed":%d}`, seed)}
	img.Source = chunk.Sum(fmt.Appendf(nil, "source %s %d", name, seed))
	var err error
	if img.Ref, err = image.ParseName(name); err != nil {
		t.Fatal(err)
	}
	root := &rafs.Inode{Mode: rafs.ModeDir | 0o755}
	err = w.Chunks.Write(t.Context(), func(ctx context.Context, to store.Putter) error {
		return putFiles(ctx, to, root, files, seed)
	})
	if err != nil {
		t.Fatal(err)
	}
	if img.Bootstrap, err = rafs.Encode(&rafs.Tree{ChunkSize: ChunkSize, Root: root}); err != nil {
		t.Fatal(err)
	}
	decoded, err := rafs.Decode(img.Bootstrap)
	if err != nil {
		t.Fatal(err)
	}
	img.Blob = decoded.Blob
	for _, c := range img.Blob.Chunks {
		p, err := w.Chunks.Get(t.Context(), c.Digest, nil)
		if err != nil {
			t.Fatal(err)
		}
		img.Data = append(img.Data, p...)
	}
	d := chunk.Sum(img.Bootstrap)
	w.PutObject(t, image.BootstrapKey(d), img.Bootstrap)
	w.PutObject(t, image.ConfigKey(chunk.Sum(img.Config)), img.Config)
	w.PutObject(t, image.BlobKey(img.Blob.ID), []byte(d.String()))
	w.PutStatement(t, img, true)
	w.SetName(t, img)
	return img
}

// putFiles stores files of pseudo-random and of repetitive content, with lengths
// around the chunk size, and enters them in dir.
func putFiles(ctx context.Context, to store.Putter, dir *rafs.Inode, files int, seed uint64) error {
	rnd := rand.New(rand.NewPCG(seed, 1))
	for i := range files {
		content := make([]byte, 1+rnd.IntN(3*ChunkSize))
		if i%3 == 0 {
			content = bytes.Repeat(fmt.Appendf(nil, "%d %d ", seed, i), 1+rnd.IntN(ChunkSize/4))
		} else {
			for j := range content {
				content[j] = byte(rnd.Uint32())
			}
		}
		f := &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: int64(len(content))}
		for off := 0; off < len(content); off += ChunkSize {
			d, err := to.Put(ctx, content[off:min(off+ChunkSize, len(content))])
			if err != nil {
				return err
			}
			f.Chunks = append(f.Chunks, d)
		}
		dir.Entries = append(dir.Entries, rafs.Dirent{Name: fmt.Sprintf("file%05d", i), Inode: f})
	}
	return nil
}

// PutStatement stores the image statement of img, signed or not.
func (w *World) PutStatement(t testing.TB, img *Image, signed bool) {
	t.Helper()
	payload, err := image.EncodeStatement(image.Statement{
		Source: img.Source, Platform: img.Platform, Config: chunk.Sum(img.Config),
		Bootstrap: chunk.Sum(img.Bootstrap), BootstrapSize: int64(len(img.Bootstrap)), Blob: &img.Blob.ID,
		Tree: chunk.Sum(img.Data), ChunkSize: ChunkSize, Converter: "apitest",
	})
	if err != nil {
		t.Fatal(err)
	}
	w.PutObject(t, image.StatementKey(img.Source, img.Platform), payload)
	if !signed {
		return
	}
	sig, err := signer.Sign(w.Key, image.StatementType, payload).Encode()
	if err != nil {
		t.Fatal(err)
	}
	w.PutObject(t, image.SigKey(img.Source, img.Platform, w.Key.Public().ID()), sig)
}

// SetName moves the name of img to its source.
func (w *World) SetName(t testing.TB, img *Image) {
	t.Helper()
	old, _ := w.Catalog.Name(img.Ref.Repo, img.Ref.Tag)
	serial := old.Serial + 1
	payload, err := image.EncodeNameStatement(image.NameStatement{
		Repo: img.Ref.Repo, Tag: img.Ref.Tag, Source: img.Source, Serial: serial, Issued: time.Unix(1e9, 0).UTC(),
	})
	if err != nil {
		t.Fatal(err)
	}
	env, err := signer.Envelope{
		PayloadType: image.NameStatementType, Payload: payload,
		Signatures: []signer.Signature{signer.Sign(w.Key, image.NameStatementType, payload)},
	}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	err = w.Catalog.SetName(t.Context(), catalog.Name{
		Repo: img.Ref.Repo, Tag: img.Ref.Tag, Source: img.Source, Serial: serial, Statement: env,
	})
	if err != nil {
		t.Fatal(err)
	}
}

// ID returns the image id of a published image.
func (w *World) ID(t testing.TB, img *Image) chunk.Digest {
	t.Helper()
	payload, err := bucket.ReadObject(t.Context(), w.Bucket, image.StatementKey(img.Source, img.Platform), image.MaxStatement)
	if err != nil {
		t.Fatal(err)
	}
	return image.ID(payload)
}

// Record returns an encoded record of a run of a published image.
func (w *World) Record(t testing.TB, img *Image, numbers ...uint32) []byte {
	t.Helper()
	b, err := trace.Record{Image: w.ID(t, img), Source: img.Source, Platform: img.Platform, Numbers: numbers}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return b
}
