package guest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"slices"
	"strings"
	"time"

	"quarry/worker/guest/wire"
	"quarry/worker/sandbox"
)

// types are the words of the contract.
var types = map[wire.Type]string{
	wire.TypeFile: sandbox.TypeFile, wire.TypeFolder: sandbox.TypeFolder, wire.TypeSymlink: sandbox.TypeSymlink, wire.TypeFIFO: sandbox.TypeFIFO,
	wire.TypeSocket: sandbox.TypeSocket, wire.TypeChar: sandbox.TypeChar, wire.TypeBlock: sandbox.TypeBlock,
}

// info makes what callers get of an entry. Names stay bytes.
func info(e wire.Entry) (sandbox.FileInfo, error) {
	t, ok := types[e.Type]
	if !ok {
		return sandbox.FileInfo{}, broken("an entry of another type")
	}
	i := sandbox.FileInfo{Path: e.Path, Type: t, Size: e.Size, Mode: e.Mode, UID: e.UID, GID: e.GID, Target: e.Target, ModTime: modTime(e)}
	if e.Type == wire.TypeSymlink {
		i.Size = int64(len(e.Target))
	}
	return i, nil
}

// modTime is an mtime between the years 1 and 9999, which JSON and tar can say.
func modTime(e wire.Entry) time.Time {
	const first, last = -62135596800, 253402300799
	return time.Unix(min(max(e.Sec, first), last), int64(e.Nsec)).UTC()
}

// Stat returns what a path names; a symlink is not followed.
func (f *Files) Stat(ctx context.Context, name string) (sandbox.FileInfo, error) {
	p, err := f.resolve(name)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	b, err := f.ask(ctx, f.c.Runner.Run, wire.Request{Op: wire.OpStat, Path: p}, wire.KindEntry)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	e, err := decodeEntry(b)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	e.Path = p
	return info(e)
}

// maxNames bounds the memory of a list, and of a tar's hard links: 200 000 names of the
// usual length are a third of it.
const maxNames = 64 << 20

// List returns what lies below a folder, depth levels down, in order of path. The
// folder itself is not among them; a symlink that names it is followed.
func (f *Files) List(ctx context.Context, name string, depth int) ([]sandbox.FileInfo, error) {
	p, err := f.resolve(name)
	if err != nil {
		return nil, err
	}
	depth = min(max(depth, 1), 1<<16)
	limit := f.c.Limits.Entries
	c, err := f.start(ctx, f.c.Runner.Run, wire.Request{Op: wire.OpList, Path: p, Depth: uint32(depth), MaxCount: uint64(limit)})
	if err != nil {
		return nil, err
	}
	defer c.end()
	below := strings.TrimRight(p, "/") + "/"
	var all []sandbox.FileInfo
	names := 0
	for {
		k, b, err := c.next(wire.KindEntry, wire.KindEnd)
		if err != nil {
			return nil, err
		}
		if k == wire.KindEnd {
			break
		}
		if int64(len(all)) >= limit {
			return nil, fmt.Errorf("%w: %q has more than %d files", sandbox.ErrTooLarge, p, limit)
		}
		e, err := decodeEntry(b)
		if err != nil {
			return nil, err
		}
		rel, ok := strings.CutPrefix(e.Path, below)
		if !ok || !clean(rel) || strings.Count(rel, "/") >= depth {
			return nil, broken("a file of another folder")
		}
		i, err := info(e)
		if err != nil {
			return nil, err
		}
		if names += len(i.Path) + len(i.Target); names > maxNames {
			return nil, fmt.Errorf("%w: the names below %q have more than %d bytes", sandbox.ErrTooLarge, p, maxNames)
		}
		all = append(all, i)
	}
	slices.SortFunc(all, func(a, b sandbox.FileInfo) int { return strings.Compare(a.Path, b.Path) })
	for i := 1; i < len(all); i++ {
		if all[i].Path == all[i-1].Path {
			return nil, broken("the same file twice")
		}
	}
	return all, nil
}

// clean reports whether a relative path is elements and nothing else.
func clean(rel string) bool {
	if rel == "" || len(rel) >= wire.MaxPath {
		return false
	}
	for s := range strings.SplitSeq(rel, "/") {
		if s == "" || s == "." || s == ".." || len(s) > 255 {
			return false
		}
	}
	return true
}

// Read calls begin with the file, whose Size is that of the whole, and then writes the
// part that o chooses to w. Symlinks are followed.
func (f *Files) Read(ctx context.Context, name string, o sandbox.ReadOptions, begin func(sandbox.FileInfo) error, w io.Writer) error {
	p, err := f.resolve(name)
	if err != nil {
		return err
	}
	if !o.Valid() {
		return fmt.Errorf("%w: offset %d and length %d", sandbox.ErrInvalid, o.Offset, o.Length)
	}
	c, err := f.start(ctx, f.c.Runner.Run, wire.Request{Op: wire.OpRead, Path: p, Offset: o.Offset, Length: o.Length, MaxBytes: f.c.Limits.Bytes})
	if err != nil {
		return err
	}
	defer c.end()
	e, err := c.entry()
	if err != nil {
		return err
	}
	if e.Type != wire.TypeFile {
		return broken("a file of another type")
	}
	e.Path = p
	i, err := info(e)
	if err != nil {
		return err
	}
	_, want := o.Part(e.Size)
	if want > f.c.Limits.Bytes {
		return fmt.Errorf("%w: %q has %d bytes, and one read takes at most %d: read it in ranges", sandbox.ErrTooLarge, p, e.Size, f.c.Limits.Bytes)
	}
	if err := begin(i); err != nil {
		return err
	}
	return c.content(want, w)
}

