package reader

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"quarry/nbd"
	"quarry/nbd/blockdev"
	"quarry/rafs"
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
	src       ChunkSource
	bootstrap chunk.Digest
	chunks    []rafs.Chunk // of the image, by number
	recording *recording
	opened    time.Time
	mounted   chan struct{} // closed by the first connection
	connected sync.Once     // which closes it
	failed    failures

	pulledChunks, pulledBytes atomic.Int64
	pulledBad, pullDiskFailed atomic.Int64 // see Stats.DiskBad and DiskFailed

	leaseMu    sync.Mutex // held while the store is told of the lease; guards leaseEnded
	leaseEnded bool
}

// export opens an image by id. The folder's copy is verified against the id, so
// a reader started after a crash serves the same bytes or nothing. Errors:
// nbd.ErrUnknownExport, which tells a shim that its reads wait in vain.
func (r *reader) export(ctx context.Context, name string) (nbd.Device, error) {
	id, err := chunk.ParseHex(name)
	if err != nil {
		return nil, fmt.Errorf("export %q: the name must be an image id: %w", name, nbd.ErrUnknownExport)
	}
	used, err := r.openImage(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("export %q: %w", name, err)
	}
	used.connected.Do(func() { close(used.mounted) })
	return used, nil
}

// openImage uses an image, which is opened when it is not; its user closes it.
func (r *reader) openImage(ctx context.Context, id chunk.Digest) (*usedImage, error) {
	im, first := r.use(id)
	if first {
		if im.err = r.load(ctx, im, id); im.err != nil {
			r.notOpened(ctx, id, im.err)
		}
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
		return nil, im.err
	}
	select {
	case r.opened <- struct{}{}:
	default: // watch is about to look anyway
	}
	return &usedImage{openImage: im, r: r, id: id}, nil
}

// notOpened says why an image is not served, at most once in ten seconds: the shim
// of a mounted one asks again and again.
func (r *reader) notOpened(ctx context.Context, id chunk.Digest, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if time.Since(r.said) > 10*time.Second {
		r.said = time.Now()
		reads := "wait"
		if errors.Is(err, nbd.ErrUnknownExport) {
			reads = "fail with EIO"
		}
		r.cfg.Log.ErrorContext(ctx, "image cannot be served", "image_id", id, "reads", reads, "err", err,
			"fix", "quarry mount or run the image again, which fetches it anew")
	}
}

// images returns the open images, by id, and how many connections there are.
func (r *reader) images() (map[string]*openImage, int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	open := map[string]*openImage{}
	for id, im := range r.open {
		if im.loaded() {
			open[id.Hex()] = im
		}
	}
	return open, r.conns
}

// use counts a user of an image and reports whether it must load it.
func (r *reader) use(id chunk.Digest) (im *openImage, first bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	im, ok := r.open[id]
	if !ok {
		r.count++
		im = &openImage{number: r.count, ready: make(chan struct{}), mounted: make(chan struct{}), opened: time.Now()}
		r.open[id] = im
	}
	im.users++
	return im, !ok
}

// leave takes a user away; the image is closed with its last one.
func (r *reader) leave(id chunk.Digest, im *openImage) {
	if r.metrics.leave(im, func() (last bool) {
		r.mu.Lock()
		defer r.mu.Unlock()
		im.users--
		if im.users == 0 {
			delete(r.open, id)
		}
		return im.users == 0
	}) {
		r.close(id, im)
	}
}

func (r *reader) load(ctx context.Context, im *openImage, id chunk.Digest) error {
	local, src, err := r.local(ctx, id)
	if err != nil {
		return err
	}
	im.src, im.bootstrap = src, local.Statement.Bootstrap
	if b := local.RAFS.Blob; b != nil {
		im.chunks = b.Chunks
	}
	im.recording = newRecording(local, func() { r.recordEnded(id, im) })
	im.Device, err = blockdev.New(blockdev.Config{
		Bootstrap: local.Bootstrap, Image: local.RAFS, Chunks: src, Memory: r.memory, Disk: r.disk.device(),
		Timeout: r.cfg.ReadTimeout, Log: r.cfg.Log.With("image_id", id), OnError: im.readFailed,
		OnTouch: im.recording.touch,
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
	record := im.recording.take()
	r.endLease(id, im)
	if record == nil || !r.background(func() { // ends with sendTimeout
		r.send(id, im.src, record)
		im.src.Close()
	}) {
		im.src.Close()
	}
}

// usedImage is an open image as one connection has it; the server closes it when
// the connection has ended.
type usedImage struct {
	*openImage
	r  *reader
	id chunk.Digest
}

// ReadAt implements nbd.Device.
func (u *usedImage) ReadAt(ctx context.Context, p []byte, off int64) error {
	u.r.wakeups.Note()
	return u.openImage.ReadAt(ctx, p, off)
}

// TryReadAt implements nbd.ReadyDevice.
func (u *usedImage) TryReadAt(p []byte, off int64) bool {
	ok := u.openImage.TryReadAt(p, off)
	if ok {
		u.r.wakeups.Note()
	}
	return ok
}

// Close implements io.Closer.
func (u *usedImage) Close() error {
	u.r.leave(u.id, u.openImage)
	return nil
}

// renewLeases tells the stores of all images that are open now, and loaded: one
// that is being loaded has another round when it is.
func (r *reader) renewLeases(ctx context.Context) {
	r.mu.Lock()
	images := maps.Clone(r.open)
	r.mu.Unlock()
	var g errgroup.Group
	g.SetLimit(leasesAtOnce)
	for id, im := range images {
		if im.loaded() {
			g.Go(func() error {
				r.renewLease(ctx, id, im)
				return nil
			})
		}
	}
	g.Wait()
}

func (r *reader) renewLease(ctx context.Context, id chunk.Digest, im *openImage) {
	im.leaseMu.Lock()
	defer im.leaseMu.Unlock()
	if im.leaseEnded {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, leaseCall)
	defer cancel()
	if err := im.src.KeepAlive(ctx, im.lease(id), id, im.bootstrap, leaseTTL); err != nil {
		r.cfg.Log.WarnContext(ctx, "lease not renewed", "image_id", id, "err", err)
	}
}

// endLease ends a lease after any renewal, which would begin it again.
func (r *reader) endLease(id chunk.Digest, im *openImage) {
	im.leaseMu.Lock()
	defer im.leaseMu.Unlock()
	im.leaseEnded = true
	ctx, cancel := context.WithTimeout(context.Background(), leaseCall)
	defer cancel()
	if err := im.src.EndLease(ctx, im.lease(id)); err != nil {
		r.cfg.Log.WarnContext(ctx, "lease not ended", "image_id", id, "err", err)
	}
}

// lease names this opening of the image: one that ends must not end the lease of
// the next, nor that of a reader with the same pid on another machine.
func (im *openImage) lease(id chunk.Digest) string {
	return fmt.Sprintf("reader-%s-%d-%d-%s", machine[:8], os.Getpid(), im.number, id.Hex()[:16])
}

// machine is this process among those of all machines.
var machine = rand.Text()

// loaded reports whether the image is there to be asked.
func (im *openImage) loaded() bool {
	select {
	case <-im.ready:
		return im.err == nil
	default:
		return false
	}
}
