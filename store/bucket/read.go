package bucket

import (
	"context"
	"fmt"
)

// ReadObject returns a whole object of at most limit bytes. Errors: ErrNotFound,
// and one that names the key and both sizes when the object is larger.
func ReadObject(ctx context.Context, b Bucket, key string, limit int64) ([]byte, error) {
	obj, err := b.Stat(ctx, key)
	if err != nil {
		return nil, err
	}
	if obj.Size > limit {
		return nil, fmt.Errorf("object %s has %d bytes, at most %d are allowed", key, obj.Size, limit)
	}
	p := make([]byte, obj.Size)
	if err := b.ReadAt(ctx, key, p, 0); err != nil {
		return nil, err
	}
	return p, nil
}
