package layer

import (
	"errors"
	"io"
)

const (
	// Eight buffers of 256 KiB: enough that neither side waits for the other at
	// every buffer, small against a chunk store's own queues.
	aheadBuffers    = 8
	aheadBufferSize = 256 << 10
)

// errStopped is what one side of a readAhead sees after the other has failed.
var errStopped = errors.New("stopped")

// readAhead hands bytes from one goroutine, in fill, to another, which reads.
// The error that ends the filling is read after the last byte before it.
type readAhead struct {
	done <-chan struct{} // closed when both sides shall stop
	full chan []byte
	free chan []byte
	err  error // set before full is closed

	cur  []byte // buffer being read
	rest []byte // what is unread of cur
}

func newReadAhead(done <-chan struct{}) *readAhead {
	a := &readAhead{done: done, full: make(chan []byte, aheadBuffers), free: make(chan []byte, aheadBuffers)}
	for range aheadBuffers {
		a.free <- make([]byte, aheadBufferSize)
	}
	return a
}

// fill reads r to its end or first error.
func (a *readAhead) fill(r io.Reader) {
	defer func() {
		if a.err == nil {
			a.err = errStopped // r has panicked
		}
		close(a.full)
	}()
	for a.err == nil {
		select {
		case buf := <-a.free:
			n := 0
			for n < len(buf) && a.err == nil { // not io.ReadFull, which hides the source's error
				var m int
				m, a.err = r.Read(buf[n:])
				n += m
			}
			a.full <- buf[:n] // never blocks: there are as many slots as buffers
		case <-a.done:
			a.err = errStopped
		}
	}
}

// Read implements io.Reader.
func (a *readAhead) Read(p []byte) (int, error) {
	for len(a.rest) == 0 {
		if a.cur != nil {
			a.free <- a.cur[:cap(a.cur)] // never blocks either
			a.cur = nil
		}
		select {
		case b, ok := <-a.full:
			if !ok {
				return 0, a.err
			}
			a.cur, a.rest = b, b
		case <-a.done:
			return 0, errStopped
		}
	}
	n := copy(p, a.rest)
	a.rest = a.rest[n:]
	return n, nil
}
