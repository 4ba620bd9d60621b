package reader

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"quarry/nbd"
	"quarry/nbd/blockdev"
	"quarry/store/chunk"
	"quarry/worker/folder"
)

const (
	// repairPause is between two attempts to have a damaged image's parts again.
	repairPause = 200 * time.Millisecond
	// repairAgain is how long a repair that failed stands: shims ask with every read
	// that comes, and each must not cost the store a request.
	repairAgain = 5 * time.Second
)

// unrepaired is a repair that failed.
type unrepaired struct {
	err error
	at  time.Time
}

// local returns an image that the folder holds, with its origin and the way there,
// which the caller closes. Damaged files are fetched again: what names them by
// digest is verified against the image's id. Errors: nbd.ErrUnknownExport when the
// image cannot be had, which another attempt soon does not change.
func (r *reader) local(ctx context.Context, id chunk.Digest) (*folder.Image, ChunkSource, error) {
	im, damage := r.cfg.Dir.Load(id)
	if starved(damage) {
		return nil, nil, damage
	}
	origin, err := r.cfg.Dir.Origin(id)
	switch {
	case starved(err):
		return nil, nil, err
	case errors.Is(err, fs.ErrNotExist) && errors.Is(damage, fs.ErrNotExist):
		return nil, nil, fmt.Errorf("no such image on this worker: %w", nbd.ErrUnknownExport)
	case err != nil:
		return nil, nil, fmt.Errorf("%w: %w", nbd.ErrUnknownExport, errors.Join(damage, err))
	}
	src, err := r.cfg.Open(origin)
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", nbd.ErrUnknownExport, errors.Join(damage, err))
	}
	if damage == nil {
		return im, src, nil
	}
	if im, err = r.repair(ctx, id, origin, src, damage); err != nil {
		src.Close()
		return nil, nil, err
	}
	return im, src, nil
}

// starved: it says nothing of the file, and the next attempt may do better.
func starved(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// repair has a damaged image's parts fetched, for as long as a read waits for a
// chunk.
func (r *reader) repair(ctx context.Context, id chunk.Digest, o folder.Origin, src ChunkSource, damage error) (*folder.Image, error) {
	r.mu.Lock()
	last, failed := r.unrepaired[id]
	r.mu.Unlock()
	if failed && time.Since(last.at) < repairAgain {
		return nil, last.err
	}
	log := r.cfg.Log.With("image_id", id)
	log.WarnContext(ctx, "image is damaged in the worker's folder and is fetched again", "damage", damage)
	im, unsaved, err := r.fetchAgain(ctx, id, o, src)
	if err == nil {
		log.InfoContext(ctx, "image was fetched again and verified", "unsaved", unsaved)
		r.mu.Lock()
		delete(r.unrepaired, id)
		r.mu.Unlock()
		return im, nil
	}
	err = fmt.Errorf("%w; fetch it again: %w", damage, err)
	select {
	case <-r.ending: // the next reader tries
		return nil, err
	default:
	}
	err = fmt.Errorf("%w: %w", nbd.ErrUnknownExport, err)
	r.mu.Lock()
	r.unrepaired[id] = unrepaired{err, time.Now()} // bounded by the images of the folder
	r.mu.Unlock()
	return nil, err
}

// fetchAgain tries until the read timeout, or until the reader ends. ctx is of a
// connection that may give up sooner: the next one waits for the same repair.
func (r *reader) fetchAgain(ctx context.Context, id chunk.Digest, o folder.Origin, src ChunkSource) (im *folder.Image, unsaved, err error) {
	timeout := r.cfg.ReadTimeout
	if timeout == 0 {
		timeout = blockdev.DefaultTimeout
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), timeout)
	var watch sync.WaitGroup
	watch.Go(func() {
		select {
		case <-r.ending:
			cancel()
		case <-ctx.Done():
		}
	})
	defer watch.Wait()
	defer cancel()
	for {
		im, unsaved, err = r.cfg.Dir.Repair(ctx, id, o, src)
		if err == nil || settled(err) {
			return im, unsaved, err
		}
		select {
		case <-ctx.Done():
			return nil, nil, err
		case <-time.After(repairPause):
		}
	}
}

// settled: asking again does not help. Only what a store said, or did not, may be
// another thing the next time: what the folder has stays as it is.
func settled(err error) bool {
	return !starved(err) && (!errors.Is(err, folder.ErrFetch) || errors.Is(err, folder.ErrNoContent))
}
