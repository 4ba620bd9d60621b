package s3

import (
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sync"

	"github.com/aws/aws-sdk-go-v2/aws"
	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"quarry/store/bucket"
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// errNotStored says that the server took an object and then has not got it.
var errNotStored = errors.New("the server has said that it stored it, and has it not")

// Put implements bucket.Bucket. The body is read once for its checksum, which the
// server compares with what arrives, and which the object is known by afterwards.
func (b *Bucket) Put(ctx context.Context, key string, body io.ReaderAt, size int64) error {
	if err := bucket.ValidKey(key); err != nil {
		return err
	}
	err := b.put(ctx, key, body, size)
	if err != nil {
		return fmt.Errorf("put %s: %w", key, err)
	}
	return nil
}

func (b *Bucket) put(ctx context.Context, key string, body io.ReaderAt, size int64) error {
	if size < 0 {
		return fmt.Errorf("size %d is negative", size)
	}
	sum, err := checksum(ctx, body, 0, size)
	if err != nil {
		return err
	}
	unlock, err := b.lockKey(ctx, key)
	if err != nil {
		return err
	}
	defer unlock()
	if size > b.cfg.PartSize {
		return b.putParts(ctx, key, body, size, sum)
	}
	return b.retry(ctx, size, func(ctx context.Context) error {
		if err := b.send(ctx, key, body, size, sum, nil); err != nil {
			return err
		}
		return b.confirm(ctx, key, size, sum)
	})
}

// checksum reads size bytes of body from off and returns their CRC32C.
func checksum(ctx context.Context, body io.ReaderAt, off, size int64) (uint32, error) {
	h := crc32.New(castagnoli)
	buf := make([]byte, min(size, 1<<20))
	for end := off + size; off < end; off += int64(len(buf)) {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		buf = buf[:min(int64(len(buf)), end-off)]
		if n, err := body.ReadAt(buf, off); n < len(buf) {
			if err == io.EOF {
				err = io.ErrUnexpectedEOF
			}
			return 0, fmt.Errorf("read body at %d: %w", off+int64(n), err)
		}
		h.Write(buf)
	}
	return h.Sum32(), ctx.Err()
}

// encodeSum writes a CRC32C as S3 does.
func encodeSum(sum uint32) *string {
	return aws.String(base64.StdEncoding.EncodeToString(binary.BigEndian.AppendUint32(nil, sum)))
}

// send puts an object in one request; ifNoneMatch, when not nil, is a condition.
func (b *Bucket) send(ctx context.Context, key string, body io.ReaderAt, size int64, sum uint32, ifNoneMatch *string) error {
	r := newReader(body, 0, size)
	_, err := b.client.PutObject(ctx, &awss3.PutObjectInput{
		Bucket: &b.cfg.Location.Bucket, Key: b.object(key), Body: r,
		ContentLength: &size, ChecksumCRC32C: encodeSum(sum), IfNoneMatch: ifNoneMatch,
	})
	return r.end(err)
}

// confirm asks the server whether it has the object with these bytes.
func (b *Bucket) confirm(ctx context.Context, key string, size int64, sum uint32) error {
	out, err := b.client.HeadObject(ctx, &awss3.HeadObjectInput{
		Bucket: &b.cfg.Location.Bucket, Key: b.object(key), ChecksumMode: types.ChecksumModeEnabled,
	})
	switch {
	case missing(err):
		return errNotStored
	case err != nil:
		return err
	case out.ContentLength == nil || aws.ToString(out.ETag) == "":
		return errNoObject
	case *out.ContentLength != size:
		return errNotStored
	case out.ChecksumCRC32C != nil && out.ChecksumType != types.ChecksumTypeComposite:
		if *out.ChecksumCRC32C != *encodeSum(sum) {
			return errNotStored
		}
		return nil
	}
	return b.readBack(ctx, key, size, sum)
}

// readBack is confirm for servers that keep no checksum of the whole object.
func (b *Bucket) readBack(ctx context.Context, key string, size int64, sum uint32) error {
	got, err := checksum(ctx, remote{ctx, b, key}, 0, size)
	if err == nil && got != sum {
		err = errNotStored
	}
	return err
}

// remote reads an object as an io.ReaderAt.
type remote struct {
	ctx context.Context // of the one call that reads
	b   *Bucket
	key string
}

func (r remote) ReadAt(p []byte, off int64) (int, error) {
	if err := r.b.get(r.ctx, r.key, p, off); err != nil {
		return 0, errors.New(err.Error())
	}
	return len(p), nil
}

// reader is a part of a body on its way. The HTTP client may go on reading for a
// while after it has said that a request failed; once end has returned, nothing
// reads the body any more.
type reader struct {
	mu    sync.Mutex // guards all
	r     *io.SectionReader
	err   error // of the body itself
	ended bool
}

func newReader(body io.ReaderAt, off, size int64) *reader {
	return &reader{r: io.NewSectionReader(body, off, size)}
}

var errEnded = errors.New("the request has ended")

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return 0, errEnded
	}
	n, err := r.r.Read(p)
	if err != nil && err != io.EOF {
		r.err = err
	}
	return n, err
}

// Seek implements io.Seeker: signing reads the body first.
func (r *reader) Seek(off int64, whence int) (int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.ended {
		return 0, errEnded
	}
	return r.r.Seek(off, whence)
}

// end keeps the body from being read again. An error of the body's own is final.
func (r *reader) end(err error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = true
	if err != nil && r.err != nil {
		return final{fmt.Errorf("read body: %w", r.err)}
	}
	return err
}
