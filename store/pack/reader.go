package pack

import (
	"bufio"
	"errors"
	"fmt"
	"io"

	"quarry/store/chunk"
)

func footerError(off int64, format string, args ...any) error {
	return &FormatError{"footer", off, fmt.Errorf(format, args...)}
}

// ReadFooter reads the footer of a pack of the given size. A footer it refuses
// is a *FormatError; errors of r are returned wrapped.
func ReadFooter(r io.ReaderAt, size int64) ([]Entry, error) {
	if size > MaxPack || size < HeaderSize+RecordHeaderSize+1+footerSize(1) {
		return nil, footerError(0, "no pack has %d bytes", size)
	}
	// One read gets the whole footer of all but the largest packs: 64 KiB hold
	// 1 364 entries.
	tail := make([]byte, min(size, 64<<10))
	if err := readFull(r, tail, size-int64(len(tail))); err != nil {
		return nil, fmt.Errorf("read pack footer: %w", err)
	}
	count, err := decodeTrailer(tail, size)
	if err != nil {
		return nil, err
	}
	footer := footerSize(count)
	if size < HeaderSize+int64(count)*(RecordHeaderSize+1)+footer {
		return nil, footerError(size-TrailerSize, "%d entries do not fit into %d bytes", count, size)
	}
	if footer > int64(len(tail)) {
		tail = make([]byte, footer)
		if err := readFull(r, tail, size-footer); err != nil {
			return nil, fmt.Errorf("read pack footer: %w", err)
		}
	}
	return decodeFooter(tail[int64(len(tail))-footer:], count, size)
}

func readFull(r io.ReaderAt, p []byte, off int64) error {
	n, err := r.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	if err == nil || errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func decodeTrailer(tail []byte, size int64) (count int, err error) {
	t := tail[len(tail)-TrailerSize:]
	off := size - TrailerSize
	switch {
	case string(t[12:]) != trailerMagic:
		return 0, footerError(off, "magic %q, want %q", t[12:], trailerMagic)
	case le.Uint32(t[4:]) != Version:
		return 0, footerError(off, "version %d, this program reads %d", le.Uint32(t[4:]), Version)
	case le.Uint32(t) == 0 || le.Uint32(t) > MaxCount:
		return 0, footerError(off, "%d entries, want 1 to %d", le.Uint32(t), MaxCount)
	}
	return int(le.Uint32(t)), nil
}

func decodeFooter(b []byte, count int, size int64) ([]Entry, error) {
	start := size - int64(len(b))
	sumOff := len(b) - TrailerSize + 8
	if got, want := Checksum(b[:sumOff]), le.Uint32(b[sumOff:]); got != want {
		return nil, footerError(start, "checksum %08x, want %08x", got, want)
	}
	if string(b[:4]) != footerTag {
		return nil, footerError(start, "tag %q, want %q", b[:4], footerTag)
	}
	entries := make([]Entry, count)
	off := int64(HeaderSize)
	for i := range entries {
		p := b[len(footerTag)+i*EntrySize:][:EntrySize]
		e := Entry{
			Digest: chunk.Digest(p[:32]), Off: off + RecordHeaderSize,
			Stored: le.Uint32(p[32:]), Len: le.Uint32(p[36:]), CRC: le.Uint32(p[40:]), Codec: Codec(p[44]),
		}
		if err := e.Validate(); err != nil {
			return nil, footerError(start, "entry %d: %w", i, err)
		}
		if p[45]|p[46]|p[47] != 0 {
			return nil, footerError(start, "entry %d: reserved bytes are not zero", i)
		}
		entries[i] = e
		off = e.Off + int64(e.Stored)
	}
	if off != start {
		return nil, footerError(start, "entries end at %d", off)
	}
	return entries, nil
}

// ScanRecords lists the chunks of a pack from its records, for a pack whose
// footer is damaged. It stops at the first record header that is not one and
// returns the records before it with the error; where the footer begins, it
// ends without one. The stored bytes are not checked.
func ScanRecords(r io.ReaderAt, size int64) ([]Entry, error) {
	if size > MaxPack {
		return nil, &FormatError{"header", 0, fmt.Errorf("no pack has %d bytes", size)}
	}
	br := bufio.NewReaderSize(io.NewSectionReader(r, 0, size), 256<<10)
	head := make([]byte, HeaderSize)
	if _, err := io.ReadFull(br, head); err != nil {
		return nil, scanError("header", 0, err)
	}
	var entries []Entry
	for off := int64(HeaderSize); ; {
		b, err := br.Peek(RecordHeaderSize)
		if len(b) >= len(footerTag) && string(b[:len(footerTag)]) == footerTag {
			return entries, nil
		}
		if err != nil {
			return entries, scanError("record", off, err)
		}
		e, err := DecodeRecordHeader(b, off)
		if err != nil {
			return entries, err
		}
		if len(entries) == MaxCount {
			return entries, &FormatError{"record", off, fmt.Errorf("more than %d records", MaxCount)}
		}
		if _, err := br.Discard(RecordHeaderSize + int(e.Stored)); err != nil {
			return entries, scanError("record", off, err)
		}
		entries = append(entries, e)
		off = e.Off + int64(e.Stored)
	}
}

// scanError tells a pack that ends early, which is damage, from a bucket that
// cannot be read.
func scanError(part string, off int64, err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return &FormatError{part, off, errors.New("pack is cut off")}
	}
	return fmt.Errorf("read pack %s at %d: %w", part, off, err)
}
