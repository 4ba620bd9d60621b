package guest

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"quarry/worker/guest/wire"
	"quarry/worker/sandbox"
)

// TarDown writes a tar of what lies below a folder, or of one file, in bytewise order
// of names. Fifos and devices are in it as such and never opened; sockets are not.
// After an error what was written is no whole tar.
func (f *Files) TarDown(ctx context.Context, o sandbox.TarOptions, w io.Writer) error {
	p, err := f.resolve(o.Path)
	if err != nil {
		return err
	}
	if err := checkPatterns(o.Exclude); err != nil {
		return err
	}
	limits := f.c.Limits
	if o.MaxBytes < 0 {
		return fmt.Errorf("%w: a tar of at most %d bytes", sandbox.ErrInvalid, o.MaxBytes)
	}
	if o.MaxBytes > 0 {
		limits.Bytes = min(limits.Bytes, o.MaxBytes)
	}
	c, err := f.start(ctx, f.c.Runner.Run, wire.Request{
		Op: wire.OpTarDown, Path: p, Exclude: o.Exclude, MaxCount: uint64(limits.Entries), MaxBytes: limits.Bytes,
	})
	if err != nil {
		return err
	}
	defer c.end()
	d := &down{c: c, tw: tar.NewWriter(w), limits: limits, shared: map[string]bool{}}
	for {
		k, b, err := c.next(wire.KindEntry, wire.KindEnd)
		if err != nil {
			return err
		}
		if k == wire.KindEnd {
			return d.tw.Close()
		}
		e, err := decodeEntry(b)
		if err != nil {
			return err
		}
		if err := d.entry(e); err != nil {
			return err
		}
	}
}

func checkPatterns(patterns []string) error {
	if len(patterns) > wire.MaxExclude {
		return fmt.Errorf("%w: %d patterns, %d are possible", sandbox.ErrInvalid, len(patterns), wire.MaxExclude)
	}
	for _, x := range patterns {
		if _, err := path.Match(x, "x"); err != nil || len(x) > wire.MaxPath || strings.Contains(x, "\x00") {
			return fmt.Errorf("%w: pattern %q", sandbox.ErrInvalid, x)
		}
	}
	return nil
}

// down makes a tar of what a helper sends, which may be anything: names are in
// strictly rising order, so that each is there once, and below folders that are there.
type down struct {
	c      *call
	tw     *tar.Writer
	limits Limits
	last   string
	open   []string // the folders above the last name, each with its slash
	count  int64
	bytes  int64
	shared map[string]bool // files that hard links may name
	names  int             // bytes of the keys of shared
}

func (d *down) entry(e wire.Entry) error {
	if d.count++; d.count > d.limits.Entries {
		return fmt.Errorf("%w: more than %d files", sandbox.ErrTooLarge, d.limits.Entries)
	}
	if err := d.place(e); err != nil {
		return err
	}
	h := &tar.Header{
		Name: e.Path, Mode: int64(e.Mode), Uid: int(e.UID), Gid: int(e.GID), ModTime: modTime(e), Linkname: e.Target,
		// It says any name, and times to the nanosecond.
		Format: tar.FormatPAX,
	}
	switch e.Type {
	case wire.TypeFile:
		return d.file(h, e)
	case wire.TypeFolder:
		h.Typeflag, h.Name = tar.TypeDir, e.Path+"/"
	case wire.TypeSymlink:
		h.Typeflag = tar.TypeSymlink
	case wire.TypeHardLink:
		if !d.shared[e.Target] {
			return broken("a link to a file that was not there")
		}
		h.Typeflag = tar.TypeLink
	case wire.TypeFIFO:
		h.Typeflag = tar.TypeFifo
	case wire.TypeChar, wire.TypeBlock:
		h.Typeflag = tar.TypeChar
		if e.Type == wire.TypeBlock {
			h.Typeflag = tar.TypeBlock
		}
		h.Devmajor, h.Devminor = int64(e.Major), int64(e.Minor)
	case wire.TypeSocket:
		return nil
	}
	return headed(d.tw.WriteHeader(h))
}

// place checks that a name comes after the last one and stands where folders are.
func (d *down) place(e wire.Entry) error {
	if !clean(e.Path) {
		return broken("a name that cannot be")
	}
	name := e.Path
	if e.Type == wire.TypeFolder {
		name += "/"
	}
	if name <= d.last {
		return broken("names out of order")
	}
	d.last = name
	for len(d.open) > 0 && !strings.HasPrefix(name, d.open[len(d.open)-1]) {
		d.open = d.open[:len(d.open)-1]
	}
	above := ""
	if len(d.open) > 0 {
		above = d.open[len(d.open)-1]
	}
	if strings.Contains(e.Path[len(above):], "/") {
		return broken("a file of a folder that was not there")
	}
	if e.Type == wire.TypeFolder {
		d.open = append(d.open, name)
	}
	return nil
}

func (d *down) file(h *tar.Header, e wire.Entry) error {
	if e.Size > d.limits.Bytes || d.bytes > d.limits.Bytes-e.Size {
		return fmt.Errorf("%w: more than %d bytes", sandbox.ErrTooLarge, d.limits.Bytes)
	}
	d.bytes += e.Size
	if e.Shared {
		if d.names += len(e.Path); d.names > maxNames {
			return fmt.Errorf("%w: too many hard links", sandbox.ErrTooLarge)
		}
		d.shared[e.Path] = true
	}
	h.Typeflag, h.Size = tar.TypeReg, e.Size
	if err := headed(d.tw.WriteHeader(h)); err != nil {
		return err
	}
	return d.c.content(e.Size, d.tw)
}

// headed is for headers that tar cannot say.
func headed(err error) error {
	if errors.Is(err, tar.ErrHeader) {
		return fmt.Errorf("%w: %w", sandbox.ErrFilePath, err)
	}
	return err
}
