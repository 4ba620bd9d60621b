package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"

	"github.com/aws/aws-sdk-go-v2/aws"
	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"

	"quarry/store/bucket"
)

// errNoObject says that an answer with status 200 is not of an object: those of S3
// have an ETag, those of what stands between may have none and be empty.
var errNoObject = errors.New("the answer has no ETag or length, so it is of no object")

// ReadAt implements bucket.Bucket.
func (b *Bucket) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if err := bucket.ValidKey(key); err != nil {
		return err
	}
	if off < 0 || off > math.MaxInt64-int64(len(p)) {
		return fmt.Errorf("read %s at %d, %d bytes: no object reaches there", key, off, len(p))
	}
	if len(p) == 0 { // no range is empty
		_, err := b.Stat(ctx, key)
		return err
	}
	err := b.retry(ctx, int64(len(p)), func(ctx context.Context) error { return b.hedged(ctx, key, p, off) })
	if err != nil {
		return fmt.Errorf("read %s at %d, %d bytes: %w", key, off, len(p), err)
	}
	return nil
}

// get makes one request for a range. An answer counts only when it says that it
// is this range, and has all of it.
func (b *Bucket) get(ctx context.Context, key string, p []byte, off int64) error {
	last := off + int64(len(p)) - 1
	out, err := b.client.GetObject(ctx, &awss3.GetObjectInput{
		Bucket: &b.cfg.Location.Bucket, Key: b.object(key), Range: aws.String(fmt.Sprintf("bytes=%d-%d", off, last)),
	})
	switch {
	case missing(err):
		return final{bucket.ErrNotFound}
	case statusOf(err) == http.StatusRequestedRangeNotSatisfiable:
		return final{io.ErrUnexpectedEOF}
	case err != nil:
		return err
	}
	defer out.Body.Close()
	if err := checkRange(aws.ToString(out.ContentRange), off, last); err != nil {
		return err
	}
	if out.ContentLength != nil && *out.ContentLength != int64(len(p)) {
		return fmt.Errorf("the answer has %d bytes for %d", *out.ContentLength, len(p))
	}
	if n, err := io.ReadFull(out.Body, p); err != nil {
		return fmt.Errorf("the answer ended after %d of %d bytes: %w", n, len(p), err)
	}
	return nil
}

// checkRange compares a Content-Range with what was asked for. One that ends
// early because the object does says that the object is short.
func checkRange(text string, off, last int64) error {
	var from, to, total int64
	if n, err := fmt.Sscanf(text, "bytes %d-%d/%d", &from, &to, &total); n != 3 || err != nil || from != off || to > last {
		return fmt.Errorf("asked for bytes %d-%d, the answer is of %q", off, last, text)
	}
	if to < last && to == total-1 {
		return final{io.ErrUnexpectedEOF}
	}
	if to < last || total <= last {
		return fmt.Errorf("asked for bytes %d-%d, the answer is of %q", off, last, text)
	}
	return nil
}

// Stat implements bucket.Bucket.
func (b *Bucket) Stat(ctx context.Context, key string) (bucket.Object, error) {
	if err := bucket.ValidKey(key); err != nil {
		return bucket.Object{}, err
	}
	size, err := b.size(ctx, key)
	if err != nil {
		return bucket.Object{}, fmt.Errorf("stat %s: %w", key, err)
	}
	return bucket.Object{Key: key, Size: size}, nil
}

func (b *Bucket) size(ctx context.Context, key string) (size int64, err error) {
	err = b.retry(ctx, 0, func(ctx context.Context) error {
		out, err := b.client.HeadObject(ctx, &awss3.HeadObjectInput{Bucket: &b.cfg.Location.Bucket, Key: b.object(key)})
		switch {
		case missing(err):
			return final{bucket.ErrNotFound}
		case err != nil:
			return err
		case out.ContentLength == nil || *out.ContentLength < 0 || aws.ToString(out.ETag) == "":
			return errNoObject
		}
		size = *out.ContentLength
		return nil
	})
	return size, err
}

// Delete implements bucket.Bucket.
func (b *Bucket) Delete(ctx context.Context, key string) error {
	if err := bucket.ValidKey(key); err != nil {
		return err
	}
	unlock, err := b.lockKey(ctx, key)
	if err != nil {
		return fmt.Errorf("delete %s: %w", key, err)
	}
	defer unlock()
	if err := b.remove(ctx, key); err != nil {
		return fmt.Errorf("delete %s: %w", key, err)
	}
	return nil
}

// remove deletes an object, and asks whether it is gone: an error can come in an
// answer that says 200.
func (b *Bucket) remove(ctx context.Context, key string) error {
	return b.retry(ctx, 0, func(ctx context.Context) error {
		_, err := b.client.DeleteObject(ctx, &awss3.DeleteObjectInput{Bucket: &b.cfg.Location.Bucket, Key: b.object(key)})
		if err != nil && !missing(err) {
			return err
		}
		out, err := b.client.HeadObject(ctx, &awss3.HeadObjectInput{Bucket: &b.cfg.Location.Bucket, Key: b.object(key)})
		switch {
		case missing(err):
			return nil
		case err == nil && aws.ToString(out.ETag) == "":
			return errNoObject
		case err == nil:
			return errors.New("the server has said that it deleted it, and has it still")
		}
		return err
	})
}
