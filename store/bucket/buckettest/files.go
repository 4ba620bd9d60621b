package buckettest

import (
	"context"
	"os"

	"quarry/store/bucket"
)

// Files is a bucket whose objects can be had as files: copies that each caller gets anew.
type Files struct {
	bucket.Bucket
	// Change, when not nil, has its will with a file before whoever opened the object
	// gets it.
	Change func(f *os.File) error
}

var _ bucket.Files = Files{}

// File implements bucket.Files.
func (b Files) File(ctx context.Context, key string) (_ *os.File, err error) {
	o, err := b.Stat(ctx, key)
	if err != nil {
		return nil, err
	}
	p := make([]byte, o.Size)
	if err := b.ReadAt(ctx, key, p, 0); err != nil {
		return nil, err
	}
	f, err := os.CreateTemp("", "object-*")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	if err := os.Remove(f.Name()); err != nil {
		return nil, err
	}
	if _, err := f.Write(p); err != nil {
		return nil, err
	}
	if b.Change != nil {
		err = b.Change(f)
	}
	return f, err
}
