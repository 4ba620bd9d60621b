package measure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"

	"quarry/api"
	"quarry/converter/layer"
	"quarry/converter/oci"
	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

// readImage reads the layers of an image and adds it to the sums.
func (c *Corpus) readImage(ctx context.Context, im Image, g int) error {
	recs, err := c.cutLayers(ctx, im, g)
	if err != nil {
		return err
	}
	groups := []*Group{&c.sums[0], &c.sums[g]}
	for _, sum := range groups {
		sum.Images++
		sum.Layers += len(recs)
		sum.Fixed = slices.Grow(sum.Fixed, len(c.cfg.Sizes))[:len(c.cfg.Sizes)]
	}
	for _, rec := range recs {
		c.layers.add(rec.Layer, rec.Size, g)
		c.diffs.add(rec.DiffID, rec.PlainSize, g)
		for _, sum := range groups {
			sum.GzipBytes += rec.Size
		}
		for i := range rec.Entries {
			c.addFile(&rec.Entries[i], g, groups)
		}
	}
	for i, size := range c.cfg.Sizes {
		t, err := c.cutter.tree(recs, i, size)
		if err != nil {
			return err
		}
		b, err := rafs.Encode(t)
		if err != nil {
			return err
		}
		wire := len(bootstrapEncoder().EncodeAll(b, nil))
		for _, sum := range groups {
			sum.Fixed[i].BootstrapBytes += int64(len(b))
			sum.Fixed[i].BootstrapZstd += int64(wire)
			if i == 0 {
				sum.ImageBytes += fileBytes(t)
			}
		}
	}
	return c.coldStarts(ctx, im, recs)
}

// bootstrapEncoder is as the server sends bootstraps.
var bootstrapEncoder = sync.OnceValue(func() *zstd.Encoder {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithWindowSize(api.BootstrapWindow))
	if err != nil {
		panic(err) // only options out of range
	}
	return e
})

// cutLayers reads every layer with the production reader, in pieces.
func (c *Corpus) cutLayers(ctx context.Context, im Image, g int) (recs []*image.LayerRecord, err error) {
	src, err := oci.Open(ctx, "oci:"+im.Layout, oci.Config{})
	if err != nil {
		return nil, err
	}
	defer src.Close()
	for i, l := range src.Layers {
		rec, err := c.cutLayer(ctx, src, i, g)
		if err != nil {
			return nil, err
		}
		if rec.DiffID != l.DiffID {
			return nil, fmt.Errorf("layer %s has the diffID %s, its config says %s", l.Digest, rec.DiffID, l.DiffID)
		}
		recs = append(recs, rec)
	}
	return recs, nil
}

func (c *Corpus) cutLayer(ctx context.Context, src *oci.Image, i, g int) (*image.LayerRecord, error) {
	r, err := src.LayerReader(ctx, i)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	work, ctx := errgroup.WithContext(ctx)
	p := &putter{cutter: c.cutter, group: g, work: work}
	l := src.Layers[i]
	rec, err := layer.Read(ctx, r, layer.Descriptor{Digest: l.Digest, Size: l.Size}, p, layer.Config{ChunkSize: pieceSize})
	return rec, errors.Join(err, work.Wait())
}

// addFile counts a file of a layer. Its pieces name its content.
func (c *Corpus) addFile(e *image.Entry, g int, groups []*Group) {
	if e.Type != image.TypeReg {
		return
	}
	for _, sum := range groups {
		sum.Files++
		sum.RawBytes += e.Size
	}
	if e.Size == 0 {
		return
	}
	content := e.Chunks[0]
	if len(e.Chunks) > 1 {
		var all []byte
		for _, d := range e.Chunks {
			all = append(all, d[:]...)
		}
		content = chunk.Sum(all)
	}
	c.files.add(content, e.Size, g)
}

// tree merges layers whose files are cut in chunks of size number i.
func (c *cutter) tree(recs []*image.LayerRecord, i int, size int64) (*rafs.Tree, error) {
	m := tree.NewMerger(tree.Config{ChunkSize: uint32(size)})
	for _, rec := range recs {
		entries := slices.Clone(rec.Entries)
		for k := range entries {
			ds, err := c.chunks(entries[k].Chunks, i)
			if err != nil {
				return nil, fmt.Errorf("entry %q: %w", entries[k].Name, err)
			}
			entries[k].Chunks = ds
		}
		if err := m.Apply(entries); err != nil {
			return nil, err
		}
	}
	return m.Tree(), nil
}

// chunks returns the chunks of size number i that pieces consist of.
func (c *cutter) chunks(pieces []chunk.Digest, i int) ([]chunk.Digest, error) {
	var ds []chunk.Digest
	for _, d := range pieces {
		switch pc := c.pieces[d]; {
		case pc == nil:
			return nil, fmt.Errorf("piece %s was never read", d)
		case pc.fixed[i] != nil:
			ds = append(ds, pc.fixed[i]...)
		default:
			ds = append(ds, d)
		}
	}
	return ds, nil
}

// fileBytes is the length of all files of a tree, hard links once.
func fileBytes(t *rafs.Tree) (n int64) {
	done := map[*rafs.Inode]bool{}
	t.Walk(func(_ string, in *rafs.Inode) error { // without an error there is none
		if in.IsRegular() && !done[in] {
			done[in] = true
			n += in.Size
		}
		return nil
	})
	return n
}
