package attach

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
)

// countsFile is the name of the counters in the folder of an attachment.
const countsFile = "eio"

// countsSize is its length: two counters of 8 bytes, little endian, in the order
// of CountsValue. The file lives as long as the process that writes it.
const countsSize = 16

func (f folder) counts() string { return filepath.Join(string(f), countsFile) }

// CountsValue is what the process that serves a folder has counted since it
// began.
type CountsValue struct {
	FailedReads uint64 // reads that it answered with EIO
	Readers     uint64 // connections to a reader made anew, after the first
}

// Counts are the counters of an attachment, kept in a file of its folder, where
// whoever uses the mount can compare them before and after. A count is in the
// file before the event it counts is seen by anybody. Safe for concurrent use.
type Counts struct {
	mu sync.Mutex // guards what follows
	f  *os.File
	v  CountsValue
}

// NewCounts begins the counters of the folder that l is the lock of at zero.
func NewCounts(l *Lock) (*Counts, error) {
	tmp := l.dir.counts() + tmpSuffix // who looks meanwhile sees the old counters, or the new ones
	f, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	c := &Counts{f: f}
	if err := errors.Join(c.add(CountsValue{}), os.Rename(tmp, l.dir.counts())); err != nil {
		f.Close()
		return nil, err
	}
	return c, nil
}

// removeCounts removes the counters, also those that were being made.
func (f folder) removeCounts() error {
	return errors.Join(removeFile(f.counts()), removeFile(f.counts()+tmpSuffix))
}

// AddFailedRead counts a read that is about to be answered with EIO.
func (c *Counts) AddFailedRead() error { return c.add(CountsValue{FailedReads: 1}) }

// AddReader counts a new connection to a reader.
func (c *Counts) AddReader() error { return c.add(CountsValue{Readers: 1}) }

func (c *Counts) add(d CountsValue) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.v.FailedReads += d.FailedReads
	c.v.Readers += d.Readers
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, countsSize), c.v.FailedReads)
	_, err := c.f.WriteAt(binary.LittleEndian.AppendUint64(b, c.v.Readers), 0)
	return err
}

// Close lets the file go; sweeping the folder removes it.
func (c *Counts) Close() error { return c.f.Close() }

// ReadCounts reads the counters of a folder. Errors: fs.ErrNotExist.
func ReadCounts(dir string) (CountsValue, error) {
	path := filepath.Join(dir, countsFile)
	f, err := openRegular(path)
	if err != nil {
		return CountsValue{}, err
	}
	defer f.Close()
	var b [countsSize + 1]byte
	n, err := f.ReadAt(b[:], 0)
	if !errors.Is(err, io.EOF) || n != countsSize {
		return CountsValue{}, fmt.Errorf("read %s: %d bytes or more, want %d: %w", path, n, countsSize, err)
	}
	return CountsValue{
		FailedReads: binary.LittleEndian.Uint64(b[0:]),
		Readers:     binary.LittleEndian.Uint64(b[8:]),
	}, nil
}
