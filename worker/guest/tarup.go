package guest

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"quarry/worker/guest/wire"
	"quarry/worker/sandbox"
)

// TarUp unpacks a tar below a folder, which is made when it is missing. What is there
// under a name is replaced, but for devices and sockets, a folder is kept; symlinks of the guest are followed where
// they stay below the folder. After an error what was unpacked before it is there.
func (f *Files) TarUp(ctx context.Context, name string, owner Owner, r io.Reader) error {
	p, err := f.resolve(name)
	if err != nil {
		return err
	}
	c, err := f.start(ctx, f.c.Runner.Run, wire.Request{
		Op: wire.OpTarUp, Path: p, UID: owner.UID, GID: owner.GID, MaxCount: uint64(f.c.Limits.Entries), MaxBytes: f.c.Limits.Bytes,
	})
	if err != nil {
		return err
	}
	defer c.end()
	if _, _, err := c.next(wire.KindReady); err != nil {
		return err
	}
	u := &upload{c: c, from: &noteEnd{r: r}, limits: f.c.Limits, longest: wire.MaxPath - 1 - len(p)}
	if err := u.send(); err != nil && !errors.Is(err, errGone) {
		return err
	}
	_, _, err = c.next(wire.KindEnd)
	return err
}

// noteEnd remembers whether the end of a stream was met, and what else ended it.
type noteEnd struct {
	r   io.Reader
	end bool
	err error
}

func (n *noteEnd) Read(p []byte) (int, error) {
	k, err := n.r.Read(p)
	if err == io.EOF {
		// Package tar asks for no byte more than the archive has. One that comes with the
		// last byte was not asked for.
		n.end = k < len(p)
	} else if err != nil {
		n.err = err
	}
	return k, err
}

// upload sends the entries of a tar.
type upload struct {
	c      *call
	from   *noteEnd
	limits Limits
	// longest is what the names may have, so that each file has a path that names it.
	longest int
	count   int64
	bytes   int64
}

func (u *upload) send() error {
	tr := tar.NewReader(u.from)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return u.unreadable(err)
		}
		if h.Typeflag == tar.TypeXGlobalHeader {
			continue // a comment, as git archive writes
		}
		if err := u.entry(h, tr); err != nil {
			return err
		}
	}
	if u.from.end {
		// Package tar takes the end of the stream between two files for the archive's.
		return fmt.Errorf("%w: the tar was cut off: its end is missing", sandbox.ErrInvalid)
	}
	if _, err := io.Copy(io.Discard, io.LimitReader(u.from, maxTrailer)); err != nil {
		return u.unreadable(err)
	}
	return u.c.send(wire.KindEnd, nil)
}

// maxTrailer bounds what may stand behind an archive: tar fills up to the size of its
// blocks, which is 10 KiB unless one asks for more.
const maxTrailer = 16 << 20

// unreadable tells a bad tar from a stream that broke.
func (u *upload) unreadable(err error) error {
	if u.from.err != nil {
		return fmt.Errorf("read the tar: %w", u.from.err)
	}
	return fmt.Errorf("%w: tar: %w", sandbox.ErrInvalid, err)
}

func (u *upload) entry(h *tar.Header, tr *tar.Reader) error {
	if u.count++; u.count > u.limits.Entries {
		return fmt.Errorf("%w: more than %d files", sandbox.ErrTooLarge, u.limits.Entries)
	}
	if err := u.c.ctx.Err(); err != nil {
		return err
	}
	e, skip, err := entryOf(h)
	if err != nil || skip {
		return err
	}
	if err := u.reachable(e); err != nil {
		return err
	}
	if e.Size > u.limits.Bytes || u.bytes > u.limits.Bytes-e.Size {
		return fmt.Errorf("%w: more than %d bytes", sandbox.ErrTooLarge, u.limits.Bytes)
	}
	u.bytes += e.Size
	if err := u.c.send(wire.KindEntry, e.Encode()); err != nil || e.Type != wire.TypeFile {
		return err
	}
	sum, err := u.c.give(tr, e.Size)
	if errors.Is(err, errGone) || u.c.ctx.Err() != nil {
		return err
	}
	if err != nil {
		return u.unreadable(err)
	}
	if sum.Size != e.Size {
		return fmt.Errorf("%w: %q has %d bytes and not %d", sandbox.ErrInvalid, h.Name, sum.Size, e.Size)
	}
	return u.c.send(wire.KindSum, sum.Encode())
}

