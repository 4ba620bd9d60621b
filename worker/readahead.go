package worker

import (
	"context"
	"crypto/rand"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
	"quarry/rafs"
	"quarry/worker/folder"
	"quarry/worker/timeline"
)

const (
	// aheadBytes is how much the kernel is asked to read before one waits for it: what
	// the command itself reads finds no more than that in front of it, 1 ms.
	aheadBytes = 1 << 20
	// maxAhead bounds what is read ahead of one mount: a list has no more.
	maxAhead = 64 << 20
)

// readAhead has the kernel read chunks of the mounted image at root that the reader
// has got, while the command starts, which finds them in the kernel's memory and does
// not wait for each file on its own. It goes on until coming is closed or the returned
// function is called, which then waits for the read under way. It is a help, and what
// goes wrong with it goes wrong again for the command, if that needs it.
//
// That wait has no grace of its own. When the reader is killed and the store gone just
// then, the command's end waits for as long as the shim lets a read wait: a thread in a
// read of a mount cannot be called back, others may use the mount, so that its detach
// would not end the read either, and a goroutine left behind would keep the mount busy.
// The end of ctx, such as a signal, ends the wait.
func readAhead(ctx context.Context, im *folder.Image, root string, coming <-chan uint32) (end func()) {
	if coming == nil || im.RAFS.Blob == nil {
		return func() {}
	}
	own, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { // ends with own; a read of a mount cannot be interrupted, and the reader and the shim bound it
		defer close(done)
		defer timeline.Begin(ctx, timeline.ReadAhead)()
		readChunks(own, im, root, coming)
	}()
	return func() {
		cancel()
		select {
		case <-done:
		case <-ctx.Done():
		}
	}
}

// ReadAhead has this process read chunks of the mounted image that the reader has got,
// by their numbers as they come, until coming is closed, ctx ends or one cannot be read,
// and returns how many bytes those are. The kernel charges a page to the control group
// of who has it read first: so it is this process's, and not that of a sandbox, which
// may end before others that use the page. It has a reference of its own meanwhile; a
// read that does not end with ctx is left behind with it.
func (mt *Mount) ReadAhead(ctx context.Context, im *folder.Image, coming <-chan uint32) (size int64, err error) {
	own, err := mt.another(ctx)
	if err != nil {
		return 0, err
	}
	return leaveBehind(ctx, func() (int64, error) {
		size := readChunks(ctx, im, own.Root(), coming)
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
		defer cancel()
		return size, own.Leave(cleanup)
	})
}

// leaveTimeout bounds how long a reference that is given up waits for who has the
// image's lock: who mounts it, mostly.
const leaveTimeout = time.Minute

// another takes one more reference to the mount, while mt stands.
func (mt *Mount) another(ctx context.Context) (*Mount, error) {
	l, err := proc.TakeLock(ctx, mt.dir+".lock") // who looks for dead references has it
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	if !mounted(mt.dir) {
		return nil, fmt.Errorf("mount at %s: %w", mt.dir, ErrUnserved)
	}
	more := &Mount{w: mt.w, dir: mt.dir, path: filepath.Join(mt.dir, "refs", rand.Text())}
	if more.ref, err = proc.TryLock(more.path); err != nil {
		return nil, err
	}
	return more, nil
}

// readChunks reads chunks of an image ahead, and returns how many bytes they have.
func readChunks(ctx context.Context, im *folder.Image, dir string, coming <-chan uint32) (size int64) {
	r, err := openRoot(dir)
	if err != nil {
		return 0
	}
	defer r.close()
	var places []place
	var waits int64 // asked for and not waited for
	for size < maxAhead {
		var n uint32
		more := false
		select {
		case n, more = <-coming:
		case <-ctx.Done():
		}
		if !more || ctx.Err() != nil {
			return size
		}
		if places == nil { // not before there is something to read
			if places, err = placesOf(im); err != nil {
				return size
			}
		}
		if int64(n) >= int64(len(places)) {
			continue
		}
		p, length := places[n], int64(im.RAFS.Blob.Chunks[n].Len)
		f, err := r.open(p.path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK)
		if err != nil {
			continue
		}
		unix.Fadvise(int(f.Fd()), p.off, length, unix.FADV_WILLNEED)
		size += length
		if waits += length; waits >= aheadBytes {
			_, err = f.ReadAt(make([]byte, 1), p.off+length-1)
			waits = 0
		}
		f.Close()
		if err != nil {
			return size
		}
	}
	return size
}

// place is where a chunk is read: in the first file that has it.
type place struct {
	path string
	off  int64
}

// placesOf returns the places of all chunks, which are numbered in the order of Walk.
// An image without its tree is decoded once more.
func placesOf(im *folder.Image) ([]place, error) {
	m := im.RAFS
	if m.Tree == nil {
		var err error
		if m, err = rafs.Decode(im.Bootstrap); err != nil {
			return nil, err
		}
	}
	places := make([]place, 0, len(m.Blob.Chunks))
	m.Walk(func(path string, n *rafs.Inode) error { // whose function returns no error
		for k, d := range n.Chunks {
			if next := len(places); next < len(m.Blob.Chunks) && m.Blob.Chunks[next].Digest == d {
				places = append(places, place{path, int64(k) * int64(m.ChunkSize)})
			}
		}
		return nil
	})
	return places, nil
}
