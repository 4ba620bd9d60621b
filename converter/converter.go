// Package converter makes an image of an OCI image: layers are read into the
// chunk store, their records merged into a tree, the tree encoded as a
// bootstrap, and the result described in signed statements. It is the one place
// where bytes from outside become bytes that workers trust, so it computes
// every digest it signs.
package converter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"quarry/converter/oci"
	"quarry/converter/tree"
	"quarry/internal/rescue"
	"quarry/rafs"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/packed"
)

// Version stands in image statements. It changes with every change of the code
// that gives one source another bootstrap, and only then.
const Version = "quarry-converter/2"

// Config says where images go and what their making may cost.
type Config struct {
	Store     *packed.Store
	Bucket    bucket.Bucket
	Catalog   *catalog.Catalog
	ChunkSize uint32 // S of the store
	// MACKey authenticates layer records; it never leaves the data folder, so a
	// record from anywhere else counts for nothing.
	MACKey []byte
	// SigningKey signs statements. nil leaves images unsigned for somebody else
	// to sign.
	SigningKey *signer.Key

	// Workers is how many layers are read at once. 0 means one, whose stages
	// keep two cores busy. The image is the same for any number.
	Workers int
	Limits  Limits
	TmpDir  string // for the plain bytes of compressed archives; "" = os.TempDir
	// Progress is told what happens; never concurrently. nil = nobody asks.
	Progress func(Event)
	Now      func() time.Time // nil = time.Now
	Log      *slog.Logger     // nil = discard
}

// Request is one image to convert.
type Request struct {
	Source   string         // as oci.Open takes it
	Name     image.Ref      // repository and tag to move to the image; zero: none
	Platform image.Platform // zero: as oci.Open chooses
	// Credentials are for the registry of a registry:// source.
	Credentials oci.Credentials
	// Content is where the image Digest was pushed to. It is the source then, and
	// Source is what messages call it.
	Content oci.Content
	Digest  chunk.Digest
	// Doubted says that an earlier conversion of the source did not end well.
	// Without a Name nothing else does.
	Doubted bool
}

// Event tells how far one layer is, or Spooled.
type Event struct {
	Layer, Layers int // this one, counted from 1, of all
	Digest        chunk.Digest
	Read, Size    int64 // compressed bytes read so far, of all
	Cached        bool  // nothing need be read: the store knows the layer
	Done          bool  // its chunks are durable
	// Spooled is how many plain bytes there are so far of an archive that is
	// decompressed as a whole, before there are layers; Read and Size are its.
	Spooled int64
}

// Result is what became of a request.
type Result struct {
	Source    chunk.Digest // manifest or image index that was named
	ImageID   chunk.Digest
	Statement image.Statement

	Layers       int   // of the image
	LayersReused int   // of them, how many were known and not read
	Unchanged    bool  // the image was there already, and nothing of it was made anew
	FileBytes    int64 // length of all files, hard links once

	NewChunks      int64 // chunks that the store did not have
	NewPlainBytes  int64 // their length
	NewStoredBytes int64 // their length as stored

	Warnings []string // what was left out or had to be done again
}

// InputError says that the source, not the store, is at fault.
type InputError struct{ Err error }

func (e *InputError) Error() string { return e.Err.Error() }

// Unwrap returns what is wrong with the source.
func (e *InputError) Unwrap() error { return e.Err }

// LayerError says which layer an error is about; its text is the error's.
type LayerError struct {
	Layer chunk.Digest
	Err   error
}

func (e *LayerError) Error() string { return e.Err.Error() }

// Unwrap returns what is wrong with the layer, or with reading it.
func (e *LayerError) Unwrap() error { return e.Err }

// inputError blames the source, unless the caller has gone or a registry or the
// store's own bucket did not answer, which may be another day.
func inputError(ctx context.Context, err error) error {
	if ctx.Err() != nil || errors.Is(err, oci.ErrUnavailable) || errors.Is(err, oci.ErrContent) {
		return err
	}
	return &InputError{err}
}

// Convert makes the image that req names and, when all of it is durable, moves
// the name to it. An error leaves every name where it was; what has been stored
// until then is found again by the next attempt or collected as garbage. The
// same source gives the same image id, whatever the store holds already.
// Errors: *InputError, oci.ErrUnavailable, ctx's, and those of the store.
func Convert(ctx context.Context, cfg Config, req Request) (*Result, error) {
	if req.Content == nil {
		if err := oci.CheckSource(req.Source); err != nil {
			return nil, &InputError{err} // before the source stands in a message or record
		}
	}
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("convert %s: %w", req.Source, err)
	}
	c := &conversion{cfg: cfg.withDefaults(), req: req, doubted: req.Doubted}
	if err := c.convert(ctx); err != nil {
		return nil, fmt.Errorf("convert %s: %w", req.Source, err)
	}
	return &c.result, nil
}

