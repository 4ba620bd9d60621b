// Package proof reads an image back from its encoded bootstrap, through the
// device that a worker mounts, and says whether it is the tree that was meant.
// The converter asks before it publishes and quarry verify --deep asks later, so
// what is proved is what a worker runs, and not what the encoder believes.
package proof

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"

	"golang.org/x/sync/errgroup"

	"quarry/converter/tree"
	"quarry/internal/rescue"
	"quarry/nbd/blockdev"
	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
)

const (
	// windowBytes is how much of the device is read at once. A chunk takes at
	// least a block of 4 KiB there, so a window has at most 1024: one batch of
	// what a store node answers. A window is in memory three times for a moment,
	// in the store's ranges, the device's chunks and the buffer.
	windowBytes = 4 << 20
	blockSize   = 4096
)

// Config says what to prove.
type Config struct {
	Bootstrap []byte
	// Tree is the digest of the tree that the bootstrap must hold.
	Tree chunk.Digest
	// Chunks gives verified chunks, as it gives them to a worker.
	Chunks store.BatchGetter
	// Read says of which chunks the content is read; nil reads all. It is called
	// once for every distinct chunk of the image, in path order.
	Read func(chunk.Digest) bool
	// Bad is told of every chunk that cannot be had or is not right, never
	// concurrently and without its path, and the proof goes on; Run returns ErrBad
	// then. With nil the first one ends the proof with its *ContentError.
	Bad func(*ContentError)
}

// Result says what was read.
type Result struct {
	Image  *rafs.Image // without its tree
	Chunks int64       // whose content was read
	Bytes  int64       // of them
}

var (
	// ErrTree says that the bootstrap holds another tree.
	ErrTree = errors.New("the bootstrap holds another tree than it should")
	// ErrBad says that content is not right; Config.Bad was told which.
	ErrBad = errors.New("content is missing or not right")
)

// ContentError says which content the device does not give.
type ContentError struct {
	Chunk chunk.Digest
	Path  string // first file that has the chunk; "" for Config.Bad
	Err   error
}

func (e *ContentError) Error() string {
	return fmt.Sprintf("content of %s, chunk %s: %v", e.Path, e.Chunk, e.Err)
}

// Unwrap returns why, the store's error among others.
func (e *ContentError) Unwrap() error { return e.Err }

// Run decodes the bootstrap, compares the digest of its tree, and reads the
// content of the tree's files at the places where the bootstrap puts it. Once the
// tree is proved the result has its image, also with an error. Errors: ErrTree,
// *rafs.FormatError, *ContentError or ErrBad, ctx's.
func Run(ctx context.Context, cfg Config) (Result, error) {
	im, err := rafs.Decode(cfg.Bootstrap)
	if err != nil {
		return Result{}, fmt.Errorf("read the bootstrap back: %w", err)
	}
	if got := tree.Digest(im.Tree); got != cfg.Tree {
		return Result{}, fmt.Errorf("%w: its tree digest is %s, want %s", ErrTree, got, cfg.Tree)
	}
	im.Tree = nil // most of the memory; see firstUser
	dev, err := blockdev.New(blockdev.Config{
		Bootstrap: cfg.Bootstrap, Image: im, Chunks: cfg.Chunks,
		Memory: blockdev.NewMemory(-1), GroupBytes: -1, // every chunk is read once
	})
	if err != nil {
		return Result{}, err
	}
	defer dev.Close() // waits for nothing that this function did not wait for
	p := &prover{cfg: cfg, im: im, dev: dev, res: Result{Image: im}}
	if err := p.bootstrap(ctx); err != nil {
		return Result{}, err
	}
	if im.Blob != nil {
		err = p.content(ctx)
	}
	return p.res, err
}

type prover struct {
	cfg Config
	im  *rafs.Image
	dev *blockdev.Device

	mu  sync.Mutex // guards what follows and calls of Config.Bad
	res Result
	bad bool
}

// bootstrap checks that the device begins with the bootstrap.
func (p *prover) bootstrap(ctx context.Context) error {
	buf := make([]byte, min(windowBytes, len(p.cfg.Bootstrap)))
	for rest := p.cfg.Bootstrap; len(rest) > 0; {
		b := buf[:min(len(buf), len(rest))]
		if err := p.dev.ReadAt(ctx, b, int64(len(p.cfg.Bootstrap)-len(rest))); err != nil {
			return err
		}
		if !bytes.Equal(b, rest[:len(b)]) {
			return fmt.Errorf("%w: the device gives other metadata than was encoded", ErrTree)
		}
		rest = rest[len(b):]
	}
	return nil
}

