package guest

import (
	"context"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"
	"unicode/utf8"

	"quarry/worker/guest/wire"
	"quarry/worker/sandbox"
)

// wholeMax is up to what size a file of a paused guest is kept in memory.
const wholeMax = 1 << 20

// ErrUnclear says that what came of a file of a paused guest does not tell whether it
// is one: no byte comes of an empty file and of /dev/null, and no end of a device like
// /dev/zero. The Sentry has no call that says the type. It is a sandbox.ErrNotReady,
// since Read knows, in a guest that runs.
var ErrUnclear = fmt.Errorf("%w: it is paused", sandbox.ErrNotReady)

// ErrEmpty is ErrUnclear of what gave no byte: an empty file or a null device, and of all
// that has a name nothing else. Who cannot have the guest run may take it for a file, by
// Empty: it reads as one.
var ErrEmpty = fmt.Errorf("%w, and no byte came", ErrUnclear)

// ReadPaused is Read without a process of the guest, which may be paused. It reads the
// whole file before the first byte is passed on, since nothing else says its size, and
// knows neither mode nor owner nor time. A path must be UTF-8 and its last element no
// symlink: the Sentry follows none there. What may be a device is ErrUnclear, before
// begin is called; a fifo is sandbox.ErrFileStuck after Limits.Paused.
func (f *Files) ReadPaused(ctx context.Context, name string, o sandbox.ReadOptions, begin func(sandbox.FileInfo) error, w io.Writer) error {
	p, err := f.resolve(name)
	if err != nil {
		return err
	}
	if !utf8.ValidString(p) {
		return fmt.Errorf("%w: %q is not UTF-8: it cannot be read while the sandbox is paused", sandbox.ErrFilePath, p)
	}
	if !o.Valid() {
		return fmt.Errorf("%w: offset %d and length %d", sandbox.ErrInvalid, o.Offset, o.Length)
	}
	if c := path.Clean(p); (c == "/dev" || strings.HasPrefix(c, "/dev/")) && !strings.HasPrefix(c, "/dev/shm/") {
		return fmt.Errorf("%w: %q is a device, and not a regular file", sandbox.ErrFileType, p)
	}
	k, err := f.cat(p)
	if err != nil {
		return err
	}
	defer k.out.Close()
	s := &spool{dir: f.c.Spool}
	defer s.close()
	if _, err := io.Copy(s, &catReader{ctx: ctx, k: k, path: p, idle: f.c.Limits.Paused, most: f.c.Limits.PausedBytes}); err != nil {
		f.giveUp(p, k)
		return err
	}
	if s.size == 0 {
		return fmt.Errorf("%w of %q, which is an empty file or a device: resume it and read again", ErrEmpty, p)
	}
	if err := begin(sandbox.FileInfo{Path: p, Type: sandbox.TypeFile, Size: s.size}); err != nil {
		return err
	}
	return s.copyPart(w, o)
}

// Empty calls begin with a file of which ReadPaused has said ErrEmpty.
func (f *Files) Empty(name string, begin func(sandbox.FileInfo) error) error {
	p, err := f.resolve(name)
	if err != nil {
		return err
	}
	return begin(sandbox.FileInfo{Path: p, Type: sandbox.TypeFile})
}

// spool keeps what is written to it, in memory or, when it is much, in a file of the
// host that has no name.
type spool struct {
	dir  string
	size int64
	buf  []byte
	file *os.File
}

func (s *spool) Write(p []byte) (int, error) {
	s.size += int64(len(p))
	if s.file == nil && len(s.buf)+len(p) <= wholeMax {
		s.buf = append(s.buf, p...)
		return len(p), nil
	}
	if s.file == nil {
		f, err := nameless(s.dir)
		if err != nil {
			return 0, err
		}
		s.file = f
		if _, err := f.Write(s.buf); err != nil {
			return 0, fmt.Errorf("keep what is read: %w", err)
		}
		s.buf = nil
	}
	return s.file.Write(p)
}

// nameless makes a file that goes with its descriptor.
func nameless(dir string) (*os.File, error) {
	if dir != "" {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return nil, fmt.Errorf("folder of the host: %w", err)
		}
	}
	f, err := os.CreateTemp(dir, ".spool-")
	if err != nil {
		return nil, fmt.Errorf("file of the host: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		f.Close()
		return nil, fmt.Errorf("file of the host: %w", err)
	}
	return f, nil
}

