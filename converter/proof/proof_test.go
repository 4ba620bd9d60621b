package proof_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"quarry/converter/proof"
	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
)

const chunkSize = 16 << 10

// chunks is a store.BatchGetter over a map that verifies nothing, so that a test
// can make it lie.
type chunks map[chunk.Digest][]byte

func (c chunks) GetBatch(_ context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	for _, d := range ds {
		p, ok := c[d]
		var err error
		if !ok {
			err = store.ErrNotFound
		}
		if err := fn(d, p, err); err != nil {
			return err
		}
	}
	return nil
}

// image returns a proof of n files of many lengths, 40 KiB on average.
func image(t *testing.T, n int) (proof.Config, chunks, *rafs.Image) {
	t.Helper()
	c := chunks{}
	rnd := rand.NewChaCha8([32]byte{1})
	dir := &rafs.Inode{Mode: rafs.ModeDir | 0o755}
	for i := range n {
		p := make([]byte, 1+i*977%(5*chunkSize))
		rnd.Read(p)
		f := &rafs.Inode{Mode: rafs.ModeRegular | 0o644, Size: int64(len(p))}
		for part := range slices.Chunk(p, chunkSize) {
			d := chunk.Sum(part)
			c[d] = bytes.Clone(part)
			f.Chunks = append(f.Chunks, d)
		}
		dir.Entries = append(dir.Entries, rafs.Dirent{Name: fmt.Sprintf("f%05d", i), Inode: f})
	}
	tr := &rafs.Tree{ChunkSize: chunkSize, Root: dir}
	boot, err := rafs.Encode(tr)
	if err != nil {
		t.Fatal(err)
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		t.Fatal(err)
	}
	return proof.Config{Bootstrap: boot, Tree: tree.Digest(tr), Chunks: c}, c, im
}

func TestAGoodImageIsProved(t *testing.T) {
	for _, n := range []int{0, 1, 400} {
		cfg, _, im := image(t, n)
		res, err := proof.Run(t.Context(), cfg)
		if err != nil {
			t.Fatal(err)
		}
		var want, size int64
		if im.Blob != nil {
			want, size = int64(len(im.Blob.Chunks)), im.Blob.DataSize()
		}
		if res.Chunks != want || res.Bytes != size || res.Image.Size != im.Size {
			t.Errorf("read %d chunks of %d bytes, want %d of %d", res.Chunks, res.Bytes, want, size)
		}
	}
}

func TestOnlyWhatIsAskedForIsRead(t *testing.T) {
	cfg, c, im := image(t, 100)
	var asked []chunk.Digest
	cfg.Read = func(d chunk.Digest) bool {
		asked = append(asked, d)
		return len(asked)%3 == 0
	}
	for i, ch := range im.Blob.Chunks { // the others are not even there
		if (i+1)%3 != 0 {
			delete(c, ch.Digest)
		}
	}
	res, err := proof.Run(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if len(asked) != len(im.Blob.Chunks) || res.Chunks != int64(len(asked)/3) {
		t.Errorf("asked for %d and read %d of %d chunks", len(asked), res.Chunks, len(im.Blob.Chunks))
	}
}

func TestAnotherTreeIsRefused(t *testing.T) {
	cfg, _, _ := image(t, 3)
	other, _, _ := image(t, 4)
	cfg.Tree = other.Tree
	if _, err := proof.Run(t.Context(), cfg); !errors.Is(err, proof.ErrTree) {
		t.Errorf("got %v, want ErrTree", err)
	}
	cfg.Bootstrap = cfg.Bootstrap[:len(cfg.Bootstrap)-1]
	if _, err := proof.Run(t.Context(), cfg); !errors.As(err, new(*rafs.FormatError)) {
		t.Errorf("got %v, want a FormatError", err)
	}
}

func TestWrongContentIsFound(t *testing.T) {
	for name, spoil := range map[string]func(c chunks, d, next chunk.Digest){
		"missing":            func(c chunks, d, _ chunk.Digest) { delete(c, d) },
		"a flipped byte":     func(c chunks, d, _ chunk.Digest) { c[d][0] ^= 1 },
		"another's":          func(c chunks, d, next chunk.Digest) { c[d] = c[next] },
		"shorter than it is": func(c chunks, d, _ chunk.Digest) { c[d] = c[d][1:] },
	} {
		t.Run(name, func(t *testing.T) {
			cfg, c, im := image(t, 300)
			bad := []int{0, 100, len(im.Blob.Chunks) - 1}
			want := map[chunk.Digest]bool{}
			for _, i := range bad {
				d := im.Blob.Chunks[i].Digest
				want[d] = true
				spoil(c, d, im.Blob.Chunks[(i+1)%len(im.Blob.Chunks)].Digest)
			}
			_, err := proof.Run(t.Context(), cfg)
			var ce *proof.ContentError
			if !errors.As(err, &ce) || !want[ce.Chunk] || !has(im, ce.Path, ce.Chunk) {
				t.Errorf("got %v, want a ContentError of one of the three", err)
			}
			got := map[chunk.Digest]bool{}
			cfg.Bad = func(e *proof.ContentError) { got[e.Chunk] = true }
			res, err := proof.Run(t.Context(), cfg)
			if !errors.Is(err, proof.ErrBad) || !maps.Equal(got, want) {
				t.Errorf("error %v with %v, want ErrBad with %v", err, got, want)
			}
			if res.Image == nil {
				t.Error("no image in the result")
			}
		})
	}
}

// has reports whether the file at path has the chunk.
func has(im *rafs.Image, path string, d chunk.Digest) bool {
	found := false
	im.Walk(func(p string, n *rafs.Inode) error {
		found = found || p == path && slices.Contains(n.Chunks, d)
		return nil
	})
	return found
}

func TestCancelEndsTheProof(t *testing.T) {
	cfg, c, _ := image(t, 300)
	ctx, cancel := context.WithCancel(t.Context())
	cfg.Chunks = getter(func(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
		cancel()
		return c.GetBatch(ctx, ds, fn)
	})
	if _, err := proof.Run(ctx, cfg); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v, want canceled", err)
	}
}

type getter func(context.Context, []chunk.Digest, func(chunk.Digest, []byte, error) error) error

func (g getter) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	return g(ctx, ds, fn)
}
