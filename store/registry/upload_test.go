package registry_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"quarry/store/bucket/buckettest"
	"quarry/store/registry"
)

// wantFiles checks how many uploads are on disk.
func wantFiles(t *testing.T, l *lab, want int) {
	t.Helper()
	entries, err := os.ReadDir(l.cfg.Dir)
	must(t, err)
	if len(entries) != want {
		t.Errorf("%d files of uploads are there, want %d", len(entries), want)
	}
}

func wantOffset(t *testing.T, l *lab, id string, want int64) {
	t.Helper()
	if got, err := l.UploadOffset("a", id); err != nil || got != want {
		t.Errorf("offset: got %d, %v, want %d", got, err, want)
	}
}

// brokenBody breaks off after its bytes.
type brokenBody struct{ io.Reader }

func (b brokenBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return n, err
}

// Bug 53: the offset is what is stored, always.
func TestAnUploadGoesOnWhereItIsStored(t *testing.T) {
	l := newLab(t, nil)
	id, err := l.StartUpload("a", "")
	must(t, err)
	wantOffset(t, l, id, 0)
	content := bytes.Repeat([]byte("0123456789"), 1<<16)
	add := func(from, to, at, size int64, broken bool, want error) {
		t.Helper()
		p := registry.Part{Body: bytes.NewReader(content[from:to]), At: at, Size: size}
		if broken {
			p.Body = brokenBody{p.Body}
		}
		_, err := l.AppendUpload("a", id, p)
		wantErr(t, "append", err, want)
	}
	add(0, 0, -1, 0, false, nil)
	wantOffset(t, l, id, 0)
	add(0, 1000, 0, 1000, false, nil)
	add(1000, 1500, -1, -1, false, nil)
	wantOffset(t, l, id, 1500)
	add(0, 1000, 0, 1000, false, registry.ErrUploadRange)
	add(1501, 1600, 1501, 99, false, registry.ErrUploadRange)
	wantOffset(t, l, id, 1500)
	add(1500, 300000, 1500, 400000, true, registry.ErrBody)
	wantOffset(t, l, id, 300000)
	add(300000, 300010, 300000, 20, false, registry.ErrSizeInvalid)
	wantOffset(t, l, id, 300010)
	add(300010, 300030, 300010, 10, false, registry.ErrSizeInvalid)
	wantOffset(t, l, id, 300010)
	l.open(t) // a restart
	wantOffset(t, l, id, 300010)
	_, err = l.UploadOffset("b", id)
	wantErr(t, "of another repository", err, registry.ErrUploadUnknown)

	d := digest.FromBytes(content)
	must(t, l.FinishUpload(t.Context(), "a", id, part(content[300010:]), d))
	if got, err := read(t, l, "a", d); err != nil || !bytes.Equal(got, content) {
		t.Errorf("got %d bytes, %v", len(got), err)
	}
	_, err = l.UploadOffset("a", id)
	wantErr(t, "after the end", err, registry.ErrUploadUnknown)
	wantFiles(t, l, 0)
}

func TestTwoNeverWriteToOneUpload(t *testing.T) {
	l := newLab(t, nil)
	id, err := l.StartUpload("a", "")
	must(t, err)
	r, w := io.Pipe()
	done := make(chan error)
	go func() {
		_, err := l.AppendUpload("a", id, registry.Part{Body: r, At: 0, Size: -1})
		done <- err
	}()
	_, err = w.Write([]byte("first")) // it is being read now
	must(t, err)
	_, err = l.AppendUpload("a", id, part([]byte("second")))
	wantErr(t, "another append", err, registry.ErrUploadBusy)
	wantErr(t, "finish", l.FinishUpload(t.Context(), "a", id, registry.Part{}, digest.FromString("")), registry.ErrUploadBusy)
	wantErr(t, "cancel", l.CancelUpload("a", id), registry.ErrUploadBusy)
	w.Close()
	must(t, <-done)
	must(t, l.FinishUpload(t.Context(), "a", id, registry.Part{}, digest.FromString("first")))
}

