package reader

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/nbd"
	"quarry/rafs"
	"quarry/store"
	"quarry/store/cache"
	"quarry/store/chunk"
)

const (
	// pullBatch is in chunks: 8 MiB of 256 KiB, which hides a round trip of 50 ms at
	// 1 Gbit/s, where it takes 64 ms.
	pullBatch = 32
	// pullParallel batches are under way at once, with at most 32 MiB of plain bytes:
	// enough to keep one link and one disk busy, and few beside what reads ask for.
	pullParallel = 4
	// maxPulls are under way at once; others wait. Each holds pullParallel batches.
	maxPulls = 2
	// pullTick is how often a pull tells how far it is.
	pullTick = 200 * time.Millisecond
)

// PullProgress says how far a pull is.
type PullProgress struct {
	Done   Count `json:"done"` // of All: in the cache
	Failed int64 `json:"failed"`
	All    Count `json:"all"`
}

// PullResult says what a pull did. All is what the image has; each chunk of it
// was in the cache before, was fetched, or failed.
type PullResult struct {
	All     Count                   `json:"all"`
	Cached  Count                   `json:"cached"` // and found good
	Fetched Count                   `json:"fetched"`
	Failed  map[store.Outcome]int64 `json:"failed_by_outcome"`
	Errors  []ReadError             `json:"errors"` // the last 64
	Pinned  bool                    `json:"pinned"` // by this pull or before
	// Kept is what of All is in the cache at the end: less than was cached and
	// fetched when the cache, beside what is pinned in it, is too small.
	Kept Count `json:"kept"`
	// Limit is the cache's, and OthersPinned how many other images are pinned in it.
	Limit        int64 `json:"limit_bytes"`
	OthersPinned int64 `json:"other_images_pinned"`
	// Stopped says why the rest was not tried.
	Stopped string `json:"stopped,omitempty"`
}

// FailedChunks is how many chunks could not be had.
func (r PullResult) FailedChunks() (n int64) {
	for _, k := range r.Failed {
		n += k
	}
	return n
}

// pullLine is one line of the answer to a pull: progress, or the result, with
// which it ends.
type pullLine struct {
	Progress *PullProgress `json:"progress,omitempty"`
	Result   *PullResult   `json:"result,omitempty"`
}

