package dir

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"path"
	"strconv"
	"strings"

	"quarry/internal/durable"
	"quarry/store/bucket"
)

const logDir = "log"

func entryName(n uint64) string { return path.Join(logDir, fmt.Sprintf("%020d", n)) }

// syncJournal makes durable what a reader of the journal is about to see: the
// process that wrote the last entry may have died between link and fsync.
func (b *Bucket) syncJournal() error {
	err := durable.SyncDir(b.root, logDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// Append implements bucket.Journal. The whole entry is written aside and then
// linked to its name, which fails when the name exists: of two writers, in one
// process or two, one wins.
func (b *Bucket) Append(ctx context.Context, n uint64, entry []byte) error {
	if err := bucket.ValidEntry(n, entry); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if b.folder == nil {
		return fmt.Errorf("append journal entry %d: %w", n, errReadOnly)
	}
	if n > 1 {
		if _, err := b.root.Lstat(entryName(n - 1)); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("append journal entry %d: entry %d does not exist", n, n-1)
		} else if err != nil {
			return fmt.Errorf("append journal entry %d: %w", n, err)
		}
	}
	err := b.folder.Create(entryName(n), func(w io.Writer) error {
		_, err := w.Write(entry)
		return err
	})
	if errors.Is(err, fs.ErrExist) {
		err = bucket.ErrTaken
	}
	if err != nil {
		return fmt.Errorf("append journal entry %d: %w", n, explain(err))
	}
	return nil
}

// Read implements bucket.Journal.
func (b *Bucket) Read(ctx context.Context, from uint64) iter.Seq2[bucket.Entry, error] {
	return func(yield func(bucket.Entry, error) bool) {
		for n := max(from, 1); ; n++ {
			data, err := b.readEntry(ctx, n)
			if errors.Is(err, fs.ErrNotExist) {
				var more bool
				if more, err = b.existsFrom(n); err == nil && !more {
					return
				}
				if err == nil { // appended since, or a gap
					if data, err = b.readEntry(ctx, n); errors.Is(err, fs.ErrNotExist) {
						err = fmt.Errorf("%w: the entry is missing, and there are later ones", bucket.ErrDamaged)
					}
				}
			}
			if err != nil {
				yield(bucket.Entry{}, fmt.Errorf("read journal entry %d: %w", n, err))
				return
			}
			if !yield(bucket.Entry{N: n, Data: data}, nil) {
				return
			}
		}
	}
}

func (b *Bucket) readEntry(ctx context.Context, n uint64) ([]byte, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	f, err := b.open(entryName(n))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, bucket.MaxEntry+1))
	if err != nil {
		return nil, err
	}
	if err := bucket.ValidEntry(n, data); err != nil {
		return nil, fmt.Errorf("%w: %w", bucket.ErrDamaged, err)
	}
	return data, nil
}

// existsFrom says whether there is an entry with number n or a higher one. It
// passes over dot files, which NFS (.nfs…) and programs that copy leave behind.
// Another file that is no entry may be the last one under a wrong name, which
// nothing else would tell.
func (b *Bucket) existsFrom(n uint64) (bool, error) {
	children, err := b.children(logDir)
	if err != nil {
		return false, err
	}
	found := false
	for _, c := range children {
		if strings.HasPrefix(c.name, ".") {
			continue
		}
		got, err := strconv.ParseUint(c.name, 10, 64)
		if err != nil || path.Join(logDir, c.name) != entryName(got) {
			return false, fmt.Errorf("%w: %s/%s is no journal entry; move it out of the folder", bucket.ErrDamaged, logDir, c.name)
		}
		found = found || got >= n
	}
	return found, nil
}