func TestUploadsAreBounded(t *testing.T) {
	now := time.Now()
	l := newLab(t, func(c *registry.Config) {
		c.UploadSpace, c.MaxUploads, c.MaxBlob, c.UploadIdle = 100, 3, 90, time.Hour
		c.Now = func() time.Time { return now }
	})
	start := func() string {
		t.Helper()
		id, err := l.StartUpload("a", "")
		must(t, err)
		return id
	}
	one, two, three := start(), start(), start()
	_, err := l.StartUpload("a", "")
	wantErr(t, "one upload too many", err, registry.ErrUploads)
	_, err = l.AppendUpload("a", one, part(make([]byte, 91)))
	wantErr(t, "a blob too large", err, registry.ErrTooLarge)
	_, err = l.AppendUpload("a", one, part(make([]byte, 60)))
	must(t, err)
	_, err = l.AppendUpload("a", two, part(make([]byte, 41)))
	wantErr(t, "too much together", err, registry.ErrUploadSpace)
	_, err = l.AppendUpload("a", two, registry.Part{Body: bytes.NewReader(make([]byte, 41)), At: -1, Size: -1})
	wantErr(t, "too much together, length unknown", err, registry.ErrUploadSpace)
	wantOffset(t, l, two, 0)
	must(t, l.CancelUpload("a", one))
	_, err = l.AppendUpload("a", two, part(make([]byte, 90)))
	must(t, err)

	now = now.Add(50 * time.Minute)
	_, err = l.AppendUpload("a", three, part(make([]byte, 10)))
	must(t, err)
	now = now.Add(11 * time.Minute)
	start() // drops two, which is idle
	_, err = l.UploadOffset("a", two)
	wantErr(t, "an idle upload", err, registry.ErrUploadUnknown)
	wantOffset(t, l, three, 10)
	_, err = l.AppendUpload("a", three, part(make([]byte, 80)))
	must(t, err)
	wantFiles(t, l, 2)
	now = time.Now() // that of the files
	l.open(t)
	_, err = l.AppendUpload("a", start(), part(make([]byte, 11)))
	wantErr(t, "too much after a restart", err, registry.ErrUploadSpace)
}

// One token cannot keep the others from pushing: neither with uploads that it begins,
// nor with their bytes.
func TestAHolderIsBounded(t *testing.T) {
	now := time.Now()
	l := newLab(t, func(c *registry.Config) {
		c.UploadSpace, c.MaxUploads, c.UploadIdle = 100, 8, 24*time.Hour
		c.Now = func() time.Time { return now }
	})
	start := func(holder string, want error) string {
		t.Helper()
		id, err := l.StartUpload("a", holder)
		wantErr(t, "start an upload of "+holder, err, want)
		return id
	}
	add := func(id string, n int, want error) {
		t.Helper()
		_, err := l.AppendUpload("a", id, part(make([]byte, n)))
		wantErr(t, "append", err, want)
	}
	greedy, empty := start("greedy", nil), start("greedy", nil)
	start("greedy", registry.ErrHolderUploads)
	honest := start("honest", nil)
	add(greedy, 70, nil)
	add(empty, 6, registry.ErrHolderSpace)
	add(honest, 25, nil)
	must(t, l.CancelUpload("a", greedy)) // gives its bytes back
	greedy = start("greedy", nil)
	add(greedy, 75, nil)

	// What nothing was sent of goes soon, and makes room; what has bytes stays a day, or
	// until its holder needs the room.
	start("greedy", registry.ErrHolderUploads)
	now = now.Add(11 * time.Minute)
	more := start("greedy", nil)
	_, err := l.UploadOffset("a", empty)
	wantErr(t, "an empty upload", err, registry.ErrUploadUnknown)
	wantOffset(t, l, greedy, 75)
	add(more, 76, registry.ErrHolderSpace)
	wantOffset(t, l, honest, 25)
	add(more, 1, nil)
	_, err = l.UploadOffset("a", greedy)
	wantErr(t, "an idle upload whose holder needs room", err, registry.ErrUploadUnknown)
	wantOffset(t, l, honest, 25)
}

// What a client left behind is in nobody's way for longer than some minutes: as much of
// it goes as another upload lacks, and none when all of it would not do.
func TestIdleUploadsMakeRoom(t *testing.T) {
	now := time.Now()
	l := newLab(t, func(c *registry.Config) {
		c.UploadSpace = 100
		c.Now = func() time.Time { return now }
	})
	start := func(size int) string {
		t.Helper()
		id, err := l.StartUpload("a", "")
		must(t, err)
		_, err = l.AppendUpload("a", id, part(make([]byte, size)))
		must(t, err)
		now = now.Add(time.Second)
		return id
	}
	oldest, old := start(40), start(40)
	now = now.Add(4 * time.Minute)
	fresh, err := l.StartUpload("a", "")
	must(t, err)
	_, err = l.AppendUpload("a", fresh, part(make([]byte, 30)))
	wantErr(t, "while the others may go on", err, registry.ErrUploadSpace)
	_, err = l.AppendUpload("a", fresh, part(make([]byte, 10)))
	must(t, err)
	now = now.Add(2 * time.Minute)
	_, err = l.AppendUpload("a", fresh, part(make([]byte, 91)))
	wantErr(t, "more than there can be", err, registry.ErrUploadSpace)
	wantOffset(t, l, oldest, 40)
	_, err = l.AppendUpload("a", fresh, registry.Part{Body: bytes.NewReader(make([]byte, 30)), At: -1, Size: -1})
	must(t, err)
	_, err = l.UploadOffset("a", oldest)
	wantErr(t, "the oldest", err, registry.ErrUploadUnknown)
	wantOffset(t, l, old, 40)
	_, err = l.AppendUpload("a", fresh, part(make([]byte, 60)))
	must(t, err)
	wantOffset(t, l, fresh, 100)
	wantFiles(t, l, 1)
}