// window is a run of neighbouring chunks in the device.
type window struct{ first, end int }

// content reads the chunks that are asked for, window by window.
func (p *prover) content(ctx context.Context) error {
	windows := make(chan window)
	g, gctx := errgroup.WithContext(ctx)
	g.Go(rescue.Func(func() error {
		defer close(windows)
		return p.plan(gctx, windows)
	}))
	for range runtime.GOMAXPROCS(0) {
		g.Go(rescue.Func(func() error {
			var buf []byte
			for w := range windows {
				var err error
				if buf, err = p.read(gctx, w, buf); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	if err := g.Wait(); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return err
	}
	if p.bad {
		return ErrBad
	}
	return nil
}

// plan sends the windows in the order of the device.
func (p *prover) plan(ctx context.Context, windows chan<- window) error {
	send := func(w window) error {
		if w.first == w.end {
			return nil
		}
		select {
		case windows <- w:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	chunks := p.im.Blob.Chunks
	var w window
	for i := range chunks {
		if p.cfg.Read != nil && !p.cfg.Read(chunks[i].Digest) {
			continue
		}
		if w.end != i || p.end(i)-chunks[w.first].DevOff > windowBytes {
			if err := send(w); err != nil {
				return err
			}
			w.first = i
		}
		w.end = i + 1
	}
	return send(w)
}

// end is where the blocks of chunk i end in the data device.
func (p *prover) end(i int) int64 {
	c := p.im.Blob.Chunks[i]
	return c.DevOff + (int64(c.Len)+blockSize-1)&^(blockSize-1)
}

// read reads one window and checks it; buf is scratch space and returned for the
// next.
func (p *prover) read(ctx context.Context, w window, buf []byte) ([]byte, error) {
	b := p.im.Blob
	off := b.Chunks[w.first].DevOff
	n := int(p.end(w.end-1) - off)
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	err := p.dev.ReadAt(ctx, buf, b.MappedOff+off)
	switch {
	case ctx.Err() != nil:
		return buf, ctx.Err()
	case err == nil:
		return buf, p.check(w, buf)
	case p.cfg.Bad == nil || w.end-w.first == 1:
		return buf, p.fail(w.first, err)
	}
	for i := w.first; i < w.end; i++ { // to tell the good from the bad
		if _, err := p.read(ctx, window{i, i + 1}, buf); err != nil {
			return buf, err
		}
	}
	return buf, nil
}

// check compares what the device gave of a window with the digests of the tree,
// and the rest of each last block with zeros: that is what a program sees that
// maps a file.
func (p *prover) check(w window, buf []byte) error {
	chunks := p.im.Blob.Chunks
	var total int64
	for i := w.first; i < w.end; i++ {
		c := chunks[i]
		blocks := buf[c.DevOff-chunks[w.first].DevOff : p.end(i)-chunks[w.first].DevOff]
		if got := chunk.Sum(blocks[:c.Len]); got != c.Digest {
			if err := p.fail(i, &store.CorruptError{Want: c.Digest, Got: got}); err != nil {
				return err
			}
		}
		if !bytes.Equal(blocks[c.Len:], zeros[:len(blocks)-int(c.Len)]) {
			if err := p.fail(i, errors.New("bytes other than zeros follow its end")); err != nil {
				return err
			}
		}
		total += int64(c.Len)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.res.Chunks += int64(w.end - w.first)
	p.res.Bytes += total
	return nil
}

var zeros [blockSize]byte

// fail makes the error of chunk i, or of the chunk that a read error is about,
// and returns it unless somebody wants to hear of all of them.
func (p *prover) fail(i int, err error) error {
	e := &ContentError{Chunk: p.im.Blob.Chunks[i].Digest, Err: err}
	var re *blockdev.ReadError
	if errors.As(err, &re) {
		e.Chunk, e.Err = re.Chunk, re.Err
	}
	if p.cfg.Bad == nil {
		e.Path = p.firstUser(e.Chunk)
		return e
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bad = true
	p.cfg.Bad(e)
	return nil
}

var errFound = errors.New("found")

// firstUser returns the first path whose file has the chunk.
func (p *prover) firstUser(d chunk.Digest) string {
	im, err := rafs.Decode(p.cfg.Bootstrap)
	if err != nil {
		return "" // not after it was decoded once
	}
	user := ""
	im.Walk(func(path string, n *rafs.Inode) error { // which returns only errFound
		for _, have := range n.Chunks {
			if have == d {
				user = path
				return errFound
			}
		}
		return nil
	})
	return user
}
