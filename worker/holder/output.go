package holder

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
)

// readSize is how much of a pipe is read at once: all that one holds by default.
const readSize = 64 << 10

// buffers are those of streams that have something to read now, so that a
// thousand that wait take nothing.
var buffers = sync.Pool{New: func() any { return new([readSize]byte) }}

// stragglers is how long after the end of its leader what an exec's other
// processes write is still kept.
const stragglers = time.Second

// stream drains one output of a command into a file. It never waits for the file
// or for a reader: what does not fit is counted and dropped.
type stream struct {
	path    string
	limit   int64
	room    *room // nil is without a bound but limit
	changed func()
	from    *os.File // the pipe's or the terminal's end, not blocking

	// done is closed when the command has ended and what it had written then was read.
	done chan struct{}

	mu      sync.Mutex // guards what follows
	out     sandbox.Output
	charged int64 // what it has of the room
	full    bool  // something was dropped, and so is all that follows
	leaving bool  // the command has ended
}

// newStream returns the stream of a pipe; drain reads it.
func newStream(path string, limit int64, from *os.File, changed func()) *stream {
	return &stream{path: path, limit: limit, from: from, changed: changed, done: make(chan struct{})}
}

// newStream returns a stream of the exec.
func (x *execution) newStream(path string, limit int64, from *os.File) *stream {
	s := newStream(path, limit, from, x.changed)
	s.room = &x.box.room
	return s
}

// closedStream is one that nothing comes from.
func closedStream() *stream {
	s := &stream{done: make(chan struct{}), out: sandbox.Output{Closed: true}}
	close(s.done)
	return s
}

func (s *stream) state() sandbox.Output {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out
}

// leave says that the command has ended: what is in the pipe is the rest.
func (s *stream) leave() {
	s.mu.Lock()
	s.leaving = true
	s.mu.Unlock()
	if s.from != nil {
		s.from.SetReadDeadline(time.Unix(1, 0)) // wakes the reader
	}
}

// abandon is for a command that did not start: nothing comes.
func (s *stream) abandon() {
	if s.from != nil {
		s.from.Close()
	}
	s.mu.Lock()
	s.out.Closed = true
	s.mu.Unlock()
}

// drain reads until nobody holds the other end any more.
func (s *stream) drain() {
	defer s.from.Close()
	w := &lazyFile{path: s.path}
	defer w.close()
	eof := s.copyUntilLeft(w)
	if !eof {
		eof = s.copyRest(w)
	}
	if eof {
		s.close()
		close(s.done)
		return
	}
	close(s.done)
	s.changed()
	s.from.SetReadDeadline(time.Now().Add(stragglers))
	eof = s.copyUntilLeft(w)
	s.close()
	if !eof {
		s.discard()
	}
}

func (s *stream) close() {
	s.mu.Lock()
	s.out.Closed = true
	s.mu.Unlock()
	s.changed()
}

// copyUntilLeft copies until the other end is closed, which it reports, or the
// read deadline is over.
func (s *stream) copyUntilLeft(w *lazyFile) (eof bool) {
	for {
		n, err := s.copyOnce(w)
		if n == 0 && err != nil {
			return !errors.Is(err, os.ErrDeadlineExceeded)
		}
	}
}

// copyOnce waits for something to read and copies it. The buffer is taken only when
// there is something.
func (s *stream) copyOnce(w *lazyFile) (int, error) {
	raw, err := s.from.SyscallConn()
	if err != nil {
		return 0, err
	}
	n := 0
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		b := buffers.Get().(*[readSize]byte)
		defer buffers.Put(b)
		n, failed = readNow(int(fd), b[:])
		if errors.Is(failed, unix.EAGAIN) {
			return false
		}
		s.keep(w, b[:max(n, 0)])
		return true
	})
	if err == nil {
		err = failed
	}
	return max(n, 0), err
}

// readNow reads without waiting. The end is io.EOF, as is EIO, which a terminal
// says when nobody has its other end open.
func readNow(fd int, b []byte) (int, error) {
	for {
		n, err := unix.Read(fd, b)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err == nil && n == 0, errors.Is(err, unix.EIO):
			return 0, io.EOF
		}
		return n, err
	}
}

// maxRest bounds what is read after the end of a command: more than a pipe or a
// terminal can hold, as those that outlive the command may write on.
const maxRest = 1 << 20

