package bucket

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// ErrTooLarge says that an object is larger than what its kind may have.
var ErrTooLarge = errors.New("object is too large")

// IsDamage tells an object that is gone, cut off, too large or something else than
// an object from a bucket that cannot be reached: of the first the bucket has said
// what it has now. It may have more later, when a part of it was not mounted, so
// nothing may be given up for good because of it.
func IsDamage(err error) bool {
	return errors.Is(err, ErrNotFound) || errors.Is(err, ErrTooLarge) || errors.Is(err, io.ErrUnexpectedEOF) ||
		errors.Is(err, ErrDamaged)
}

// ReadObject returns a whole object of at most limit bytes. Errors: ErrNotFound,
// ErrTooLarge, and those of ReadAt.
func ReadObject(ctx context.Context, b Bucket, key string, limit int64) ([]byte, error) {
	obj, err := b.Stat(ctx, key)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", key, err)
	}
	if obj.Size > limit {
		return nil, fmt.Errorf("read %s: %w: %d bytes, at most %d are allowed", key, ErrTooLarge, obj.Size, limit)
	}
	p := make([]byte, obj.Size)
	if err := b.ReadAt(ctx, key, p, 0); err != nil {
		return nil, fmt.Errorf("read %s: %w", key, err)
	}
	return p, nil
}