// servePull answers POST /images/{id}/pull[?pin=true]: all chunks of the image
// are brought into the disk cache. It answers in lines, as long as it takes; an
// error before that is one of the image or of the pin.
func (r *reader) servePull(w http.ResponseWriter, q *http.Request) {
	id, err := chunk.ParseHex(q.PathValue("id"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	r.connState(1) // it keeps the reader, as a connection does
	defer r.connState(-1)
	select {
	case r.pulls <- struct{}{}:
		defer func() { <-r.pulls }()
	case <-q.Context().Done():
		return
	}
	p, err := r.newPull(q.Context(), id, q.FormValue("pin") == "true")
	if err != nil {
		http.Error(w, err.Error(), pullStatus(err))
		return
	}
	defer p.used.Close()
	defer p.release()
	w.Header().Set("Content-Type", "application/x-ndjson")
	ctx, cancel := context.WithCancel(q.Context())
	defer cancel()
	ended := make(chan struct{})
	go func() { // waited for below
		defer close(ended)
		p.run(ctx)
	}()
	tick := time.NewTicker(pullTick)
	defer tick.Stop()
	for under := true; under; {
		select {
		case <-ended:
			under = false
		case <-tick.C:
		}
		now := p.progress()
		if sayLine(w, pullLine{Progress: &now}) != nil {
			cancel() // nobody listens; what is cached stays
		}
	}
	res := p.end()
	sayLine(w, pullLine{Result: &res})
}

func sayLine(w http.ResponseWriter, l pullLine) error {
	return errors.Join(json.NewEncoder(w).Encode(l), http.NewResponseController(w).Flush())
}

func pullStatus(err error) int {
	switch {
	case errors.Is(err, nbd.ErrUnknownExport), errors.Is(err, fs.ErrNotExist):
		return http.StatusNotFound
	case errors.As(err, new(*cache.PinLimitError)), errors.Is(err, errNoRoom), errors.Is(err, errNoDisk):
		return http.StatusConflict
	}
	return http.StatusInternalServerError
}

// pull is one pull under way.
type pull struct {
	disk   disk
	used   *usedImage
	id     chunk.Digest
	image  *rafs.Image
	log    *slog.Logger
	failed failures
	bad    atomic.Int64 // copies that the cache had
	// release ends the protection of the image's chunks in the cache.
	release func()

	mu     sync.Mutex // guards result
	result PullResult
}

// errNoRoom says that an image does not fit the disk cache as a whole.
var errNoRoom = errors.New("the disk cache is too small")

// newPull opens the image, and pins it when that is wanted: first of all, so that
// nothing is fetched that could not stay.
func (r *reader) newPull(ctx context.Context, id chunk.Digest, pin bool) (_ *pull, err error) {
	if err := r.disk.need(); err != nil {
		return nil, err
	}
	local, err := r.cfg.Dir.Load(id)
	if err != nil {
		return nil, err
	}
	p := &pull{disk: r.disk, id: id, image: local.RAFS, log: r.cfg.Log}
	var list []cache.Chunk
	if b := local.RAFS.Blob; b != nil {
		for _, c := range b.Chunks {
			p.result.All.add(int64(c.Len))
			list = append(list, cache.Chunk{Digest: c.Digest, Len: c.Len})
		}
	}
	if limit := r.disk.Stats().Limit; p.result.All.Bytes > limit {
		return nil, fmt.Errorf("%w: image %s has %d bytes, the cache takes %d; choose a larger --cache-size", errNoRoom, id, p.result.All.Bytes, limit)
	}
	if p.used, err = r.openImage(ctx, id); err != nil {
		return nil, err
	}
	if pin {
		if err := r.disk.Pin(id, list); err != nil {
			return nil, errors.Join(err, p.used.Close())
		}
	}
	p.release = r.disk.Protect(list) // else the pull would evict its own before it is done
	p.result.Pinned = slices.ContainsFunc(r.disk.Pinned(), func(i cache.Pinned) bool { return i.Image == id })
	return p, nil
}

func (c *Count) add(bytes int64) {
	c.Chunks++
	c.Bytes += bytes
}

// run brings in all chunks, in their order, until that is done or of no use.
func (p *pull) run(ctx context.Context) {
	if p.image.Blob == nil {
		return
	}
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(pullParallel)
	for batch := range slices.Chunk(p.image.Blob.Chunks, pullBatch) {
		if ctx.Err() != nil {
			break
		}
		g.Go(func() error { return p.batch(ctx, batch) })
	}
	if err := g.Wait(); err != nil {
		p.mu.Lock()
		defer p.mu.Unlock()
		p.result.Stopped = err.Error()
	}
}

// batch fetches what the cache has not. An error says that to go on is of no use.
func (p *pull) batch(ctx context.Context, chunks []rafs.Chunk) error {
	missing := map[chunk.Digest]rafs.Chunk{}
	var ask []chunk.Digest
	for _, c := range chunks {
		if p.isCached(c) {
			p.note(&p.result.Cached, c)
			continue
		}
		missing[c.Digest] = c
		ask = append(ask, c.Digest)
	}
	if len(ask) == 0 {
		return ctx.Err()
	}
	err := p.used.src.GetBatch(ctx, ask, func(d chunk.Digest, plain []byte, err error) error {
		c, ok := missing[d]
		if !ok {
			return nil
		}
		delete(missing, d)
		if err == nil && len(plain) != int(c.Len) {
			err = fmt.Errorf("store gave %d bytes, the bootstrap says %d", len(plain), c.Len)
		}
		if err == nil {
			err = p.disk.Put(ctx, d, slices.Clone(plain))
		}
		if err == nil {
			p.note(&p.result.Fetched, c)
			p.used.pulledChunks.Add(1)
			p.used.pulledBytes.Add(int64(c.Len))
			return nil
		}
		p.fail(ctx, c, err)
		if errors.Is(err, store.ErrLocalDisk) {
			return err
		}
		return nil
	})
	if ctx.Err() != nil || errors.Is(err, store.ErrLocalDisk) {
		return err
	}
	if err == nil {
		err = errors.New("store gave no answer")
	}
	for _, c := range missing {
		p.fail(ctx, c, err)
	}
	return nil
}

// isCached reports whether the cache has a good copy; a bad one is dropped.
func (p *pull) isCached(c rafs.Chunk) bool {
	if !p.disk.Has(c.Digest) {
		return false
	}
	plain := make([]byte, c.Len)
	if err := p.disk.ReadAt(c.Digest, plain, 0); err != nil {
		if errors.Is(err, store.ErrLocalDisk) {
			p.used.pullDiskFailed.Add(1)
		}
		return false
	}
	if chunk.Sum(plain) != c.Digest {
		p.used.pulledBad.Add(1)
		if n := p.bad.Add(1); n <= maxReadErrors {
			p.log.Warn("cache disk has wrong bytes", "image_id", p.id, "chunk", c.Digest, "outcome", store.Corrupt)
		}
		p.disk.Drop(c.Digest)
		return false
	}
	return true
}

func (p *pull) note(n *Count, c rafs.Chunk) {
	p.mu.Lock()
	defer p.mu.Unlock()
	n.add(int64(c.Len))
}

func (p *pull) fail(ctx context.Context, c rafs.Chunk, err error) {
	if ctx.Err() != nil {
		return // the pull was given up, not the chunk
	}
	number := slices.IndexFunc(p.image.Blob.Chunks, func(k rafs.Chunk) bool { return k.Digest == c.Digest })
	e := ReadError{Path: p.used.Path(number), Chunk: c.Digest, Outcome: store.OutcomeOf(err), Err: err.Error(), When: time.Now()}
	if p.failed.note(e) <= maxReadErrors { // end tells of the others: a log does not grow by what is asked of a reader
		p.log.WarnContext(ctx, "chunk cannot be pulled", "image_id", p.id, "chunk", c.Digest, "path", e.Path, "outcome", e.Outcome, "err", err)
	}
}

func (p *pull) progress() PullProgress {
	var st Stats
	p.failed.fill(&st)
	p.mu.Lock()
	defer p.mu.Unlock()
	done := p.result.Cached
	done.Chunks += p.result.Fetched.Chunks
	done.Bytes += p.result.Fetched.Bytes
	return PullProgress{Done: done, Failed: st.FailedReads, All: p.result.All}
}

func (p *pull) end() PullResult {
	var st Stats
	p.failed.fill(&st)
	p.mu.Lock()
	defer p.mu.Unlock()
	st = st.WithLists()
	p.result.Failed, p.result.Errors = st.Failed, st.Errors
	p.result.Limit = p.disk.Stats().Limit
	for _, other := range p.disk.Pinned() {
		if other.Image != p.id {
			p.result.OthersPinned++
		}
	}
	if more := p.bad.Load() - maxReadErrors; more > 0 {
		p.log.Warn("cache disk has more wrong bytes", "image_id", p.id, "chunks", more)
	}
	if more := st.FailedReads - maxReadErrors; more > 0 {
		p.log.Warn("more chunks cannot be pulled", "image_id", p.id, "chunks", more)
	}
	if p.image.Blob != nil {
		for _, c := range p.image.Blob.Chunks {
			if p.disk.Has(c.Digest) {
				p.result.Kept.add(int64(c.Len))
			}
		}
	}
	return p.result
}

// serveUnpin answers DELETE /images/{id}/pin.
func (r *reader) serveUnpin(w http.ResponseWriter, q *http.Request) {
	id, err := chunk.ParseHex(q.PathValue("id"))
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	if err = r.disk.need(); err == nil {
		err = r.disk.Unpin(id)
	}
	if err != nil {
		http.Error(w, err.Error(), pullStatus(err))
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
