package oci

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"quarry/converter/layer"
)

// Maxima of an archive's index, which is held in memory.
const (
	maxMembers     = 1 << 20   // 1000 layers of many images; 200 bytes each
	maxMemberNames = 256 << 20 // their names and link targets: 256 bytes each of so many
)

// maxLinks is how many links in a row a member may be behind.
const maxLinks = 16

// archive is a tar file of a layout or of docker save, which is read once to
// learn where the members are and then at those places only. Links in it lead to
// other members and nowhere else: nothing is ever looked up on the host.
type archive struct {
	name    string // of the file, for messages
	plain   *os.File
	members map[string]member
}

var _ files = (*archive)(nil)

type member struct {
	off, size int64
	typeflag  byte
	link      string
}

func openArchive(ctx context.Context, rest string, cfg Config) (*archive, selector, error) {
	name, sel, err := parseSelector(rest, func(p string) bool {
		st, err := os.Stat(p)
		return err == nil && st.Mode().IsRegular()
	})
	if err != nil {
		return nil, sel, err
	}
	f, size, err := openRegular(name)
	if err != nil {
		return nil, sel, err
	}
	if f, err = decompressed(ctx, f, size, cfg); err != nil {
		return nil, sel, err
	}
	a := &archive{name: name, plain: f, members: map[string]member{}}
	if err := a.scan(ctx); err != nil {
		return nil, sel, errors.Join(err, f.Close())
	}
	return a, sel, nil
}

// decompressed returns f, or when it is compressed as a whole, as docker load
// and podman load take it too, a nameless file with its plain bytes: members are
// read at random places. f is closed unless it is what is returned.
func decompressed(ctx context.Context, f *os.File, size int64, cfg Config) (*os.File, error) {
	head := make([]byte, 512)
	n, err := f.ReadAt(head, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, errors.Join(err, f.Close())
	}
	if !layer.Compressed(head[:n]) {
		return f, nil
	}
	defer f.Close() // it was only read
	in := &spool{f: f, size: size, told: cfg.Spooled}
	r, err := layer.Decompress(in, size, cfg.Limits)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	tmp, err := os.CreateTemp(cfg.TmpDir, "quarry-archive-")
	if err != nil {
		return nil, err
	}
	err = os.Remove(tmp.Name()) // its space is free again when this process ends
	if err == nil {
		_, err = io.Copy(io.MultiWriter(tmp, in), withContext(ctx, r))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("decompress the archive: %w", err), tmp.Close())
	}
	return tmp, nil
}

// spoolStep is after how many plain bytes a spool tells how far it is.
const spoolStep = 64 << 20

// spool counts what goes into and out of a decompressor: it is read, and its
// output written to it.
type spool struct {
	f                 io.Reader
	read, size, plain int64
	told              func(read, size, plain int64)
}

func (s *spool) Read(p []byte) (int, error) {
	n, err := s.f.Read(p)
	s.read += int64(n)
	return n, err
}

func (s *spool) Write(p []byte) (int, error) {
	before := s.plain / spoolStep
	if s.plain += int64(len(p)); s.told != nil && s.plain/spoolStep > before {
		s.told(s.read, s.size, s.plain)
	}
	return len(p), nil
}

// withContext makes a reader fail when ctx ends.
func withContext(ctx context.Context, r io.Reader) io.Reader {
	return readFunc(func(p []byte) (int, error) {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		return r.Read(p)
	})
}

type readFunc func(p []byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

func (a *archive) scan(ctx context.Context) error {
	if _, err := a.plain.Seek(0, io.SeekStart); err != nil {
		return err
	}
	tr := tar.NewReader(a.plain) // seeks over content, since the file can
	names := 0
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s is not a tar archive: after %d members: %w", a.name, len(a.members), err)
		}
		if len(a.members) >= maxMembers {
			return fmt.Errorf("the archive has more than %d members", maxMembers)
		}
		if names += len(h.Name) + len(h.Linkname); names > maxMemberNames {
			return fmt.Errorf("the names and link targets of the archive's members have more than %d bytes", maxMemberNames)
		}
		off, err := a.plain.Seek(0, io.SeekCurrent)
		if err != nil {
			return err
		}
		m := member{off: off, size: h.Size, typeflag: h.Typeflag, link: h.Linkname}
		if isSparse(h) {
			m.typeflag = tar.TypeGNUSparse
		}
		a.members[clean(h.Name)] = m
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

func (a *archive) has(name string) bool { _, ok := a.members[name]; return ok }

// find returns the plain file that a name leads to, behind symbolic and hard
// links of the archive.
func (a *archive) find(name string) (member, error) {
	first := name
	for range maxLinks {
		m, ok := a.members[name]
		if !ok && name != first {
			return m, fmt.Errorf("member %s is a link to %s, which is not in the archive: %w", quoteName(first), quoteName(name), ErrNoBlob)
		}
		if !ok {
			return m, ErrNoBlob
		}
		switch m.typeflag {
		case tar.TypeReg:
			return m, nil
		case tar.TypeSymlink: // relative to its folder; a hard link to the top
			name = path.Join(path.Dir(name), m.link)
		case tar.TypeLink:
			name = path.Clean(m.link)
		default:
			return m, fmt.Errorf("member %s is not a plain file but of tar type %q", quoteName(name), m.typeflag)
		}
		if path.IsAbs(m.link) || name == ".." || strings.HasPrefix(name, "../") {
			return m, fmt.Errorf("member %s is a link to %s, which leads out of the archive", quoteName(first), quoteName(m.link))
		}
	}
	return member{}, fmt.Errorf("member %s is behind more than %d links", quoteName(first), maxLinks)
}

func (a *archive) file(name string) (io.ReadCloser, int64, error) {
	m, err := a.find(name)
	if err != nil {
		return nil, 0, err
	}
	return io.NopCloser(a.content(m)), m.size, nil
}

func (a *archive) content(m member) io.Reader { return io.NewSectionReader(a.plain, m.off, m.size) }

// Close closes the archive's file.
func (a *archive) Close() error { return a.plain.Close() }

// clean makes a member's name of one that stands in a document.
func clean(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }
