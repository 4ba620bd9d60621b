package packed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/pack"
)

// batchBytes closes a batch that has fewer than lookupBatch chunks: large chunks
// gain nothing from waiting. A Write has Workers+2 batches, each with its plain
// bytes and its frames, so with 256 KiB chunks and two workers they take
// 4 × 2 × 2.25 MiB = 18 MiB.
const batchBytes = 2 << 20

// Stats says what one Write did.
type Stats struct {
	Chunks         int64 // put, repetitions included
	NewChunks      int64 // of them not in the store before
	PlainBytes     int64 // of all chunks put
	NewPlainBytes  int64
	NewStoredBytes int64 // after compression, without the packs' own bytes
	// New are the digests of the new chunks, in the order of the packs.
	New []chunk.Digest
}

// Write implements store.Store. The same puts in the same order make the same
// packs, however many workers there are.
func (s *Store) Write(ctx context.Context, fn func(context.Context, store.Putter) error) error {
	_, err := s.WriteStats(ctx, fn)
	return err
}

// WriteStats is Write, and says what it did.
//
// A chunk goes through four stages: Put hashes it and copies it into a batch;
// workers look batches up and compress what is new; the packer puts batches into
// packs in the order they were filled; the committer makes full packs durable
// while the packer fills the next.
func (s *Store) WriteStats(ctx context.Context, fn func(context.Context, store.Putter) error) (Stats, error) {
	if err := s.writable("write chunks"); err != nil {
		return Stats{}, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stages when fn panics
	g, ctx := errgroup.WithContext(ctx)
	w, err := newWrite(ctx, s)
	if err != nil {
		return Stats{}, err
	}
	for range s.cfg.Workers {
		g.Go(func() error { return each(ctx, w.work, w.prepare) })
	}
	g.Go(func() error { return w.pack(ctx) })
	g.Go(func() error { return each(ctx, w.sealed, w.commit) })

	fnErr := fn(ctx, w)
	if fnErr == nil {
		fnErr = context.Cause(ctx) // fn may not have noticed
	}
	if fnErr != nil {
		cancel() // the open pack is thrown away
	}
	w.finish()
	err = g.Wait()
	if fnErr != nil && (err == nil || errors.Is(err, context.Canceled)) {
		err = fnErr
	}
	if err != nil {
		return Stats{}, err
	}
	st := Stats{w.taken.chunks, w.made.chunks, w.taken.plainBytes, w.made.plainBytes, w.made.storedBytes, w.made.digests}
	s.metrics.wrote(st)
	return st, nil
}

// each calls f for what comes out of ch until it is closed.
func each[T any](ctx context.Context, ch <-chan T, f func(context.Context, T) error) error {
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case v, ok := <-ch:
			if !ok {
				return nil
			}
			if err := f(ctx, v); err != nil {
				return err
			}
		}
	}
}

// batch is consecutive chunks of one Write.
type batch struct {
	plain  []byte        // the chunks, one after another
	frames []byte        // memory for what is compressed of them
	items  []item        // in the order of plain
	ready  chan struct{} // has a token when the items were prepared
}

// item is one chunk of a batch.
type item struct {
	digest chunk.Digest
	off    int // in plain
	size   int
	known  bool // the store has it
	codec  pack.Codec
	stored []byte // when not known; in plain or frames
}

// write is the state of one Write, and its Putter.
type write struct {
	s      *Store
	ctx    context.Context // of the whole Write: it ends when a stage fails
	looks  *looks
	free   chan *batch // batches nobody uses
	work   chan *batch // to the workers
	order  chan *batch // the same batches to the packer
	sealed chan *sealed

	put     sync.Mutex // guards what follows; held while waiting for a free batch
	ended   bool
	filling *batch
	taken   struct{ chunks, plainBytes int64 }

	// made is the packer's alone until it has ended.
	made struct {
		chunks, plainBytes, storedBytes int64
		digests                         []chunk.Digest
	}

	mu sync.Mutex // guards pending, and is never held while waiting
	// pending has the chunks of batches and packs that the index does not know
	// yet: at most the batches and two packs of pack.MaxCount chunks.
	pending map[chunk.Digest]struct{}
}

