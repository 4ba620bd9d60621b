package api

import (
	"io"
	"sync"
)

// sendBytes is what frames are gathered to before they are sent: a write of it costs
// what copying it does, and 1024 of them, one for each request that reads, are 256 MiB.
const sendBytes = 256 << 10

var sendBuffers = sync.Pool{New: func() any { return new([sendBytes]byte) }}

// frameBuffer gathers frames, most of which are small beside what one write of a
// connection costs. It has memory only while it has something to send.
type frameBuffer struct {
	w   io.Writer
	buf *[sendBytes]byte
	n   int
}

func newFrameBuffer(w io.Writer) *frameBuffer { return &frameBuffer{w: w} }

// Write implements io.Writer.
func (b *frameBuffer) Write(p []byte) (int, error) {
	written := 0
	for {
		if b.buf == nil {
			b.buf = sendBuffers.Get().(*[sendBytes]byte)
		}
		n := copy(b.buf[b.n:], p[written:])
		b.n += n
		if written += n; written == len(p) {
			return written, nil
		}
		if err := b.flush(); err != nil {
			return written, err
		}
	}
}

// flush sends what was gathered.
func (b *frameBuffer) flush() error {
	if b.n == 0 {
		return nil
	}
	_, err := b.w.Write(b.buf[:b.n])
	b.n = 0
	b.release()
	return err
}

// release gives the memory back.
func (b *frameBuffer) release() {
	if b.buf != nil {
		sendBuffers.Put(b.buf)
		b.buf = nil
	}
}
