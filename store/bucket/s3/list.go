package s3

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"

	"quarry/store/bucket"
)

// maxEmptyPages bounds the pages without a key that are followed.
const maxEmptyPages = 16

// List implements bucket.Bucket. Keys that do not ascend end it: a page came
// twice, or the server does not sort as S3 does, and what else is in its answer
// would be a guess.
func (b *Bucket) List(ctx context.Context, prefix string) iter.Seq2[bucket.Object, error] {
	return func(yield func(bucket.Object, error) bool) {
		if strings.ContainsFunc(prefix, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
			return // no key starts like this, and XML could not say it
		}
		err := b.walk(ctx, prefix, "", 0, func(key string, size int64) error {
			first, _, _ := strings.Cut(key, "/")
			if first == logDir || first == tmpDir {
				return nil
			}
			if err := bucket.ValidKey(key); err != nil {
				return fmt.Errorf("%w: %w: something else than quarry wrote to the bucket; move it away", bucket.ErrDamaged, err)
			}
			if !yield(bucket.Object{Key: key, Size: size}, nil) {
				return errStop
			}
			return nil
		})
		if err != nil && !errors.Is(err, errStop) {
			yield(bucket.Object{}, fmt.Errorf("list %q: %w", prefix, err))
		}
	}
}

// errStop ends a walk.
var errStop = errors.New("enough")

// walk calls fn for each key with the prefix and behind the key after, in order.
func (b *Bucket) walk(ctx context.Context, prefix, after string, limit int32, fn func(key string, size int64) error) error {
	in := &awss3.ListObjectsV2Input{Bucket: &b.cfg.Location.Bucket, Prefix: b.object(prefix)}
	if after != "" {
		in.StartAfter = b.object(after)
	}
	if limit > 0 {
		in.MaxKeys = &limit
	}
	last, empty := after, 0
	for {
		page, err := b.page(ctx, in)
		if err != nil {
			return err
		}
		for _, o := range page.Contents {
			key, ok := strings.CutPrefix(aws.ToString(o.Key), b.cfg.Location.prefix())
			if !ok || !strings.HasPrefix(key, prefix) || key <= last && last != "" || o.Size == nil || *o.Size < 0 {
				return fmt.Errorf("the server listed %.100q behind %.100q: a page came twice, or it does not list in the order of S3", aws.ToString(o.Key), last)
			}
			last = key
			if err := fn(key, *o.Size); err != nil {
				return err
			}
		}
		if !aws.ToBool(page.IsTruncated) {
			return nil
		}
		if len(page.Contents) > 0 {
			empty = 0
		} else if empty++; empty > maxEmptyPages {
			return fmt.Errorf("the server listed nothing in %d pages, and says that there is more", empty)
		}
		in.ContinuationToken = page.NextContinuationToken
	}
}

// page asks for one page. An answer that does not say what it lists is none: an
// error in an answer with status 200 reads like an empty listing.
func (b *Bucket) page(ctx context.Context, in *awss3.ListObjectsV2Input) (*awss3.ListObjectsV2Output, error) {
	var page *awss3.ListObjectsV2Output
	err := b.retry(ctx, 0, func(ctx context.Context) error {
		out, err := b.client.ListObjectsV2(ctx, in)
		if err != nil {
			return err
		}
		token := aws.ToString(out.NextContinuationToken)
		switch {
		case aws.ToString(out.Name) != b.cfg.Location.Bucket || aws.ToString(out.Prefix) != aws.ToString(in.Prefix):
			return errors.New("the answer is no listing of this bucket and prefix")
		case aws.ToBool(out.IsTruncated) && token == "":
			return errors.New("the listing goes on, and does not say where")
		case aws.ToBool(out.IsTruncated) && token == aws.ToString(in.ContinuationToken):
			return errors.New("the listing goes on where it was")
		}
		page = out
		return nil
	})
	return page, err
}