// convert is run with its failure record.
func (c *conversion) convert(ctx context.Context) error {
	err := c.recall(ctx)
	if err == nil {
		err = rescue.Do(func() error { return c.run(ctx) })
	}
	c.end(ctx, err)
	return err
}

func (cfg Config) validate() error {
	if !chunk.ValidSize(int64(cfg.ChunkSize)) {
		return fmt.Errorf("chunk size %d is not a power of two from %d to %d", cfg.ChunkSize, chunk.MinSize, chunk.MaxSize)
	}
	if len(cfg.MACKey) < image.MACKeySize {
		return fmt.Errorf("the key of layer records has %d bytes, want at least %d", len(cfg.MACKey), image.MACKeySize)
	}
	return nil
}

func (cfg Config) withDefaults() Config {
	if cfg.Workers < 1 {
		cfg.Workers = 1
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return cfg
}

// conversion is one call of Convert.
type conversion struct {
	cfg   Config
	req   Request
	image *oci.Image

	doubted bool // an earlier conversion left a failure record of the name

	beginning sync.Mutex // guards begun, and is held while the record is written
	begun     bool       // this one has written a record

	mu     sync.Mutex // guards what follows and calls of Progress while layers are read
	result Result
	fresh  [][]chunk.Digest // the chunks that this conversion stored, of each layer

	recordBytes atomic.Int64 // of the entries of layers that there are so far
}

// run writes in the order of docs/ARCHITECTURE.md, "Order of writes": packs,
// journal and index in Store.Write, then layer records, bootstrap, image
// statement, name statement. Whatever a crash leaves is referred to by nothing.
func (c *conversion) run(ctx context.Context) error {
	im, err := c.open(ctx)
	if err != nil {
		return inputError(ctx, err)
	}
	defer im.Close() // it was only read
	c.image = im
	c.result.Source, c.result.Layers = im.Source, len(im.Layers)

	recs, err := c.layers(ctx)
	if err != nil {
		return err
	}
	if c.doubted || !c.published(ctx) {
		boot, treeDigest, err := c.bootstrap(recs)
		if err != nil {
			return err
		}
		if err := c.publish(ctx, boot, treeDigest); err != nil {
			return err
		}
	}
	c.cfg.Log.InfoContext(ctx, "image converted", "source", im.Source, "image", c.result.ImageID,
		"layers", c.result.Layers, "reused", c.result.LayersReused, "new_stored_bytes", c.result.NewStoredBytes)
	return c.name(ctx)
}

func (c *conversion) open(ctx context.Context) (*oci.Image, error) {
	cfg := oci.Config{
		Platform: c.req.Platform, Credentials: c.req.Credentials, TmpDir: c.cfg.TmpDir, Limits: c.cfg.Limits.Layer,
		Spooled: func(read, size, plain int64) { c.progress(Event{Read: read, Size: size, Spooled: plain}) },
	}
	if c.req.Content != nil {
		return oci.OpenContent(ctx, c.req.Content, c.req.Digest, cfg)
	}
	return oci.Open(ctx, c.req.Source, cfg)
}

// maxWarnings bounds what is kept of them; an image can have one a file.
const maxWarnings = 100

func (c *conversion) warn(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch n := len(c.result.Warnings); {
	case n < maxWarnings:
		c.result.Warnings = append(c.result.Warnings, fmt.Sprintf(format, args...))
	case n == maxWarnings:
		c.result.Warnings = append(c.result.Warnings, "more warnings are left out")
	}
}

// merge applies the layers in order.
func (c *conversion) merge(recs []*image.LayerRecord) (*rafs.Tree, error) {
	m := tree.NewMerger(tree.Config{
		ChunkSize: c.cfg.ChunkSize,
		Limits:    c.cfg.Limits.Tree,
		Warn:      func(w tree.Warning) { c.warn("%s", w) },
	})
	for i, rec := range recs {
		if err := m.Apply(rec.Entries); err != nil {
			err = fmt.Errorf("apply layer %d of %d, %s: %w", i+1, len(recs), rec.Layer, err)
			return nil, &LayerError{rec.Layer, &InputError{err}}
		}
	}
	return m.Tree(), nil
}
