package attach

import (
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
)

// silent is a Source that answers nothing before its reads are cancelled.
type silent struct{ asked chan struct{} }

func (s silent) Size() int64 { return 1 << 20 }

func (s silent) View(ctx context.Context, _ int64, _ int, _ func([]byte) error) error {
	s.asked <- struct{}{}
	<-ctx.Done()
	return ctx.Err()
}

// TestMalformedRequestEndsTheConnection plays a kernel that asks nonsense.
func TestMalformedRequestEndsTheConnection(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	wake, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	s := &fuseServer{
		src: silent{}, errs: &errorLog{log: slog.New(slog.DiscardHandler)},
		fd: fds[0], wake: wake, cancel: func() {}, ended: make(chan struct{}),
	}
	s.loop.Go(func() { s.serve(t.Context()) })
	kernel := os.NewFile(uintptr(fds[1]), "kernel")
	defer kernel.Close()
	if _, err := kernel.Write([]byte("nonsense")); err != nil {
		t.Fatal(err)
	}
	<-s.ended
	patience := unix.NsecToTimeval(time.Minute.Nanoseconds())
	if err := unix.SetsockoptTimeval(fds[1], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &patience); err != nil {
		t.Fatal(err)
	}
	if n, err := unix.Read(fds[1], make([]byte, 1)); n != 0 || err != nil {
		t.Errorf("read of the other end: %d, %v; want its end", n, err)
	}
	s.stop()
}

// TestAbortFailsEveryRead shows of a real kernel what a server that has ended does:
// the read that waits fails, and the next one.
func TestAbortFailsEveryRead(t *testing.T) {
	need.Root(t)
	dir := t.TempDir()
	src := silent{asked: make(chan struct{}, 1)}
	s, err := startFUSE(t.Context(), dir, Config{Source: src, Deadline: DefaultDeadline, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unmountAll(context.Background(), dir, busyGrace, nil); err != nil {
			t.Error(err)
		}
		s.stop()
	})
	f, err := os.Open(filepath.Join(dir, imageName))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	waits := make(chan error, 1)
	go func() { // ends with the connection
		_, err := f.ReadAt(make([]byte, 4096), 0)
		waits <- err
	}()
	<-src.asked
	unix.Write(s.wake, binary.NativeEndian.AppendUint64(nil, 1))
	<-s.ended
	if err := s.abort(); err != nil {
		t.Fatal(err)
	}
	if err := <-waits; !errors.Is(err, unix.ECONNABORTED) && !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("the read that waited: %v", err)
	}
	if _, err := f.ReadAt(make([]byte, 4096), 8192); !errors.Is(err, unix.ENOTCONN) {
		t.Errorf("the next read: %v", err)
	}
}

func TestNamesOfImages(t *testing.T) {
	for file, want := range map[string]bool{
		"/w/mounts/x/fuse/image\n": true,
		"/image\n":                 true, // of a file system that is gone
		"/x/image\n":               false,
		"/x/notfuse/image\n":       false,
		"/w/fuse/image.erofs\n":    false,
		"":                         false,
	} {
		if got := isImage(file); got != want {
			t.Errorf("%q: got %v, want %v", file, got, want)
		}
	}
}
