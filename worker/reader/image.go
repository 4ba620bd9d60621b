package reader

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"

	"quarry/nbd"
	"quarry/nbd/blockdev"
	"quarry/store/chunk"

	"golang.org/x/sync/errgroup"
)

// openImage is one image that is served. It is in the reader's map from the
// moment it is being loaded, so that loading holds up nobody else.
type openImage struct {
	number int           // of all images this reader has opened
	users  int           // connections; guarded by the reader's mu
	ready  chan struct{} // closed when the fields below are set
	err    error
	*blockdev.Device
	src ChunkSource

	mu     sync.Mutex // guards errors and failed
	errors []ReadError
	failed int64
}

// export opens an image by id. The folder's copy is verified against the id, so
// a reader started after a crash serves the same bytes or nothing.
func (r *reader) export(ctx context.Context, name string) (nbd.Device, error) {
	id, err := chunk.ParseHex(name)
	if err != nil {
		return nil, fmt.Errorf("export %q: the name must be an image id: %w", name, nbd.ErrUnknownExport)
	}
	im, first := r.use(id)
	if first {
		im.err = r.load(im, id)
		close(im.ready)
	}
	select {
	case <-im.ready:
	case <-ctx.Done():
		r.leave(id, im)
		return nil, ctx.Err()
	}
	if im.err != nil {
		r.leave(id, im)
		return nil, fmt.Errorf("export %q: %w", name, im.err)
	}
	select {
	case r.opened <- struct{}{}:
	default: // watch is about to look anyway
	}
	return &usedImage{openImage: im, r: r, id: id}, nil
}

// use counts a user of an image and reports whether it must load it.
func (r *reader) use(id chunk.Digest) (im *openImage, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	im, ok := r.open[id]
	if !ok {
		r.count++
		im = &openImage{number: r.count, ready: make(chan struct{})}
		r.open[id] = im
	}
	im.users++
	return im, !ok
}

// leave takes a user away; the image is closed with its last one.
func (r *reader) leave(id chunk.Digest, im *openImage) {
	r.mu.Lock()
	im.users--
	last := im.users == 0
	if last {
		delete(r.open, id)
	}
	r.mu.Unlock()
	if last {
		r.close(id, im)
	}
}

func (r *reader) load(im *openImage, id chunk.Digest) error {
	local, err := r.cfg.Dir.Load(id)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("no such image on this worker: %w", nbd.ErrUnknownExport)
	}
	if err != nil {
		return err
	}
	origin, err := r.cfg.Dir.Origin(id)
	if err != nil {
		return err
	}
	src, err := r.cfg.Open(origin)
	if err != nil {
		return err
	}
	im.src = src
	im.Device, err = blockdev.New(blockdev.Config{
		Bootstrap: local.Bootstrap, Image: local.RAFS, Chunks: src, Cache: r.cache,
		Log: r.cfg.Log.With("image_id", id), OnError: im.readFailed,
	})
	return err
}

func (r *reader) close(id chunk.Digest, im *openImage) {
	<-im.ready
	if im.Device != nil {
		im.Device.Close()
	}
	if im.src == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaseCall)
	defer cancel()
	if err := im.src.EndLease(ctx, im.lease(id)); err != nil {
		r.cfg.Log.WarnContext(ctx, "lease not ended", "image_id", id, "err", err)
	}
	im.src.Close()
}

// usedImage is an open image as one connection has it; the server closes it when
// the connection has ended.
type usedImage struct {
	*openImage
	r  *reader
	id chunk.Digest
}

// Close implements io.Closer.
func (u *usedImage) Close() error {
	u.r.leave(u.id, u.openImage)
	return nil
}

func (r *reader) renewLeases(ctx context.Context) {
	r.mu.Lock()
	images := maps.Clone(r.open)
	r.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, leaseCall)
	defer cancel()
	var g errgroup.Group
	for id, im := range images {
		g.Go(func() error {
			select {
			case <-im.ready:
			case <-ctx.Done():
				return nil
			}
			if im.err != nil {
				return nil
			}
			if err := im.src.KeepAlive(ctx, im.lease(id), id, leaseTTL); err != nil {
				r.cfg.Log.WarnContext(ctx, "lease not renewed", "image_id", id, "err", err)
			}
			return nil
		})
	}
	g.Wait()
}

// lease names this opening of the image: one that ends must not end the lease of
// the next.
func (im *openImage) lease(id chunk.Digest) string {
	return fmt.Sprintf("reader-%d-%d-%s", os.Getpid(), im.number, id.Hex()[:16])
}

// ReadError is one read of an image that was answered with EIO.
type ReadError struct {
	Path  string       `json:"path"` // a file that uses the chunk
	Chunk chunk.Digest `json:"chunk"`
	Err   string       `json:"error"`
}

// loaded reports whether the image is there to be asked.
func (im *openImage) loaded() bool {
	select {
	case <-im.ready:
		return im.err == nil
	default:
		return false
	}
}

func (im *openImage) readFailed(e *blockdev.ReadError) {
	im.mu.Lock()
	defer im.mu.Unlock()
	im.failed++
	if len(im.errors) < maxReadErrors {
		im.errors = append(im.errors, ReadError{Path: e.Path, Chunk: e.Chunk, Err: e.Err.Error()})
	}
}

// Stats counts what one image cost since the reader opened it. All sizes
// are in bytes.
type Stats struct {
	Opening     string      `json:"opening"` // names the reader and its opening of the image
	Requests    int64       `json:"requests"`
	WireBytes   int64       `json:"wire_bytes"`
	ChunkBytes  int64       `json:"chunk_plain_bytes"`
	DeviceBytes int64       `json:"device_bytes"`
	FailedReads int64       `json:"failed_reads"`
	Errors      []ReadError `json:"errors,omitempty"` // the first 64
}

func (im *openImage) stats() Stats {
	requests, wire := im.src.Traffic()
	d := im.Device.Stats()
	im.mu.Lock()
	defer im.mu.Unlock()
	return Stats{
		Opening:  fmt.Sprintf("%d-%d", os.Getpid(), im.number),
		Requests: requests, WireBytes: wire, ChunkBytes: d.ChunkBytes, DeviceBytes: d.ReadBytes,
		FailedReads: im.failed, Errors: append([]ReadError(nil), im.errors...),
	}
}

// Since subtracts an earlier reading. With several sandboxes of one image at
// once the traffic of all of them is in it: they share the mount.
func (a Stats) Since(b Stats) Stats {
	a.Requests -= b.Requests
	a.WireBytes -= b.WireBytes
	a.ChunkBytes -= b.ChunkBytes
	a.DeviceBytes -= b.DeviceBytes
	a.FailedReads -= b.FailedReads
	a.Errors = a.Errors[min(len(a.Errors), len(b.Errors)):]
	return a
}