// Who sends a blob slowly, or lies about it, holds up nobody who pushes the same digest.
func TestASlowLiarBlocksNobody(t *testing.T) {
	l := newLab(t, nil)
	content := []byte("what the digest is of")
	d := digest.FromBytes(content)
	id, err := l.StartUpload("liar", "")
	must(t, err)
	r, w := io.Pipe()
	done := make(chan error)
	go func() { done <- l.FinishUpload(t.Context(), "liar", id, registry.Part{Body: r, At: -1, Size: -1}, d) }()
	_, err = w.Write([]byte("a lie")) // it is being read now
	must(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	honest, err := l.StartUpload("honest", "")
	must(t, err)
	must(t, l.FinishUpload(ctx, "honest", honest, part(content), d))
	if got, err := read(t, l, "honest", d); err != nil || !bytes.Equal(got, content) {
		t.Errorf("got %q, %v", got, err)
	}
	w.Close()
	wantErr(t, "the lie", <-done, registry.ErrDigestInvalid)
	if _, err := l.Blob(t.Context(), "liar", d); !errors.Is(err, registry.ErrBlobUnknown) {
		t.Errorf("the liar's repository has the blob: %v", err)
	}
}

func TestAFileCutOffAtItsStartIsNoUpload(t *testing.T) {
	l := newLab(t, nil)
	must(t, os.WriteFile(filepath.Join(l.cfg.Dir, "X"), []byte("{"), 0o600))
	must(t, os.WriteFile(filepath.Join(l.cfg.Dir, "Y"), []byte(strings.Repeat(" ", 600)), 0o600))
	l.open(t)
	wantFiles(t, l, 0)
}

// A bucket that fails when the blob is stored costs the client one more request,
// not the upload.
func TestAnUploadOutlivesAFaultOfTheBucket(t *testing.T) {
	for n := int64(1); n <= 2; n++ { // content, record
		l := newLab(t, func(c *registry.Config) {
			c.Bucket = &buckettest.Faulty{Bucket: c.Bucket, Before: buckettest.FailNth(n, "Put")}
		})
		id, err := l.StartUpload("a", "")
		must(t, err)
		d := digest.FromString("layer")
		wantErr(t, "finish", l.FinishUpload(t.Context(), "a", id, part([]byte("layer")), d), buckettest.ErrInjected)
		if _, err := l.Blob(t.Context(), "a", d); !errors.Is(err, registry.ErrBlobUnknown) {
			t.Errorf("the blob is there: %v", err)
		}
		must(t, l.FinishUpload(t.Context(), "a", id, registry.Part{}, d))
		if got, err := read(t, l, "a", d); err != nil || string(got) != "layer" {
			t.Errorf("got %q, %v", got, err)
		}
	}
}

// What a node needs of the disk is not for uploads.
func TestUploadsLeaveRoom(t *testing.T) {
	l := newLab(t, func(c *registry.Config) { c.KeepFree = 1 << 60 })
	id, err := l.StartUpload("a", "")
	must(t, err)
	_, err = l.AppendUpload("a", id, part([]byte("x")))
	wantErr(t, "a disk with less than is kept free", err, syscall.ENOSPC)
	wantOffset(t, l, id, 0)
	wantFiles(t, l, 1)

	if n, _, err := registry.MakeRoom(l.cfg.Dir, 1); n != 0 || err != nil {
		t.Errorf("with room: %d removed, %v", n, err)
	}
	wantFiles(t, l, 1)
	if n, size, err := registry.MakeRoom(l.cfg.Dir, 1<<60); n != 0 || size != 0 || err != nil {
		t.Errorf("where uploads are not enough: %d removed, %d bytes, %v", n, size, err)
	}
	wantFiles(t, l, 1)
	if _, _, err := registry.MakeRoom(filepath.Join(l.cfg.Dir, "none"), 1); err != nil {
		t.Errorf("without a folder: %v", err)
	}
}
