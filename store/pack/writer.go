package pack

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"

	"quarry/store/chunk"
)

// ErrFull says that a pack can take no further chunk: close it and begin
// another.
var ErrFull = errors.New("pack is full")

// Writer writes one pack as a stream and computes its id on the way. It is not
// safe for concurrent use.
type Writer struct {
	w       *bufio.Writer
	sum     hash.Hash
	entries []Entry
	size    int64
	scratch []byte
	err     error // first error of the stream, which no later call can mend
}

// NewWriter begins a pack on w.
func NewWriter(w io.Writer) *Writer {
	// 256 KiB: small chunks reach the file in one call per default chunk size.
	pw := &Writer{w: bufio.NewWriterSize(w, 256<<10), sum: sha256.New()}
	pw.write(appendHeader(nil))
	return pw
}

func (w *Writer) write(p []byte) {
	if w.err != nil {
		return
	}
	w.sum.Write(p)
	_, w.err = w.w.Write(p)
	w.size += int64(len(p))
}

// Add appends one stored chunk. ErrFull leaves the pack as it was; any other
// error ends it.
func (w *Writer) Add(d chunk.Digest, c Codec, plainLen uint32, stored []byte) (Entry, error) {
	if err := validateLengths(c, int64(len(stored)), plainLen); err != nil {
		return Entry{}, fmt.Errorf("add chunk %s: %w", d, err)
	}
	total := w.size + RecordHeaderSize + int64(len(stored)) + footerSize(len(w.entries)+1)
	if len(w.entries) == MaxCount || total > MaxPack {
		return Entry{}, ErrFull
	}
	e := Entry{
		Digest: d, Off: w.size + RecordHeaderSize,
		Stored: uint32(len(stored)), Len: plainLen, Codec: c, CRC: Checksum(stored),
	}
	w.scratch = appendRecordHeader(w.scratch[:0], e)
	w.write(w.scratch)
	w.write(stored)
	w.entries = append(w.entries, e)
	return e, w.err
}

// Size returns the bytes written so far, without the footer.
func (w *Writer) Size() int64 { return w.size }

// Count returns the chunks added so far.
func (w *Writer) Count() int { return len(w.entries) }

// Entries returns what was added so far. The caller must not change it.
func (w *Writer) Entries() []Entry { return w.entries }

// Close writes the footer and returns the pack's id and size. It does not close
// the underlying writer. A pack without chunks is an error.
func (w *Writer) Close() (id chunk.Digest, size int64, err error) {
	if len(w.entries) == 0 {
		return id, 0, errors.New("close pack: it has no chunks")
	}
	w.write(appendFooter(w.scratch[:0], w.entries))
	if w.err == nil {
		w.err = w.w.Flush()
	}
	if w.err != nil {
		return id, 0, fmt.Errorf("write pack: %w", w.err)
	}
	return chunk.Digest(w.sum.Sum(nil)), w.size, nil
}

func footerSize(count int) int64 {
	return int64(len(footerTag)) + int64(count)*EntrySize + TrailerSize
}

// appendFooter leaves offsets out: records follow one another, so the lengths
// give them, and a footer cannot contradict itself.
func appendFooter(b []byte, entries []Entry) []byte {
	start := len(b)
	b = append(b, footerTag...)
	for _, e := range entries {
		b = append(b, e.Digest[:]...)
		b = le.AppendUint32(b, e.Stored)
		b = le.AppendUint32(b, e.Len)
		b = le.AppendUint32(b, e.CRC)
		b = append(b, byte(e.Codec), 0, 0, 0)
	}
	b = le.AppendUint32(b, uint32(len(entries)))
	b = le.AppendUint32(b, Version)
	b = le.AppendUint32(b, Checksum(b[start:]))
	return append(b, trailerMagic...)
}
