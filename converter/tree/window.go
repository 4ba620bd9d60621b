package tree

import (
	"context"
	"fmt"

	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
)

const (
	// windowBytes bounds the plain bytes of one window; it is at least
	// chunk.MaxSize. There are two windows, so 16 MiB are in memory.
	windowBytes = 8 << 20
	// windowChunks bounds the digests of one request: 32 KiB of them.
	windowChunks = 1024
)

// window is the content of some chunks that follow one another in an archive.
type window struct {
	uses  int // chunks it serves; one that repeats is stored once
	bytes int64
	want  []chunk.Digest
	data  map[chunk.Digest][]byte
	buf   []byte // backs data
}

// chunkReader hands out the chunks of a list of files one after another.
type chunkReader struct {
	chunkSize int64
	src       store.BatchGetter
	free      chan *window // to be filled
	filled    chan *window
	cur       *window // being handed out, nil at first
}

func newChunkReader(chunkSize int64, src store.BatchGetter) *chunkReader {
	r := &chunkReader{chunkSize: chunkSize, src: src, free: make(chan *window, 2), filled: make(chan *window)}
	r.free <- &window{}
	r.free <- &window{}
	return r
}

// next returns the next chunk, which must be d. It is valid until the next call.
func (r *chunkReader) next(ctx context.Context, d chunk.Digest) ([]byte, error) {
	if r.cur != nil && r.cur.uses == 0 {
		r.free <- r.cur
		r.cur = nil
	}
	if r.cur == nil {
		select {
		case r.cur = <-r.filled:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	r.cur.uses--
	return r.cur.data[d], nil
}

// fetch fills windows with the content of files, in order.
func (r *chunkReader) fetch(ctx context.Context, files []*rafs.Inode) error {
	var w *window
	for _, n := range files {
		for k, d := range n.Chunks {
			size := chunk.Len(int64(k), n.Size, r.chunkSize)
			if w != nil && !w.fits(d, size) {
				if err := r.send(ctx, w); err != nil {
					return err
				}
				w = nil
			}
			if w == nil {
				select {
				case w = <-r.free:
					w.reset()
				case <-ctx.Done():
					return ctx.Err()
				}
			}
			w.add(d, size)
		}
	}
	if w == nil {
		return nil
	}
	return r.send(ctx, w)
}

// send fetches what w wants and hands w over.
func (r *chunkReader) send(ctx context.Context, w *window) error {
	err := r.src.GetBatch(ctx, w.want, func(d chunk.Digest, p []byte, err error) error {
		if err != nil {
			return fmt.Errorf("read chunk %s: %w", d, err)
		}
		old, wanted := w.data[d]
		if !wanted || old != nil || len(w.buf)+len(p) > cap(w.buf) {
			return fmt.Errorf("read chunk %s: %d bytes came unasked", d, len(p))
		}
		w.buf = append(w.buf, p...)
		w.data[d] = w.buf[len(w.buf)-len(p):]
		return nil
	})
	if err != nil {
		return err
	}
	for _, d := range w.want {
		if w.data[d] == nil {
			return fmt.Errorf("read chunk %s: the store gave no answer", d)
		}
	}
	select {
	case r.filled <- w:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (w *window) reset() {
	w.uses, w.bytes, w.want, w.buf = 0, 0, w.want[:0], w.buf[:0]
	w.data = map[chunk.Digest][]byte{}
}

// fits reports whether w can also serve a chunk of that size.
func (w *window) fits(d chunk.Digest, size int64) bool {
	_, has := w.data[d]
	return has || w.bytes+size <= windowBytes && len(w.want) < windowChunks
}

func (w *window) add(d chunk.Digest, size int64) {
	w.uses++
	if _, has := w.data[d]; has {
		return
	}
	w.data[d] = nil
	w.want = append(w.want, d)
	w.bytes += size
	if int64(cap(w.buf)) < w.bytes {
		w.buf = make([]byte, 0, min(windowBytes, 2*w.bytes))
	}
}