// copyRest copies what is in the pipe now, without waiting.
func (s *stream) copyRest(w *lazyFile) (eof bool) {
	raw, err := s.from.SyscallConn()
	if err != nil {
		return true
	}
	err = raw.Control(func(fd uintptr) {
		b := buffers.Get().(*[readSize]byte)
		defer buffers.Put(b)
		for left := maxRest; left > 0; {
			n, err := readNow(int(fd), b[:])
			if err != nil {
				eof = errors.Is(err, io.EOF)
				return
			}
			s.keep(w, b[:n])
			left -= n
		}
	})
	return eof || err != nil
}

// keep writes what there is room for, and counts.
func (s *stream) keep(w *lazyFile, b []byte) {
	if len(b) == 0 {
		return
	}
	kept, why := s.reserve(int64(len(b)))
	var err error
	if kept > 0 {
		var n int
		n, err = w.write(b[:kept])
		kept = int64(n)
	}
	s.mu.Lock()
	s.out.Kept += kept
	s.out.Dropped += int64(len(b)) - kept
	if err != nil {
		why, s.out.Error = sandbox.DroppedDisk, plain(err.Error())
	}
	if kept < int64(len(b)) {
		s.full, s.out.DroppedBy = true, why // what is kept has no holes
	}
	s.mu.Unlock()
	s.changed()
}

// reserve returns how many of n bytes may be kept, and why not all of them. A stream
// takes whole blocks of the room, and one for its name and its part of the folder.
func (s *stream) reserve(n int64) (may int64, why string) {
	s.mu.Lock()
	kept, full, charged, why := s.out.Kept, s.full, s.charged, s.out.DroppedBy
	s.mu.Unlock()
	if full {
		return 0, why
	}
	if may = min(n, s.limit-kept); may < n {
		why = sandbox.DroppedLimit
	}
	if s.room == nil || may <= 0 {
		return may, why
	}
	if need := (kept+may+block-1)/block*block + block - charged; need > 0 {
		charged += s.room.take(need)
		s.mu.Lock()
		s.charged = charged
		s.mu.Unlock()
	}
	if there := max(0, charged-block-kept); there < may {
		may, why = there, sandbox.DroppedSandbox
	}
	return may, why
}

// forget counts what is kept as dropped, and returns what it had of the room.
func (s *stream) forget() (freed int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.out.Kept > 0 {
		s.out.Dropped, s.out.Kept, s.out.DroppedBy = s.out.Dropped+s.out.Kept, 0, sandbox.DroppedOld
	}
	freed, s.charged = s.charged, 0
	return freed
}

// discard reads what processes that outlive their command write, so that they are
// not stopped by a pipe that nobody reads.
func (s *stream) discard() {
	s.from.SetReadDeadline(time.Time{})
	raw, err := s.from.SyscallConn()
	if err != nil {
		return
	}
	for {
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			b := buffers.Get().(*[readSize]byte)
			defer buffers.Put(b)
			_, failed = readNow(int(fd), b[:])
			return !errors.Is(failed, unix.EAGAIN)
		})
		if err != nil || failed != nil {
			return
		}
	}
}

// lazyFile is made with its first byte.
type lazyFile struct {
	path string
	f    *os.File
}

func (w *lazyFile) write(b []byte) (int, error) {
	if w.f == nil {
		if err := os.MkdirAll(filepath.Dir(w.path), 0o700); err != nil {
			return 0, err
		}
		f, err := os.OpenFile(w.path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			return 0, err
		}
		w.f = f
	}
	n, err := w.f.Write(b)
	return max(n, 0), err
}

func (w *lazyFile) close() {
	if w.f != nil {
		w.f.Close()
	}
}

// outputPipe returns a pipe whose reading end does not block.
func outputPipe() (read, write *os.File, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	if err := unix.SetNonblock(p[0], true); err != nil {
		return nil, nil, errors.Join(err, unix.Close(p[0]), unix.Close(p[1]))
	}
	return os.NewFile(uintptr(p[0]), "output"), os.NewFile(uintptr(p[1]), "output"), nil
}

// inputPipe returns a pipe whose writing end does not block.
func inputPipe() (read, write *os.File, err error) {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, err
	}
	if err := unix.SetNonblock(p[1], true); err != nil {
		return nil, nil, errors.Join(err, unix.Close(p[0]), unix.Close(p[1]))
	}
	return os.NewFile(uintptr(p[0]), "input"), os.NewFile(uintptr(p[1]), "input"), nil
}
