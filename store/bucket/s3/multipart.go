package s3

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"golang.org/x/sync/errgroup"
)

// abortTimeout bounds the end of an upload that failed, perhaps because the server
// is out of reach.
const abortTimeout = 10 * time.Second

// putParts stores a large object. One that fails is aborted; what a crash leaves
// is for the bucket's lifecycle rule, see docs/OPERATIONS.md.
func (b *Bucket) putParts(ctx context.Context, key string, body io.ReaderAt, size int64, sum uint32) error {
	u := upload{b: b, key: key, body: body, size: size, sum: sum}
	if err := u.create(ctx); err != nil {
		return fmt.Errorf("begin upload: %w", err)
	}
	parts, err := u.sendAll(ctx)
	if err == nil {
		err = u.complete(ctx, parts)
	}
	if err != nil {
		return errors.Join(err, u.abort(context.WithoutCancel(ctx)))
	}
	return nil
}

// upload is one object on its way in parts.
type upload struct {
	b    *Bucket
	key  string
	body io.ReaderAt
	size int64
	sum  uint32
	id   *string
}

func (u *upload) create(ctx context.Context) error {
	return u.b.retry(ctx, 0, func(ctx context.Context) error {
		out, err := u.b.client.CreateMultipartUpload(ctx, &awss3.CreateMultipartUploadInput{
			Bucket: &u.b.cfg.Location.Bucket, Key: u.b.object(u.key),
			ChecksumAlgorithm: types.ChecksumAlgorithmCrc32c, ChecksumType: types.ChecksumTypeFullObject,
		})
		if err != nil {
			return err
		}
		if out.UploadId == nil || *out.UploadId == "" {
			return errors.New("the server named no upload")
		}
		u.id = out.UploadId
		return nil
	})
}

// partLength returns the size of all parts but the last, with which their number
// is at most maxParts.
func (u *upload) partLength() int64 {
	return max(u.b.cfg.PartSize, (u.size+maxParts-1)/maxParts)
}

func (u *upload) sendAll(ctx context.Context) ([]types.CompletedPart, error) {
	length := u.partLength()
	parts := make([]types.CompletedPart, (u.size+length-1)/length)
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(partsAtOnce)
	for i := range parts {
		g.Go(func() (err error) {
			off := int64(i) * length
			parts[i], err = u.sendPart(ctx, int32(i+1), off, min(length, u.size-off))
			return err
		})
	}
	return parts, g.Wait()
}

func (u *upload) sendPart(ctx context.Context, number int32, off, size int64) (types.CompletedPart, error) {
	sum, err := checksum(ctx, u.body, off, size)
	if err != nil {
		return types.CompletedPart{}, err
	}
	part := types.CompletedPart{PartNumber: &number, ChecksumCRC32C: encodeSum(sum)}
	err = u.b.retry(ctx, size, func(ctx context.Context) error {
		r := newReader(u.body, off, size)
		out, err := u.b.client.UploadPart(ctx, &awss3.UploadPartInput{
			Bucket: &u.b.cfg.Location.Bucket, Key: u.b.object(u.key), UploadId: u.id, PartNumber: &number,
			Body: r, ContentLength: &size, ChecksumCRC32C: part.ChecksumCRC32C,
		})
		if err = r.end(err); err != nil {
			return err
		}
		if out.ETag == nil || *out.ETag == "" {
			return errNotStored // 200 with an error in it
		}
		part.ETag = out.ETag
		return nil
	})
	if err != nil {
		return part, fmt.Errorf("part %d: %w", number, err)
	}
	return part, nil
}

// complete makes the parts an object. Whatever the server says to that, the
// object counts when it is there: an upload that was completed by an attempt
// whose answer got lost is not known any more at the next.
func (u *upload) complete(ctx context.Context, parts []types.CompletedPart) error {
	return u.b.retry(ctx, u.size, func(ctx context.Context) error {
		_, err := u.b.client.CompleteMultipartUpload(ctx, &awss3.CompleteMultipartUploadInput{
			Bucket: &u.b.cfg.Location.Bucket, Key: u.b.object(u.key), UploadId: u.id,
			MultipartUpload: &types.CompletedMultipartUpload{Parts: parts},
			ChecksumCRC32C:  encodeSum(u.sum), ChecksumType: types.ChecksumTypeFullObject, MpuObjectSize: &u.size,
		})
		unknown := statusOf(err) == http.StatusNotFound
		if err != nil && !unknown && !passing(err) {
			return err
		}
		there := u.b.confirm(ctx, u.key, u.size, u.sum)
		if there == errNotStored && err != nil && !unknown {
			return err // the reason, and it is tried again
		}
		return there
	})
}

// abort gives the parts back. An upload that is not known any more needs none.
func (u *upload) abort(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, abortTimeout)
	defer cancel()
	err := u.b.retry(ctx, 0, func(ctx context.Context) error {
		_, err := u.b.client.AbortMultipartUpload(ctx, &awss3.AbortMultipartUploadInput{
			Bucket: &u.b.cfg.Location.Bucket, Key: u.b.object(u.key), UploadId: u.id,
		})
		if statusOf(err) == http.StatusNotFound {
			return nil
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("abort upload, whose parts stay until the bucket's lifecycle rule removes them: %w", err)
	}
	return nil
}
