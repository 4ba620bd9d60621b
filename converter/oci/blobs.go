package oci

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"quarry/store/chunk"
)

// errNoBlob says that the source has no file of that name.
var errNoBlob = errors.New("blob is missing from the source")

// blobs is the files of a layout, by their names in it.
type blobs interface {
	// open returns a file and its size, or errNoBlob.
	open(name string) (io.ReadCloser, int64, error)
	io.Closer
}

func blobName(d chunk.Digest) string { return "blobs/sha256/" + d.Hex() }

// readBlob reads a small file whole; more than limit bytes are refused unread.
func readBlob(b blobs, name string, limit int64) ([]byte, error) {
	r, size, err := b.open(name)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	defer r.Close()
	if size > limit {
		return nil, fmt.Errorf("%s has %d bytes, at most %d are read", name, size, limit)
	}
	p := make([]byte, size)
	if _, err := io.ReadFull(r, p); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return p, nil
}

// readVerified reads the document that d describes and compares size and digest.
func readVerified(b blobs, d descriptor, limit int64) ([]byte, error) {
	want, err := digestOf(d)
	if err != nil {
		return nil, err
	}
	p, err := readBlob(b, blobName(want), limit)
	if err != nil {
		return nil, err
	}
	if int64(len(p)) != d.Size {
		return nil, fmt.Errorf("blob %s has %d bytes, its descriptor says %d", want, len(p), d.Size)
	}
	if got := chunk.Sum(p); got != want {
		return nil, fmt.Errorf("blob %s is damaged: its content has digest %s", want, got)
	}
	return p, nil
}

// folder is a layout in a folder.
type folder string

var _ blobs = folder("")

func openFolder(_ context.Context, rest string) (blobs, selector, error) {
	dir, sel, err := parseSelector(rest, func(p string) bool {
		st, err := os.Stat(p)
		return err == nil && st.IsDir()
	})
	if err != nil {
		return nil, sel, err
	}
	if _, err := os.Stat(filepath.Join(dir, "oci-layout")); err != nil {
		return nil, sel, fmt.Errorf("%s is not an OCI layout: %w", dir, err)
	}
	return folder(dir), sel, nil
}

func (f folder) open(name string) (io.ReadCloser, int64, error) {
	file, size, err := openRegular(filepath.Join(string(f), filepath.FromSlash(name)))
	if errors.Is(err, os.ErrNotExist) {
		return nil, 0, errNoBlob
	}
	if err != nil {
		return nil, 0, err
	}
	return file, size, nil
}

// openRegular opens a regular file and returns its size. Anything else is
// refused unopened, because opening a device can change it; and should a file
// become a FIFO in between, O_NONBLOCK keeps the open from waiting for a writer
// that never comes, which no context could end.
func openRegular(name string) (*os.File, int64, error) {
	st, err := os.Stat(name)
	if err != nil {
		return nil, 0, err
	}
	if !st.Mode().IsRegular() {
		return nil, 0, fmt.Errorf("%s is not a regular file", name)
	}
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	if st, err = f.Stat(); err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", name)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, st.Size(), nil
}

func (f folder) Close() error { return nil }

// maxMembers bounds the index of an archive: 1000 layers of many images, and
// 200 bytes of memory each.
const maxMembers = 1 << 20

// archive is a layout in a tar file, which is read once to learn where the
// members are and then at those places only.
type archive struct {
	file    *os.File
	members map[string]member
}

var _ blobs = (*archive)(nil)

type member struct {
	off, size int64
	typeflag  byte
}

func openArchive(ctx context.Context, rest string) (blobs, selector, error) {
	name, sel, err := parseSelector(rest, func(p string) bool {
		st, err := os.Stat(p)
		return err == nil && st.Mode().IsRegular()
	})
	if err != nil {
		return nil, sel, err
	}
	f, _, err := openRegular(name)
	if err != nil {
		return nil, sel, err
	}
	a := &archive{file: f, members: map[string]member{}}
	if err := a.scan(ctx); err != nil {
		return nil, sel, errors.Join(err, f.Close())
	}
	if _, ok := a.members["oci-layout"]; !ok {
		return nil, sel, errors.Join(fmt.Errorf("%s is not an archive of an OCI layout: it has no oci-layout", name), f.Close())
	}
	return a, sel, nil
}

func (a *archive) scan(ctx context.Context) error {
	var head [4]byte
	if _, err := io.ReadFull(a.file, head[:]); err != nil {
		return fmt.Errorf("too short for a tar archive: %w", err)
	}
	if bytes.HasPrefix(head[:], []byte("\x1f\x8b")) || bytes.Equal(head[:], []byte("\x28\xb5\x2f\xfd")) {
		return errors.New("the archive is compressed as a whole: decompress it first, it is read at random places")
	}
	if _, err := a.file.Seek(0, io.SeekStart); err != nil {
		return err
	}
	tr := tar.NewReader(a.file) // seeks over content, since the file can
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read archive: %w", err)
		}
		if len(a.members) >= maxMembers {
			return fmt.Errorf("the archive has more than %d members", maxMembers)
		}
		off, err := a.file.Seek(0, io.SeekCurrent)
		if err != nil {
			return err
		}
		m := member{off: off, size: h.Size, typeflag: h.Typeflag}
		if isSparse(h) {
			m.typeflag = tar.TypeGNUSparse
		}
		a.members[strings.TrimPrefix(path.Clean("/"+h.Name), "/")] = m
	}
}

func isSparse(h *tar.Header) bool {
	for k := range h.PAXRecords {
		if strings.HasPrefix(k, "GNU.sparse.") {
			return true
		}
	}
	return false
}

func (a *archive) open(name string) (io.ReadCloser, int64, error) {
	m, ok := a.members[name]
	if !ok {
		return nil, 0, errNoBlob
	}
	if m.typeflag != tar.TypeReg {
		return nil, 0, fmt.Errorf("member %s is not a plain file but of tar type %q", name, m.typeflag)
	}
	return io.NopCloser(io.NewSectionReader(a.file, m.off, m.size)), m.size, nil
}

// Close closes the archive's file.
func (a *archive) Close() error { return a.file.Close() }
