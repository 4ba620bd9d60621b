package worker

import (
	"context"

	"golang.org/x/sys/unix"

	"quarry/rafs"
	"quarry/worker/folder"
	"quarry/worker/timeline"
)

// aheadBytes is how much the kernel is asked to read before one waits for it: what
// the command itself reads finds no more than that in front of it, 1 ms.
const aheadBytes = 1 << 20

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
		readChunks(own, im.RAFS, root, coming)
	}()
	return func() {
		cancel()
		select {
		case <-done:
		case <-ctx.Done():
		}
	}
}

func readChunks(ctx context.Context, m *rafs.Image, dir string, coming <-chan uint32) {
	r, err := openRoot(dir)
	if err != nil {
		return
	}
	defer r.close()
	places := placesOf(m)
	var asked int64 // for and not waited for
	for {
		var n uint32
		more := false
		select {
		case n, more = <-coming:
		case <-ctx.Done():
		}
		if !more || ctx.Err() != nil {
			return
		}
		if int64(n) >= int64(len(places)) {
			continue
		}
		p, size := places[n], int64(m.Blob.Chunks[n].Len)
		f, err := r.open(p.path, unix.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK)
		if err != nil {
			continue
		}
		unix.Fadvise(int(f.Fd()), p.off, size, unix.FADV_WILLNEED)
		if asked += size; asked >= aheadBytes {
			f.ReadAt(make([]byte, 1), p.off+size-1)
			asked = 0
		}
		f.Close()
	}
}

// place is where a chunk is read: in the first file that has it.
type place struct {
	path string
	off  int64
}

// placesOf returns the places of all chunks, which are numbered in the order of Walk.
func placesOf(m *rafs.Image) []place {
	places := make([]place, 0, len(m.Blob.Chunks))
	m.Walk(func(path string, n *rafs.Inode) error { // whose function returns no error
		for k, d := range n.Chunks {
			if next := len(places); next < len(m.Blob.Chunks) && m.Blob.Chunks[next].Digest == d {
				places = append(places, place{path, int64(k) * int64(m.ChunkSize)})
			}
		}
		return nil
	})
	return places
}
