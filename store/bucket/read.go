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

// maxReplaced bounds how often ReadReplaced looks again.
const maxReplaced = 10

// ReadReplaced is ReadObject for an object that others may replace meanwhile by one of
// another length: it returns all of the one or of the other, not a part of the new one
// that is as long as the old one was.
func ReadReplaced(ctx context.Context, b Bucket, key string, limit int64) ([]byte, error) {
	for range maxReplaced {
		p, err := ReadObject(ctx, b, key, limit)
		if err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, err
		}
		obj, statErr := b.Stat(ctx, key)
		if statErr != nil {
			return nil, fmt.Errorf("read %s: %w", key, statErr)
		}
		if err == nil && obj.Size == int64(len(p)) {
			return p, nil
		}
	}
	return nil, fmt.Errorf("read %s: it was replaced %d times meanwhile, or is cut off: %w", key, maxReplaced, io.ErrUnexpectedEOF)
}