// reachable refuses what no other call could list or take out again, before any folder on
// the way to it is made.
func (u *upload) reachable(e wire.Entry) error {
	folders := strings.Count(e.Path, "/")
	if e.Type == wire.TypeFolder {
		folders++
	}
	if folders > wire.MaxFolders {
		return fmt.Errorf("%w: %q: it is below %d folders, and %d are possible", sandbox.ErrFilePath, e.Path, folders, wire.MaxFolders)
	}
	if len(e.Path) >= u.longest {
		return fmt.Errorf("%w: %q has %d bytes, and %d are possible in this folder", sandbox.ErrFilePath, e.Path, len(e.Path), u.longest-1)
	}
	return nil
}

// entryOf makes an entry of a header of the archive, which may say anything.
func entryOf(h *tar.Header) (e wire.Entry, skip bool, err error) {
	name, err := member(h.Name)
	if err != nil {
		return e, false, err
	}
	if name == "" {
		// "./", the folder itself: it is the caller's, and stays as it is.
		return e, h.Typeflag == tar.TypeDir, wrongType(h, h.Typeflag != tar.TypeDir)
	}
	// A header without a time says the first second of 1970, or nothing at all.
	at := h.ModTime
	if at.IsZero() {
		at = time.Unix(0, 0)
	}
	if h.Uid < 0 || h.Gid < 0 || int64(h.Uid) > 1<<32-2 || int64(h.Gid) > 1<<32-2 {
		return e, false, fmt.Errorf("%w: %q has owner %d:%d", sandbox.ErrInvalid, h.Name, h.Uid, h.Gid)
	}
	e = wire.Entry{Mode: uint32(h.Mode & 0o7777), UID: uint32(h.Uid), GID: uint32(h.Gid), Path: name, Sec: at.Unix(), Nsec: uint32(at.Nanosecond())}
	switch h.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse:
		e.Type, e.Size = wire.TypeFile, h.Size
	case tar.TypeDir:
		e.Type = wire.TypeFolder
	case tar.TypeSymlink:
		e.Type, e.Target = wire.TypeSymlink, h.Linkname
		if e.Target == "" || len(e.Target) >= wire.MaxPath || strings.Contains(e.Target, "\x00") {
			return e, false, fmt.Errorf("%w: %q leads to %q", sandbox.ErrFilePath, h.Name, h.Linkname)
		}
	case tar.TypeLink:
		e.Type = wire.TypeHardLink
		if e.Target, err = member(h.Linkname); err == nil && e.Target == "" {
			err = fmt.Errorf("%w: %q is a link to the folder", sandbox.ErrFilePath, h.Name)
		}
	case tar.TypeFifo:
		e.Type = wire.TypeFIFO
	default:
		err = wrongType(h, true)
	}
	return e, false, err
}

func wrongType(h *tar.Header, wrong bool) error {
	if !wrong {
		return nil
	}
	return fmt.Errorf("%w: %q has type %q of tar: files, folders, links and fifos can be unpacked", sandbox.ErrFileType, h.Name, h.Typeflag)
}

// member makes a name of an archive one that stands below its folder, without "." and
// double slashes. "" is the folder itself.
func member(name string) (string, error) {
	if strings.HasPrefix(name, "/") {
		return "", fmt.Errorf("%w: %q is absolute", sandbox.ErrFilePath, name)
	}
	var parts []string
	for s := range strings.SplitSeq(name, "/") {
		switch s {
		case "", ".":
			continue
		case "..":
			return "", fmt.Errorf("%w: %q leads out of its folder", sandbox.ErrFilePath, name)
		}
		parts = append(parts, s)
	}
	out := strings.Join(parts, "/")
	if out != "" && !clean(out) || strings.Contains(out, "\x00") {
		return "", fmt.Errorf("%w: %q is too long", sandbox.ErrFilePath, name)
	}
	return out, nil
}