func newWrite(ctx context.Context, s *Store) (*write, error) {
	l, err := s.newLooks(ctx)
	if err != nil {
		return nil, err
	}
	n := s.cfg.Workers + 2 // one being filled, one for the packer
	w := &write{
		s: s, ctx: ctx, looks: l,
		free: make(chan *batch, n), work: make(chan *batch, n), order: make(chan *batch, n),
		sealed:  make(chan *sealed),
		pending: map[chunk.Digest]struct{}{},
	}
	for range n {
		w.free <- &batch{ready: make(chan struct{}, 1)}
	}
	return w, nil
}

// Put implements store.Putter.
func (w *write) Put(ctx context.Context, p []byte) (chunk.Digest, error) {
	if len(p) == 0 || int64(len(p)) > w.s.cfg.ChunkSize {
		return chunk.Digest{}, fmt.Errorf("put chunk of %d bytes: want 1 to %d", len(p), w.s.cfg.ChunkSize)
	}
	if err := ctx.Err(); err != nil {
		return chunk.Digest{}, err
	}
	d := chunk.Sum(p)
	w.put.Lock()
	defer w.put.Unlock()
	if w.ended {
		return chunk.Digest{}, errors.New("put chunk: its Write has ended")
	}
	if !w.isPending(d) {
		if err := w.add(ctx, d, p); err != nil {
			return chunk.Digest{}, err
		}
	}
	w.taken.chunks++
	w.taken.plainBytes += int64(len(p))
	return d, nil
}

// add copies a chunk into the batch being filled, and waits for one when there
// is none: that is what slows a fast caller down.
func (w *write) add(ctx context.Context, d chunk.Digest, p []byte) error {
	if w.filling == nil {
		select {
		case w.filling = <-w.free:
		case <-ctx.Done():
			return ctx.Err()
		case <-w.ctx.Done():
			return context.Cause(w.ctx)
		}
	}
	b := w.filling
	b.items = append(b.items, item{digest: d, off: len(b.plain), size: len(p)})
	b.plain = append(b.plain, p...)
	w.remember(d)
	if len(b.items) >= lookupBatch || len(b.plain) >= batchBytes {
		w.send()
	}
	return nil
}

// send hands the filled batch to workers and packer. It never waits: the
// channels have room for every batch there is.
func (w *write) send() {
	w.work <- w.filling
	w.order <- w.filling
	w.filling = nil
}

// finish ends the puts.
func (w *write) finish() {
	w.put.Lock()
	defer w.put.Unlock()
	if w.filling != nil {
		w.send()
	}
	w.ended = true
	close(w.work)
	close(w.order)
}

func (w *write) isPending(d chunk.Digest) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, ok := w.pending[d]
	return ok
}

func (w *write) remember(d chunk.Digest) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pending[d] = struct{}{}
}

// forget takes chunks out of pending that the index now knows.
func (w *write) forget(ds []chunk.Digest) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, d := range ds {
		delete(w.pending, d)
	}
}

// prepare looks the chunks of a batch up and compresses the new ones.
func (w *write) prepare(ctx context.Context, b *batch) error {
	ds := make([]chunk.Digest, len(b.items))
	for i := range b.items {
		ds[i] = b.items[i].digest
	}
	known, err := w.s.held(ctx, w.looks, ds)
	if err != nil {
		return err
	}
	b.frames = slices.Grow(b.frames, len(b.plain))
	for i := range b.items {
		it := &b.items[i]
		if it.known = known[i]; it.known {
			continue
		}
		room := b.frames[len(b.frames):]
		it.codec, it.stored = pack.Compress(room, b.plain[it.off:][:it.size])
		if it.codec != pack.Raw && len(it.stored) <= cap(room) {
			b.frames = b.frames[:len(b.frames)+len(it.stored)]
		}
	}
	b.ready <- struct{}{}
	return nil
}