// content copies the data of an entry, which is exactly n bytes with the sum that follows.
func (c *call) content(n int64, w io.Writer) error {
	digest := sha256.New()
	left := n
	for {
		k, p, err := c.next(wire.KindData, wire.KindSum)
		if err != nil {
			return err
		}
		if k == wire.KindSum {
			return checkSum(p, digest, n, left)
		}
		if int64(len(p)) > left || len(p) == 0 {
			return broken("more data than it said")
		}
		left -= int64(len(p))
		digest.Write(p)
		if _, err := w.Write(p); err != nil {
			return err
		}
	}
}

func checkSum(p []byte, digest hash.Hash, n, left int64) error {
	s, err := wire.DecodeSum(p)
	if err != nil {
		return broken("a sum that cannot be")
	}
	if left != 0 || s.Size != n || !bytes.Equal(s.SHA256[:], digest.Sum(nil)) {
		return broken("other data than it said")
	}
	return nil
}

// Write makes a file, or replaces one, in one step. Symlinks are followed; other names
// of the file that was there keep what they have.
func (f *Files) Write(ctx context.Context, name string, o sandbox.WriteOptions, owner Owner, r io.Reader) (sandbox.FileInfo, error) {
	p, err := f.resolve(name)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	q, err := writeRequest(p, o, owner, f.c.Limits.Bytes)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	c, err := f.start(ctx, f.c.Runner.Run, q)
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	defer c.end()
	if _, _, err := c.next(wire.KindReady); err != nil {
		return sandbox.FileInfo{}, err
	}
	sum, err := c.give(r, f.c.Limits.Bytes)
	if err == nil {
		err = agrees(sum, o)
	}
	if err == nil {
		err = c.send(wire.KindSum, sum.Encode())
	}
	if err != nil && !errors.Is(err, errGone) {
		return sandbox.FileInfo{}, err // the helper hears no sum, and drops what it has
	}
	e, err := c.entry()
	if err != nil {
		return sandbox.FileInfo{}, err
	}
	if e.Type != wire.TypeFile || e.Size != sum.Size {
		return sandbox.FileInfo{}, broken("another file than it wrote")
	}
	e.Path = p
	return info(e)
}

func writeRequest(p string, o sandbox.WriteOptions, owner Owner, limit int64) (wire.Request, error) {
	q := wire.Request{Op: wire.OpWrite, Path: p, Mode: 0o644, UID: owner.UID, GID: owner.GID, MaxBytes: limit}
	if o.Mode != nil {
		if *o.Mode&^0o7777 != 0 {
			return q, fmt.Errorf("%w: mode %#o", sandbox.ErrInvalid, *o.Mode)
		}
		q.Mode, q.Flags = *o.Mode, q.Flags|wire.FlagMode
	}
	if o.MkDirs {
		q.Flags |= wire.FlagMkDirs
	}
	if o.Size > limit {
		return q, fmt.Errorf("%w: %d bytes", sandbox.ErrTooLarge, o.Size)
	}
	if b, err := hex.DecodeString(o.SHA256); o.SHA256 != "" && (err != nil || len(b) != sha256.Size) {
		return q, fmt.Errorf("%w: %q is no SHA-256 in hex", sandbox.ErrInvalid, o.SHA256)
	}
	return q, nil
}

// give sends what r has as data, and returns what it was. The reader may take its
// time: only the guest is held to the idle time.
func (c *call) give(r io.Reader, limit int64) (wire.Sum, error) {
	digest, sum := sha256.New(), wire.Sum{}
	b := make([]byte, wire.MaxData)
	for {
		n, err := fill(r, b)
		if n > 0 {
			digest.Write(b[:n])
			sum.Size += int64(n)
			if sum.Size > limit {
				return sum, fmt.Errorf("%w: more than %d bytes", sandbox.ErrTooLarge, limit)
			}
			if err := c.send(wire.KindData, b[:n]); err != nil {
				return sum, err
			}
		}
		if err == io.EOF {
			digest.Sum(sum.SHA256[:0])
			return sum, nil
		}
		if err != nil {
			return sum, fmt.Errorf("read what is to be written: %w", err)
		}
		if err := c.ctx.Err(); err != nil {
			return sum, err
		}
	}
}

// fill reads until b is full. Unlike io.ReadFull it keeps the end of what came, io.EOF,
// apart from a body that was cut off, which is io.ErrUnexpectedEOF.
func fill(r io.Reader, b []byte) (int, error) {
	n := 0
	for empty := 0; n < len(b); {
		k, err := r.Read(b[n:])
		n += k
		if err != nil {
			return n, err
		}
		if empty++; k > 0 {
			empty = 0
		} else if empty > 100 {
			return n, io.ErrNoProgress
		}
	}
	return n, nil
}

// agrees holds what came against what was announced.
func agrees(s wire.Sum, o sandbox.WriteOptions) error {
	if o.Size >= 0 && o.Size != s.Size {
		return fmt.Errorf("%w: %d bytes came, %d were announced", sandbox.ErrDigest, s.Size, o.Size)
	}
	if o.SHA256 != "" && !strings.EqualFold(o.SHA256, hex.EncodeToString(s.SHA256[:])) {
		return fmt.Errorf("%w: the content has %x", sandbox.ErrDigest, s.SHA256)
	}
	return nil
}

// Remove removes a file, or a folder with all that is below it. Symlinks are not followed.
func (f *Files) Remove(ctx context.Context, name string) error {
	p, err := f.resolve(name)
	if err != nil {
		return err
	}
	_, err = f.ask(ctx, f.c.Runner.Run, wire.Request{Op: wire.OpRemove, Path: p, MaxCount: 1 << 32}, wire.KindEnd)
	return err
}
