package fdpass_test

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"

	"quarry/internal/fdpass"
)

// pair returns both ends of a connection.
func pair(t *testing.T) (a, b *net.UnixConn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	d, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); d.Close() })
	return c.(*net.UnixConn), d.(*net.UnixConn)
}

func TestFilesComeWithTheFirstByte(t *testing.T) {
	a, b := pair(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	large := make([]byte, 1<<20)
	sent := make(chan error, 1)
	go func() { sent <- errors.Join(fdpass.Write(a, large, []*os.File{w}), w.Close(), a.Close()) }()
	n, files, all, err := fdpass.Read(b, make([]byte, 16), 2)
	if err != nil || n != 16 || len(files) != 1 || !all {
		t.Fatalf("%d bytes, %d files, all %t, %v", n, len(files), all, err)
	}
	rest, err := io.Copy(io.Discard, b)
	if err != nil || rest != int64(len(large)-n) {
		t.Errorf("%d bytes follow, %v", rest, err)
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
	if _, err := files[0].WriteString("x"); err != nil {
		t.Error(err)
	}
	fdpass.Close(files)
	if got, err := io.ReadAll(r); err != nil || string(got) != "x" {
		t.Errorf("the file is another: %q, %v", got, err)
	}
	if n, files, _, err := fdpass.Read(b, make([]byte, 16), 2); n != 0 || len(files) != 0 || !errors.Is(err, io.EOF) {
		t.Errorf("at the end: %d bytes, %d files, %v", n, len(files), err)
	}
}

func TestMoreFilesThanWantedAreSeen(t *testing.T) {
	a, b := pair(t)
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	// Enough that the space of a control message, which is rounded up, does not hold them.
	if err := fdpass.Write(a, []byte("x"), []*os.File{null, null, null, null, null}); err != nil {
		t.Fatal(err)
	}
	_, files, all, err := fdpass.Read(b, make([]byte, 1), 1)
	defer fdpass.Close(files)
	if err != nil || all || len(files) > 2 {
		t.Errorf("%d files, all %t, %v", len(files), all, err)
	}
}
