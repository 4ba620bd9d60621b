// Package dir keeps a bucket and its journal in a local folder: one file an
// object, one file a journal entry. It is what quarry runs on without object
// storage, and it promises what S3 promises: whole objects, durable on nil.
package dir

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"

	"quarry/internal/durable"
	"quarry/store/bucket"
)

// copySize is how much of a body is read between two looks at the context:
// 1 MiB, a few milliseconds of any disk.
const copySize = 1 << 20

// Bucket is a bucket.Bucket and a bucket.Journal in a folder:
//
//	<key>              an object
//	log/<n, 20 digits> journal entry n
//	tmp/               files not yet whole; Open removes them
type Bucket struct {
	folder *durable.Folder // nil when only read
	root   *os.Root        // folder's, for reading
}

// errReadOnly is what changes a bucket that was opened for reading.
var errReadOnly = errors.New("this bucket was opened for reading only")

var (
	_ bucket.Bucket  = (*Bucket)(nil)
	_ bucket.Journal = (*Bucket)(nil)
	_ bucket.Files   = (*Bucket)(nil)
)

// Open opens the bucket in the folder at dirPath, makes the folder when it is
// missing, and removes what a crash left half-written. One process at a time
// may have a folder open so; the owner of the data folder sees to that.
func Open(dirPath string) (*Bucket, error) { return open(dirPath, durable.OpenFolder) }

// OpenShared is Open beside a process that may be writing the bucket. Who has become
// the writer calls Sweep.
func OpenShared(dirPath string) (*Bucket, error) { return open(dirPath, durable.ShareFolder) }

func open(dirPath string, openFolder func(string) (*durable.Folder, error)) (*Bucket, error) {
	folder, err := openFolder(dirPath)
	if err != nil {
		return nil, fmt.Errorf("open bucket folder %s: %w", dirPath, err)
	}
	b := &Bucket{folder: folder, root: folder.Root()}
	if err := b.syncJournal(); err != nil {
		folder.Close()
		return nil, fmt.Errorf("open bucket folder %s: %w", dirPath, err)
	}
	return b, nil
}

// OpenReadOnly opens a bucket that another process may be writing, and changes nothing.
func OpenReadOnly(dirPath string) (*Bucket, error) {
	root, err := os.OpenRoot(dirPath)
	if err != nil {
		return nil, fmt.Errorf("open bucket folder %s: %w", dirPath, err)
	}
	return &Bucket{root: root}, nil
}

// Sweep removes what the writer before has left half-written.
func (b *Bucket) Sweep() error {
	if b.folder == nil {
		return errReadOnly
	}
	return b.folder.Sweep()
}

// Close releases the folder; no other method may be called after it.
func (b *Bucket) Close() error { return b.root.Close() }

// Put implements bucket.Bucket.
func (b *Bucket) Put(ctx context.Context, key string, body io.ReaderAt, size int64) error {
	if err := bucket.ValidKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if b.folder == nil {
		return fmt.Errorf("put %s: %w", key, errReadOnly)
	}
	err := b.folder.Replace(key, func(w io.Writer) error { return copyBody(ctx, w, body, size) })
	if err != nil {
		if info, statErr := b.root.Lstat(key); statErr == nil && info.IsDir() {
			err = fmt.Errorf("%w: the folder %s has the place of an object: move it away and try again: %w",
				bucket.ErrDamaged, filepath.Join(b.root.Name(), key), err)
		}
		return fmt.Errorf("put %s: %w", key, explain(err))
	}
	return nil
}

func copyBody(ctx context.Context, w io.Writer, body io.ReaderAt, size int64) error {
	if size < 0 {
		return fmt.Errorf("size %d is negative", size)
	}
	buf := make([]byte, min(size, copySize))
	for off := int64(0); off < size; off += int64(len(buf)) {
		buf = buf[:min(int64(len(buf)), size-off)]
		if n, err := body.ReadAt(buf, off); n < len(buf) {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("read body at %d of %d: %w", off+int64(n), size, err)
		}
		if _, err := w.Write(buf); err != nil {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return nil
}

// ReadAt implements bucket.Bucket. It opens the file for each call: that costs
// 15 µs (BenchmarkReadAt: 27 against 12 for 100 KiB of a pack), a tenth of the
// sha256 of one chunk, and there is no cache of open files to bound and to keep
// in step with Put and Delete.
func (b *Bucket) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	f, err := b.File(ctx, key)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.ReadAt(p, off); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return fmt.Errorf("read %s at %d, %d bytes: %w", key, off, len(p), err)
	}
	return nil
}

// File implements bucket.Files.
func (b *Bucket) File(ctx context.Context, key string) (*os.File, error) {
	if err := bucket.ValidKey(key); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f, err := b.open(key)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", key, objectError(err))
	}
	return f, nil
}

// errNotRegular says that something else than a file has an object's name.
var errNotRegular = fmt.Errorf("%w: not a regular file; a bucket folder holds nothing else", bucket.ErrDamaged)

// open opens a regular file. O_NONBLOCK keeps a planted FIFO from blocking.
func (b *Bucket) open(name string) (*os.File, error) {
	f, err := b.root.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		if info, statErr := b.root.Lstat(name); statErr == nil && regular(info) == errNotRegular {
			err = fmt.Errorf("%w: %w", errNotRegular, err) // a link that leads out
		}
		return nil, err
	}
	info, err := f.Stat()
	if err == nil {
		err = regular(info)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func regular(info fs.FileInfo) error {
	switch {
	case info.IsDir(): // the first elements of other keys; no object
		return fs.ErrNotExist
	case !info.Mode().IsRegular():
		return errNotRegular
	}
	return nil
}

// objectError turns what the file system says of a missing object into
// bucket.ErrNotFound. ENOTDIR: an object has the name of a folder of the key.
func objectError(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return bucket.ErrNotFound
	}
	return err
}

// explain adds what to do about the errors of writing an operator can mend.
func explain(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return fmt.Errorf("%w; nothing was stored, free space and try again", err)
	}
	return err
}

// Stat implements bucket.Bucket.
func (b *Bucket) Stat(ctx context.Context, key string) (bucket.Object, error) {
	if err := bucket.ValidKey(key); err != nil {
		return bucket.Object{}, err
	}
	if err := ctx.Err(); err != nil {
		return bucket.Object{}, err
	}
	info, err := b.root.Lstat(key)
	if err == nil {
		err = regular(info)
	}
	if err != nil {
		return bucket.Object{}, fmt.Errorf("stat %s: %w", key, objectError(err))
	}
	return bucket.Object{Key: key, Size: info.Size()}, nil
}

// Delete implements bucket.Bucket. Folders that become empty stay: removing
// them would race with a Put into them.
func (b *Bucket) Delete(ctx context.Context, key string) error {
	if err := bucket.ValidKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if b.folder == nil {
		return fmt.Errorf("delete %s: %w", key, errReadOnly)
	}
	if info, err := b.root.Lstat(key); err == nil && info.IsDir() {
		return nil // a folder is no object, even when it is empty
	}
	if err := objectError(b.folder.Remove(key)); err != nil && err != bucket.ErrNotFound {
		return fmt.Errorf("delete %s: %w", key, err)
	}
	return nil
}
