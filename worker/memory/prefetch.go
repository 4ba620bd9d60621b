package memory

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// threads is how many read at once. A swap file wants a deep queue; more than 8 gave
	// nothing more (docs/decisions/hibernate.md).
	threads = 8
	// part is what one thread asks about and reads at a time.
	part = 1 << 20
)

// Piece is what to bring back of one file.
type Piece struct {
	File   *File
	Ranges []Range
}

// Fetched is what a prefetch did.
type Fetched struct {
	Bytes  int64 // brought back
	Mapped int64 // parts of 64 KiB at most that were mapped where the guest uses them always
	Took   time.Duration
	Rest   bool // more is being brought back, while the guest runs
}

// startFetch begins to bring back pieces, until ctx ends, and to map what the guest
// always uses of memory, the one of them that has its habit and spots. A read that is
// stuck, of an image whose store does not answer, ends with the device's own deadline. An
// error is no reason not to run the guest: what is missing comes when the guest touches
// it.
func startFetch(ctx context.Context, pieces []Piece, h *habit, m *mapper) *fetch {
	f := &fetch{ctx: ctx, begun: time.Now(), done: make(chan struct{}), parts: make(chan Piece), ahead: SwapOnDisk(), habit: h, mapper: m}
	var workers sync.WaitGroup
	for range threads {
		workers.Go(f.work)
	}
	go func() { // ends with the workers, whose reads the device ends
		defer close(f.done)
		f.deal(pieces)
		close(f.parts)
		workers.Wait()
		m.close()
	}()
	return f
}

// wait waits for the end, or that of ctx.
func (f *fetch) wait(ctx context.Context) (Fetched, error) {
	rest := false
	select {
	case <-f.done:
	case <-ctx.Done():
		rest = true
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return Fetched{Bytes: f.bytes.Load(), Mapped: f.mapped.Load(), Took: time.Since(f.begun), Rest: rest}, f.err
}

type fetch struct {
	ctx    context.Context
	begun  time.Time
	done   chan struct{}
	ahead  bool       // swap is on a disk
	parts  chan Piece // of one range each
	habit  *habit     // of whose memory is among them; nil: nothing is learnt
	mapper *mapper    // nil: nothing is mapped
	bytes  atomic.Int64
	mapped atomic.Int64
	mu     sync.Mutex
	err    error // the first, guarded by mu
}

func (f *fetch) fail(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err == nil {
		f.err = err
	}
}

// deal cuts the ranges into parts.
func (f *fetch) deal(pieces []Piece) {
	for _, p := range pieces {
		for _, r := range p.Ranges {
			for r.Len > 0 {
				n := min(r.Len, part-r.Off%part)
				select {
				case f.parts <- Piece{p.File, []Range{{r.Off, n}}}:
				case <-f.ctx.Done():
					return
				}
				r = Range{r.Off + n, r.Len - n}
			}
		}
	}
}

func (f *fetch) work() {
	null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if err != nil {
		f.fail(err)
		for range f.parts { // so that deal does not wait
		}
		return
	}
	defer null.Close()
	var scrap []byte
	for p := range f.parts {
		away := p.File.Away(p.Ranges[0])
		if p.File.shmem {
			f.habit.bringsBack(away)
		}
		if f.ahead {
			p.File.start(away)
		}
		for _, r := range away {
			if f.ctx.Err() != nil {
				break
			}
			n, err := p.File.touch(r, null)
			if errors.Is(err, errors.ErrUnsupported) || errors.Is(err, unix.EINVAL) {
				if scrap == nil {
					scrap = make([]byte, part)
				}
				n, err = p.File.f.ReadAt(scrap[:r.Len], r.Off)
			}
			f.bytes.Add(int64(n))
			if err != nil && !errors.Is(err, io.EOF) {
				f.fail(fmt.Errorf("bring back %d bytes at %d: %w", r.Len, r.Off, err))
			}
		}
		if p.File.shmem && f.ctx.Err() == nil {
			f.mapped.Add(f.mapper.give(p.Ranges[0]))
		}
	}
}

// touch brings a range into memory without a copy of it: the pages go by reference to
// where nobody reads them.
func (f *File) touch(r Range, null *os.File) (done int, err error) {
	err = f.control(func(in int) error {
		for off := r.Off; done < int(r.Len); {
			n, err := unix.Sendfile(int(null.Fd()), in, &off, int(r.Len)-done)
			if err != nil && err != unix.EINTR {
				return err
			}
			if n == 0 && err == nil {
				return io.EOF
			}
			done += max(n, 0)
		}
		return nil
	})
	return done, err
}

// SwapOnDisk reports whether some swap is not on zram. To begin many reads together
// halves the time that a disk takes; on zram, where nothing is waited for, it takes half
// as long again (docs/decisions/hibernate.md).
func SwapOnDisk() bool {
	raw, err := readBounded("/proc/swaps")
	if err != nil {
		return false
	}
	for i, line := range strings.Split(strings.TrimSpace(raw), "\n") {
		if i > 0 && !strings.HasPrefix(line, "/dev/zram") {
			return true
		}
	}
	return false
}

// start has the kernel begin to read ranges of a guest's memory from swap, many at a
// time, and waits for none.
func (f *File) start(ranges []Range) {
	if !f.shmem {
		return
	}
	f.control(func(fd int) error {
		for _, r := range ranges {
			if b, err := unix.Mmap(fd, r.Off, int(r.Len), unix.PROT_READ, unix.MAP_SHARED); err == nil {
				unix.Madvise(b, unix.MADV_WILLNEED)
				unix.Munmap(b)
			}
		}
		return nil
	})
}
