package dir

import (
	"context"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"quarry/internal/durable"
	"quarry/store/bucket"
)

// List implements bucket.Bucket. Anything but folders and regular files ends it
// with an error: a listing that left something out would look complete.
func (b *Bucket) List(ctx context.Context, prefix string) iter.Seq2[bucket.Object, error] {
	return func(yield func(bucket.Object, error) bool) {
		folder := "."
		if i := strings.LastIndexByte(prefix, '/'); i >= 0 {
			folder = prefix[:i]
			if bucket.ValidKey(folder) != nil {
				return // no key starts like this
			}
		}
		b.list(ctx, folder, prefix, yield)
	}
}

// list yields the objects below a folder, and says whether to go on.
func (b *Bucket) list(ctx context.Context, folder, prefix string, yield func(bucket.Object, error) bool) bool {
	err := ctx.Err()
	var children []child
	if err == nil {
		children, err = b.children(folder)
	}
	if err != nil {
		yield(bucket.Object{}, fmt.Errorf("list %q: %w", prefix, err))
		return false
	}
	for _, c := range children {
		key := path.Join(folder, c.name)
		switch {
		case c.info.IsDir():
			if strings.HasPrefix(key+"/", prefix) && !b.list(ctx, key, prefix, yield) {
				return false
			}
		case !strings.HasPrefix(key, prefix):
		case !c.info.Mode().IsRegular():
			yield(bucket.Object{}, fmt.Errorf("list %q: %s: %w", prefix, key, errNotRegular))
			return false
		default:
			if !yield(bucket.Object{Key: key, Size: c.info.Size()}, nil) {
				return false
			}
		}
	}
	return true
}

// child is what a folder holds; the names of folders end with a slash, so that
// children sort as the keys below them do: "a-b" comes before "a/b".
type child struct {
	name string
	info fs.FileInfo
}

// children returns what is in a folder, in order, except for the folders that
// are the bucket's own. A missing folder is empty.
func (b *Bucket) children(folder string) ([]child, error) {
	d, err := b.root.OpenFile(folder, os.O_RDONLY|syscall.O_DIRECTORY, 0)
	if err != nil {
		if objectError(err) == bucket.ErrNotFound {
			return nil, nil
		}
		return nil, err
	}
	defer d.Close()
	infos, err := d.Readdir(-1)
	if err != nil {
		return nil, err
	}
	children := make([]child, 0, len(infos))
	for _, info := range infos {
		c := child{info.Name(), info}
		if folder == "." && (c.name == durable.TmpDir || c.name == logDir) {
			continue
		}
		if info.IsDir() {
			c.name += "/"
		}
		children = append(children, c)
	}
	slices.SortFunc(children, func(x, y child) int { return strings.Compare(x.name, y.name) })
	return children, nil
}
