// Package layer reads one OCI layer: compressed bytes in, chunks into a store
// and a layer record out. It exists so that a layer is read exactly once, as a
// stream, and so that nothing about it is believed that was not computed here.
package layer

import (
	"context"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"

	"quarry/internal/rescue"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
)

// Descriptor says which bytes the layer must have.
type Descriptor struct {
	Digest chunk.Digest // of the compressed bytes
	Size   int64        // length of the compressed bytes
}

// Config configures Read.
type Config struct {
	ChunkSize uint32 // S of the store
	Limits    Limits
	// Charge is told, before every entry is kept, how many bytes of memory it
	// takes; its error ends the reading. nil = nobody counts.
	Charge func(bytes int64) error
	// Progress is told how many compressed bytes have been read so far; it is
	// called from one goroutine at a time. nil = nobody asks.
	Progress func(compressed int64)
}

// Limits bound what a layer may expand to. Zero fields get the defaults.
type Limits struct {
	// MaxBytes bounds the uncompressed layer and, apart from it, the bytes of the
	// chunks that are made of it, which scattered bytes of sparse files can make
	// larger than the layer. Default 256 GiB, four of the largest layers known.
	MaxBytes int64
	// MaxChunks bounds the chunks of all files, those in holes included: those
	// cost nothing but the digest in the layer record, 32 bytes. Default 4 Mi:
	// 128 MiB, half a layer record; at S = 256 KiB files of 1 TiB.
	MaxChunks int64
	// MaxRatio bounds uncompressed ÷ compressed once RatioFloor bytes are out.
	// Default 2000: deflate cannot exceed 1032, and zstd does only for runs.
	MaxRatio int64
	// RatioFloor is the uncompressed length up to which no ratio is refused.
	// Default 16 GiB: a layer with a few large empty disk images is still fine.
	RatioFloor int64
	// MaxEntries bounds the number of tar entries. Default: what a layer record
	// can hold, 2 million.
	MaxEntries int
	// MaxMetadata bounds the bytes of names, link targets and xattrs of all
	// entries, which are held in memory. Default 128 MiB, half a layer record.
	MaxMetadata int64
	// MaxHeader bounds the headers of one entry: long names, PAX records and the
	// map of a sparse file. Default 4 MiB; archive/tar takes 1 MiB of each.
	MaxHeader int64
	// MaxRecords bounds the PAX records of one entry. Default 16384: Linux has
	// 64 KiB for the names of a file's xattrs, the shortest being "user.a".
	MaxRecords int
}

func (l Limits) withDefaults() Limits {
	if l.MaxBytes == 0 {
		l.MaxBytes = 256 << 30
	}
	if l.MaxChunks == 0 {
		l.MaxChunks = image.MaxLayerRecord / 2 / int64(len(chunk.Digest{}))
	}
	if l.MaxRatio == 0 {
		l.MaxRatio = 2000
	}
	if l.RatioFloor == 0 {
		l.RatioFloor = 16 << 30
	}
	if l.MaxEntries == 0 {
		l.MaxEntries = image.MaxEntries
	}
	if l.MaxMetadata == 0 {
		l.MaxMetadata = image.MaxLayerRecord / 2
	}
	if l.MaxHeader == 0 {
		l.MaxHeader = 4 << 20
	}
	if l.MaxRecords == 0 {
		l.MaxRecords = 16 << 10
	}
	return l
}

// Read reads the layer d from r, puts the chunks of its files into p and
// returns its record. Memory grows with what the record holds, which are the
// entries and 32 bytes for each chunk of them, and by the headers of one entry;
// not with the bytes of the layer. Decompression runs beside splitting and hashing.
// On an error the chunks already put are harmless: they are named by content.
// An error is the layer's or r's fault unless it is a *StoreError or ctx's.
func Read(ctx context.Context, r io.Reader, d Descriptor, p store.Putter, cfg Config) (*image.LayerRecord, error) {
	if !chunk.ValidSize(int64(cfg.ChunkSize)) {
		return nil, fmt.Errorf("read layer %s: chunk size %d is not valid", d.Digest, cfg.ChunkSize)
	}
	limits := cfg.Limits.withDefaults()
	src := newSource(r, d, cfg.Progress)
	rec, err := read(ctx, src, p, cfg, limits)
	if !errors.As(err, new(*StoreError)) && ctx.Err() == nil {
		// Damaged bytes show first as a bad gzip or tar. When the layer is not the
		// one it should be, that is the better message.
		if verr := src.verify(); verr != nil {
			err = verr
		}
	}
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("read layer %s: %w", d.Digest, err)
	}
	rec.Layer, rec.Size = d.Digest, d.Size
	return rec, nil
}

func read(ctx context.Context, src *source, p store.Putter, cfg Config, limits Limits) (*image.LayerRecord, error) {
	plain, err := newPlain(src, limits)
	if err != nil {
		return nil, err
	}
	defer plain.Close()
	u := &unpacker{putter: p, chunkSize: int64(cfg.ChunkSize), limits: limits, charge: cfg.Charge, buf: make([]byte, cfg.ChunkSize)}
	if u.charge == nil {
		u.charge = func(int64) error { return nil }
	}

	g, gctx := errgroup.WithContext(ctx)
	ahead := newReadAhead(gctx.Done())
	g.Go(rescue.Func(func() error {
		ahead.fill(plain)
		return nil // the reading side gets the error where it belongs in the stream
	}))
	g.Go(rescue.Func(func() error { return u.run(gctx, ahead) }))
	if err = g.Wait(); err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return nil, err
	}
	return &image.LayerRecord{ChunkSize: cfg.ChunkSize, DiffID: plain.digest(), PlainSize: plain.n, Entries: u.entries}, nil
}
