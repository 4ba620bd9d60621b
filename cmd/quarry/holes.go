package main

import (
	"errors"
	"fmt"
	"io"
	"os"
)

// errTooMuch is content of a sandbox beyond what its caller wants.
var errTooMuch = errors.New("too much comes of it")

// budget is how many bytes of a sandbox's content may still come, zeros of holes
// included: a guest can have a file of a tebibyte that is one hole.
type budget struct {
	most int64
	left int64
}

func newBudget(most int64) *budget { return &budget{most, most} }

// to passes on what is written to w, until the budget is spent.
func (b *budget) to(w io.Writer) io.Writer { return budgetWriter{b, w} }

type budgetWriter struct {
	b *budget
	w io.Writer
}

// Write implements io.Writer. Errors: errTooMuch.
func (w budgetWriter) Write(p []byte) (int, error) {
	if int64(len(p)) > w.b.left {
		return 0, fmt.Errorf("%w: more than %d bytes: leave something out with --exclude, or allow more with --max-bytes", errTooMuch, w.b.most)
	}
	w.b.left -= int64(len(p))
	return w.w.Write(p)
}

// holeBlock is what a file system keeps a hole in multiples of.
const holeBlock = 4 << 10

// holes writes a new file from its beginning on, and leaves out blocks that are
// zeros: what is a hole in the guest takes no room here. Finish ends the file.
type holes struct {
	f    *os.File
	size int64
}

// Write implements io.Writer.
func (h *holes) Write(p []byte) (int, error) {
	for n := 0; n < len(p); {
		k := min(len(p)-n, int(holeBlock-h.size%holeBlock))
		// Neighbours that are no holes go in one write.
		for !zeros(p[n:][:k]) && n+k < len(p) && !zeros(p[n+k:][:min(len(p)-n-k, holeBlock)]) {
			k += min(len(p)-n-k, holeBlock)
		}
		if part := p[n:][:k]; !zeros(part) {
			if m, err := h.f.WriteAt(part, h.size); err != nil {
				return n + m, err
			}
		}
		n += k
		h.size += int64(k)
	}
	return len(p), nil
}

func zeros(p []byte) bool {
	for _, b := range p {
		if b != 0 {
			return false
		}
	}
	return true
}

// finish gives the file its size, which a hole at its end does not.
func (h *holes) finish() error { return h.f.Truncate(h.size) }