func (s *spool) copyPart(w io.Writer, o sandbox.ReadOptions) error {
	from, n := o.Part(s.size)
	from = min(from, s.size)
	if s.file == nil {
		_, err := w.Write(s.buf[from:][:n])
		return err
	}
	_, err := io.Copy(w, io.NewSectionReader(s.file, from, n))
	return err
}

func (s *spool) close() {
	if s.file != nil {
		s.file.Close()
	}
}

// reading is one Cat. It ends with its RPC, which may be never: then it counts as
// stuck until it does.
type reading struct {
	out  *os.File
	done chan struct{} // closed when the RPC has come back; then err is set
	err  error
}

// cat begins to read a file.
func (f *Files) cat(p string) (*reading, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, os.ErrClosed
	}
	if f.reading >= f.c.Limits.Stuck {
		return nil, fmt.Errorf("%w: %d reads of this sandbox have not come back", sandbox.ErrFileStuck, f.reading)
	}
	out, in, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("pipe of a read: %w", err)
	}
	grow(out)
	f.reading++
	f.cats.Add(1)
	k := &reading{out: out, done: make(chan struct{})}
	// It ends with the RPC, when the sandbox has ended, or with Close.
	go func() {
		defer f.cats.Done()
		k.err = f.c.Runner.Cat(f.life, p, in)
		in.Close()
		f.mu.Lock()
		f.reading--
		f.mu.Unlock()
		close(k.done)
	}()
	return k, nil
}

// giveUp remembers a read that did not come back, for free.
func (f *Files) giveUp(p string, k *reading) {
	select {
	case <-k.done:
		return
	default:
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stuck == nil {
		f.stuck = map[string]bool{}
	}
	f.stuck[p] = true // there are no more than readings
}

// free has a helper open the other end of the fifos that reads of the paused guest
// wait for, now that it runs. What else a read may wait for it does not touch.
func (f *Files) free(ctx context.Context) {
	f.mu.Lock()
	paths := f.stuck
	f.stuck = nil
	f.mu.Unlock()
	for p := range paths {
		if _, err := f.ask(ctx, f.c.Runner.Run, wire.Request{Op: wire.OpUnblock, Path: p}, wire.KindEnd); err != nil {
			f.c.Log.DebugContext(ctx, "read of a paused guest is not let go", "path", p, "err", err)
		}
	}
}

// Close ends the reads of a paused guest that are under way. No other may begin.
func (f *Files) Close() {
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	f.end()
	f.cats.Wait()
}

// catReader reads what a Cat gives, with a bound and a time for each read. Its end is
// io.EOF only when the RPC has said that the file was read to its end.
type catReader struct {
	ctx  context.Context
	k    *reading
	path string
	idle time.Duration
	most int64
	got  int64
}

func (r *catReader) Read(p []byte) (int, error) {
	n, err := guard(r.ctx, r.idle, r.k.out.SetReadDeadline, func() (int, error) { return r.k.out.Read(p) })
	if r.got += int64(n); r.got > r.most {
		return 0, fmt.Errorf("%w, and %q has more than the %d bytes that are read then, or is a device: resume it and read again", ErrUnclear, r.path, r.most)
	}
	if err != io.EOF {
		return n, err
	}
	select {
	case <-r.k.done:
	case <-r.ctx.Done():
		return n, r.ctx.Err()
	}
	if r.k.err != nil {
		return n, said(r.k.err)
	}
	return n, io.EOF
}

// said makes an error of what the Sentry answered to a Cat. There is only its text,
// which ends with that of an errno.
func said(err error) error {
	text := err.Error()
	for _, s := range sentences {
		if strings.HasSuffix(text, s.end) {
			return fmt.Errorf("%w: %s", s.kind, text) // not err, which may be of another kind
		}
	}
	return fmt.Errorf("read of a paused sandbox: %w", err)
}

var sentences = []struct {
	end  string
	kind error
}{
	{"no such file or directory", sandbox.ErrFileNotFound},
	{"is a directory", sandbox.ErrFileType},
	{"not a directory", sandbox.ErrFileType},
	{"no such device or address", sandbox.ErrFileType},
	{"no such device", sandbox.ErrFileType},
	{"file descriptor in bad state", sandbox.ErrFileType},
	{"invalid argument", sandbox.ErrFileType},
	{"operation not permitted", sandbox.ErrFileType},
	{"permission denied", sandbox.ErrFilePath},
	{"too many symbolic links encountered", sandbox.ErrFilePath},
	{"file name too long", sandbox.ErrFilePath},
	{"I/O error", sandbox.ErrFileStuck},
}
