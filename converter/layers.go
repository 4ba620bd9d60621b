package converter

import (
	"cmp"
	"context"
	"errors"
	"fmt"

	"golang.org/x/sync/errgroup"

	"quarry/converter/layer"
	"quarry/converter/oci"
	"quarry/internal/rescue"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
)

// layers returns the record of every layer, of those that the store knows
// without reading them. A layer that an image has twice is read once.
func (c *conversion) layers(ctx context.Context) ([]*image.LayerRecord, error) {
	recs := make([]*image.LayerRecord, len(c.image.Layers))
	times := map[chunk.Digest]int{}
	for _, l := range c.image.Layers {
		times[l.Digest]++
	}
	first := map[chunk.Digest]int{}
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(c.cfg.Workers)
	for i, l := range c.image.Layers {
		if _, again := first[l.Digest]; again {
			c.reused(i)
			continue
		}
		first[l.Digest] = i
		g.Go(rescue.Func(func() (err error) {
			if recs[i], err = c.layer(gctx, i, c.charge(i, times[l.Digest])); err != nil {
				err = &LayerError{l.Digest, err}
			}
			return err
		}))
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	for i, l := range c.image.Layers {
		recs[i] = recs[first[l.Digest]]
		if err := c.compare(i, recs[i]); err != nil {
			return nil, &LayerError{l.Digest, err}
		}
	}
	return recs, nil
}

// layer returns the record of layer i; charge is told what its entries take in
// memory, while it is read or when it is known.
func (c *conversion) layer(ctx context.Context, i int, charge func(int64) error) (*image.LayerRecord, error) {
	rec, err := c.known(ctx, c.image.Layers[i])
	if err != nil {
		return nil, err
	}
	if rec == nil {
		if err := c.begin(ctx); err != nil {
			return nil, err
		}
		return c.read(ctx, i, charge)
	}
	c.reused(i)
	return rec, charge(recordBytes(rec.Entries))
}

// charge bounds what the records of all layers take in memory together: it
// returns what is told of the entries of layer i before they are made. A layer
// that is listed many times counts as often: merging works through it each time.
func (c *conversion) charge(i, times int) func(bytes int64) error {
	return func(bytes int64) error {
		most := cmp.Or(c.cfg.Limits.RecordBytes, DefaultRecordBytes)
		if bytes > most/int64(times) || c.recordBytes.Add(bytes*int64(times)) > most {
			return &InputError{fmt.Errorf("layer %d of %d, %s: with it the entries of the layers take more than %d bytes (limit RecordBytes)",
				i+1, len(c.image.Layers), c.image.Layers[i].Digest, most)}
		}
		return nil
	}
}

// compare checks what the image says of layer i against what it is. The diffID
// in a config is a claim; here it is proved or refused.
func (c *conversion) compare(i int, rec *image.LayerRecord) error {
	l := c.image.Layers[i]
	if rec.Size != l.Size {
		return &InputError{fmt.Errorf("layer %d of %d, %s, has %d bytes, its descriptor says %d", i+1, len(c.image.Layers), l.Digest, rec.Size, l.Size)}
	}
	if rec.DiffID != l.DiffID {
		return &InputError{fmt.Errorf("layer %d of %d, %s, has the diffID %s, config %s says %s",
			i+1, len(c.image.Layers), l.Digest, rec.DiffID, c.image.ConfigDigest, l.DiffID)}
	}
	return nil
}

// known returns the layer's record when this store made it itself, with this
// chunk size, and still has every chunk it names; else nil. A record that cannot
// be read or verified makes the layer unknown, no more: it is read and recorded
// anew.
func (c *conversion) known(ctx context.Context, l oci.Layer) (*image.LayerRecord, error) {
	b, err := bucket.ReadObject(ctx, c.cfg.Bucket, image.LayerKey(l.Digest), image.MaxLayerRecord)
	if errors.Is(err, bucket.ErrNotFound) {
		return nil, nil
	}
	var rec *image.LayerRecord
	if err == nil {
		rec, err = image.DecodeLayer(b, c.cfg.MACKey)
	}
	if err == nil && rec.Layer != l.Digest {
		err = fmt.Errorf("it is the record of layer %s", rec.Layer)
	}
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		c.warn("the record of layer %s is of no use, so the layer is read again: %v", l.Digest, err)
		return nil, nil
	}
	if rec.ChunkSize != c.cfg.ChunkSize {
		return nil, nil
	}
	live, err := c.cfg.Store.Has(ctx, distinct(rec))
	if err != nil {
		return nil, fmt.Errorf("look up the chunks of layer %s: %w", l.Digest, err)
	}
	for _, ok := range live {
		if !ok {
			return nil, nil
		}
	}
	return rec, nil
}

// distinct returns every chunk of a layer once.
func distinct(rec *image.LayerRecord) []chunk.Digest {
	var ds []chunk.Digest
	seen := chunk.NewNumbers(0, func(n uint32) *chunk.Digest { return &ds[n] })
	for i := range rec.Entries {
		for _, d := range rec.Entries[i].Chunks {
			if _, ok := seen.Find(&d); !ok {
				ds = append(ds, d)
				seen.Add(&d)
			}
		}
	}
	return ds
}

// read reads layer i into the store. Its record is written when its chunks are
// durable and its diffID is the one claimed.
func (c *conversion) read(ctx context.Context, i int, charge func(int64) error) (*image.LayerRecord, error) {
	l := c.image.Layers[i]
	r, err := c.image.LayerReader(ctx, i)
	if err != nil {
		return nil, inputError(ctx, err)
	}
	defer r.Close() // it was only read
	event := Event{Layer: i + 1, Layers: len(c.image.Layers), Digest: l.Digest, Size: l.Size}
	var rec *image.LayerRecord
	stats, err := c.cfg.Store.WriteStats(ctx, func(ctx context.Context, p store.Putter) (err error) {
		rec, err = layer.Read(ctx, r, layer.Descriptor{Digest: l.Digest, Size: l.Size}, p, layer.Config{
			ChunkSize: c.cfg.ChunkSize,
			Limits:    c.cfg.Limits.Layer,
			Charge:    charge,
			Progress:  func(n int64) { event.Read = n; c.progress(event) },
		})
		if err == nil {
			return c.compare(i, rec)
		}
		if errors.As(err, new(*layer.StoreError)) {
			return err
		}
		return inputError(ctx, err)
	})
	if err != nil {
		return nil, err
	}
	b, err := image.EncodeLayer(rec, c.cfg.MACKey)
	if err != nil {
		return nil, err
	}
	if err := c.putObject(ctx, image.LayerKey(l.Digest), b); err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.result.NewChunks += stats.NewChunks
	c.result.NewPlainBytes += stats.NewPlainBytes
	c.result.NewStoredBytes += stats.NewStoredBytes
	c.fresh = append(c.fresh, stats.New)
	c.mu.Unlock()
	event.Done = true
	c.progress(event)
	return rec, nil
}

func (c *conversion) reused(i int) {
	c.mu.Lock()
	c.result.LayersReused++
	c.mu.Unlock()
	l := c.image.Layers[i]
	c.progress(Event{Layer: i + 1, Layers: len(c.image.Layers), Digest: l.Digest, Size: l.Size, Cached: true, Done: true})
}

func (c *conversion) progress(e Event) {
	if c.cfg.Progress == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cfg.Progress(e)
}
