package measure

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	chunkers "github.com/PlakarKorp/go-cdc-chunkers"
	_ "github.com/PlakarKorp/go-cdc-chunkers/chunkers/fastcdc" // the algorithm
	"golang.org/x/sync/errgroup"

	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// pieceSize is what the layer reader hands over at once: the largest chunk
// size, so that every smaller one cuts pieces where it would cut files. Content-
// defined chunks end at pieces too, which costs them at most one more end in
// 8 MiB.
const pieceSize = chunk.MaxSize

// cutter cuts pieces of files in every way that is measured.
type cutter struct {
	sizes  []int64
	fixed  []*chunkSet // for each size
	cdc    []*chunkSet
	pieces map[chunk.Digest]*piece
	bufs   chan *scratch // as many as pieces may be worked on at once
}

// scratch is the memory of one worker.
type scratch struct{ piece, cdc []byte }

// piece is a piece of a file of at most pieceSize bytes.
type piece struct {
	groups uint32           // that it was cut for
	fixed  [][]chunk.Digest // its chunks at each size; nil: it is one chunk
}

func newCutter(sizes []int64, workers int) *cutter {
	c := &cutter{sizes: sizes, pieces: map[chunk.Digest]*piece{}, bufs: make(chan *scratch, workers)}
	for range sizes {
		c.fixed = append(c.fixed, newChunkSet())
		c.cdc = append(c.cdc, newChunkSet())
	}
	for range workers {
		c.bufs <- &scratch{cdc: make([]byte, 4*sizes[len(sizes)-1])}
	}
	return c
}

// putter is a cutter for the pieces of one group's image.
type putter struct {
	*cutter
	group int
	work  *errgroup.Group
}

var _ store.Putter = (*putter)(nil)

// Put takes a piece. A piece that the group has had already changes nothing.
func (p *putter) Put(ctx context.Context, b []byte) (chunk.Digest, error) {
	d := chunk.Sum(b)
	pc := p.pieces[d]
	if pc == nil {
		pc = &piece{fixed: make([][]chunk.Digest, len(p.sizes))}
		p.pieces[d] = pc
	}
	if pc.groups&mask(p.group) == mask(p.group) {
		return d, nil
	}
	pc.groups |= mask(p.group)
	var mem *scratch
	select {
	case mem = <-p.bufs:
	case <-ctx.Done():
		return d, ctx.Err()
	}
	mem.piece = append(mem.piece[:0], b...)
	p.work.Go(func() error {
		defer func() { p.bufs <- mem }()
		return p.cut(d, pc, mem, p.group)
	})
	return d, nil
}

// cut puts the chunks of a piece into all sets. Only one call at a time works on
// a piece.
func (c *cutter) cut(whole chunk.Digest, pc *piece, mem *scratch, group int) error {
	b := mem.piece
	for i, size := range c.sizes {
		if int64(len(b)) <= size {
			c.fixed[i].add(whole, b, group)
			continue
		}
		var ds []chunk.Digest
		for part := range slices.Chunk(b, int(size)) {
			d := chunk.Sum(part)
			c.fixed[i].add(d, part, group)
			ds = append(ds, d)
		}
		pc.fixed[i] = ds
	}
	for i, size := range c.sizes {
		if err := cutByContent(b, size, mem.cdc, func(part []byte) { c.cdc[i].add(chunk.Sum(part), part, group) }); err != nil {
			return err
		}
	}
	return nil
}

// cutByContent calls fn for each content-defined chunk: FastCDC with a quarter
// of the average as the least and four times it as the most, as backup programs
// set it. buf is scratch memory of at least the most.
func cutByContent(b []byte, average int64, buf []byte, fn func([]byte)) error {
	opts := &chunkers.ChunkerOpts{MinSize: int(average / 4), NormalSize: int(average), MaxSize: int(average * 4)}
	if len(b) <= opts.MinSize {
		fn(b)
		return nil
	}
	c, err := chunkers.NewChunkerBuffer("fastcdc-v1.0.0", bytes.NewReader(b), opts, buf)
	if err != nil {
		return fmt.Errorf("content-defined chunks of %d bytes: %w", average, err)
	}
	for {
		part, err := c.Next()
		if err != nil && !errors.Is(err, io.EOF) {
			return fmt.Errorf("content-defined chunks of %d bytes: %w", average, err)
		}
		if len(part) > 0 {
			fn(part)
		}
		if err != nil {
			return nil
		}
	}
}

// chunkSet is the distinct chunks that one way of cutting makes.
type chunkSet struct {
	mu     sync.Mutex // guards the map and the groups of its values
	chunks map[chunk.Digest]*stored
}

// stored is a chunk as a pack holds it. Its lengths are set by whoever added it.
type stored struct {
	len, stored uint32
	codec       pack.Codec
	groups      uint32
}

func newChunkSet() *chunkSet { return &chunkSet{chunks: map[chunk.Digest]*stored{}} }

// add adds a chunk to the corpus and a group, and compresses it the first time.
func (s *chunkSet) add(d chunk.Digest, p []byte, group int) {
	s.mu.Lock()
	c, known := s.chunks[d]
	if !known {
		c = &stored{len: uint32(len(p))}
		s.chunks[d] = c
	}
	c.groups |= mask(group)
	s.mu.Unlock()
	if !known {
		codec, frame := pack.Compress(nil, p)
		c.codec, c.stored = codec, uint32(len(frame))
	}
}

// entries returns the chunks of a group in the order of their digests, without
// places in packs.
func (s *chunkSet) entries(group int) []pack.Entry {
	var list []pack.Entry
	for d, c := range s.chunks {
		if c.groups&(1<<group) != 0 {
			list = append(list, pack.Entry{Digest: d, Stored: c.stored, Len: c.len, Codec: c.codec})
		}
	}
	slices.SortFunc(list, func(a, b pack.Entry) int { return bytes.Compare(a.Digest[:], b.Digest[:]) })
	return list
}
