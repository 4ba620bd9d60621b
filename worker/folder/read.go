package folder

import (
	"fmt"
	"io"
	"os"
	"syscall"
)

// ReadBounded reads a regular file of at most limit bytes, and nothing else: it
// neither waits for a FIFO nor reads a device without end.
func ReadBounded(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !st.Mode().IsRegular() {
		return nil, fmt.Errorf("%s is not a regular file", path)
	}
	// One byte more than there is, so that the end is seen; a file that grows
	// meanwhile, or says nothing of its size, is bounded by what is read of it.
	b := make([]byte, 0, min(st.Size(), limit)+1)
	for {
		n, err := f.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		if int64(len(b)) > limit {
			return nil, fmt.Errorf("%s has more than the %d bytes that are accepted", path, limit)
		}
		if err == io.EOF {
			return b, nil
		}
		if err != nil {
			return nil, err
		}
		if len(b) == cap(b) {
			b = append(b, 0)[:len(b)]
		}
	}
}
