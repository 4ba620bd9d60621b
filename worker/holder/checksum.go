package holder

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// A disk may give back other bytes than it was given, and a guest that is restored from
// those is the agent's to blame. So the files of a checkpoint have checksums, which are
// written down before the Sentry is ended and compared before another one reads them. A
// CRC is enough: who could change a file on purpose could change its record too.

const (
	savedFormat = "quarry-checkpoint/1"
	// savedName is of the record, beside the files.
	savedName = "checksums.json"
	// maxSaved is how many files a checkpoint may have; runsc's has three.
	maxSaved = 16
	// sumBlock is read at once, and sumThreads blocks at a time: a disk is as fast as it
	// can be only when it has several reads to do.
	sumBlock   = 1 << 20
	sumThreads = 4
	// directAlign is what reads past the page cache have to be multiples of.
	directAlign = 4096
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errDamaged says that a file of a checkpoint is not what was written.
var errDamaged = errors.New("its checkpoint is damaged on the disk")

// savedRecord says what the files of a checkpoint are.
type savedRecord struct {
	Format string      `json:"format"`
	Files  []savedFile `json:"files"` // by name
}

// savedFile is one of them. Sum is the CRC-32C of the CRC-32C of each MiB, which are 4
// bytes each, big endian: so the MiBs can be read in any order.
type savedFile struct {
	Name string `json:"name"`
	Size int64  `json:"size"`
	Sum  uint32 `json:"crc32c"`
}

func (r savedRecord) format() (got, want string) { return r.Format, savedFormat }

// valid reports whether the files can be looked for.
func (r savedRecord) valid() bool {
	for i, f := range r.Files {
		if f.Size < 0 || f.Name == savedName || f.Name == ".." || !filepath.IsLocal(f.Name) || f.Name != filepath.Base(f.Name) || i > 0 && r.Files[i-1].Name >= f.Name {
			return false
		}
	}
	return len(r.Files) > 0 && len(r.Files) <= maxSaved
}

// decodeSaved takes exactly what seal writes.
func decodeSaved(b []byte) (savedRecord, error) {
	r, err := decodeRecord[savedRecord](b)
	if err == nil && !r.valid() {
		err = errors.New("files that no checkpoint has")
	}
	return r, err
}

// seal writes down what the files of a checkpoint are.
func seal(ctx context.Context, dir string) error {
	entries, err := os.ReadDir(dir) // by name
	if err != nil {
		return err
	}
	r := savedRecord{Format: savedFormat}
	for _, e := range entries {
		f, err := checksum(ctx, dir, e.Name(), nil)
		if err != nil {
			return err
		}
		r.Files = append(r.Files, f)
	}
	if !r.valid() {
		return fmt.Errorf("%d files are none of a checkpoint", len(r.Files))
	}
	return writeRecord(filepath.Join(dir, savedName), r)
}

// verify compares the files of a checkpoint with what seal wrote. Errors: errDamaged.
func verify(ctx context.Context, dir string) error {
	raw, err := readBounded(filepath.Join(dir, savedName))
	if err != nil {
		return fmt.Errorf("%w: %w", errDamaged, err)
	}
	r, err := decodeSaved(raw)
	if err != nil {
		return fmt.Errorf("%w: %s: %w", errDamaged, savedName, err)
	}
	for _, want := range r.Files {
		got, err := checksum(ctx, dir, want.Name, &want.Size)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil:
			return fmt.Errorf("%w: %w", errDamaged, err)
		case got != want:
			return fmt.Errorf("%w: %s has other bytes than were written: its checksum is %08x and was %08x", errDamaged, want.Name, got.Sum, want.Sum)
		}
	}
	return nil
}

// checksum reads a file, past the page cache where that can be: the restore reads past it
// too, and has to get what was verified. One of another size than wanted is not read.
func checksum(ctx context.Context, dir, name string, want *int64) (savedFile, error) {
	f, err := openDirect(filepath.Join(dir, name))
	if err != nil {
		return savedFile{}, err
	}
	defer f.Close()
	st, err := f.Stat()
	switch {
	case err != nil:
		return savedFile{}, err
	case !st.Mode().IsRegular():
		return savedFile{}, fmt.Errorf("%s is no file", name)
	case want != nil && st.Size() != *want:
		return savedFile{}, fmt.Errorf("%s has %d bytes, and had %d", name, st.Size(), *want)
	}
	size := st.Size()
	sums := make([]byte, (size+sumBlock-1)/sumBlock*crc32.Size) // 4 KiB for each GiB
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range min(sumThreads, len(sums)/crc32.Size) {
		g.Go(func() error {
			buf, err := unix.Mmap(-1, 0, sumBlock, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS) // aligned
			if err != nil {
				return err
			}
			defer unix.Munmap(buf)
			for {
				at := next.Add(sumBlock) - sumBlock
				if at >= size || ctx.Err() != nil {
					return ctx.Err()
				}
				n := min(sumBlock, size-at)
				if err := readBlock(f, buf, n, at); err != nil {
					return fmt.Errorf("read %s at %d: %w", name, at, err)
				}
				binary.BigEndian.PutUint32(sums[at/sumBlock*crc32.Size:], crc32.Checksum(buf[:n], castagnoli))
			}
		})
	}
	err = g.Wait()
	return savedFile{name, size, crc32.Checksum(sums, castagnoli)}, err
}

// openDirect opens a file to be read past the page cache, or through it where the file
// system cannot.
func openDirect(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT|unix.O_NOFOLLOW, 0)
	if errors.Is(err, unix.EINVAL) {
		return os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	}
	return f, err
}

// readsDirect reports whether a file can be read past the page cache: some file systems
// cannot, such as tmpfs before Linux 6.6, and runsc fails there when it is told to.
func readsDirect(path string) bool {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

// readBlock reads n bytes. What is asked for is aligned, so it may be more.
func readBlock(f *os.File, buf []byte, n, at int64) error {
	ask := buf[:(n+directAlign-1)/directAlign*directAlign]
	for got := int64(0); got < n; {
		k, err := unix.Pread(int(f.Fd()), ask[got:], at+got)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case k == 0:
			return io.ErrUnexpectedEOF
		default:
			got += int64(k)
		}
	}
	return nil
}
