package registry

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/opencontainers/go-digest"

	"quarry/internal/strictjson"
	"quarry/store/bucket"
)

// recordVersion is the version of the registry's records; FORMAT.md says what a
// new one needs.
const recordVersion = 1

// blobRecord says that a repository has a blob, and how long it is, so that
// content that was cut off is found out before it is promised.
type blobRecord struct {
	Version int   `json:"version"`
	Size    int64 `json:"size"`
}

// maxBlobRecord bounds a blobRecord: two numbers and their names.
const maxBlobRecord = 128

// Step is how much of a content is read from the bucket at once, and held by who reads.
const Step = 1 << 20

// Content is the stored content of a digest.
type Content struct {
	Digest digest.Digest
	Size   int64
	bucket bucket.Bucket
	wrong  func(digest.Digest) // told when the bytes are others; may be nil
}

// find is FindContent for content that the store offers: what turns out to be
// damaged is unknown until it is pushed again, so that clients send it.
func (s *Store) find(ctx context.Context, d digest.Digest) (*Content, error) {
	c, err := FindContent(ctx, s.bucket, d)
	if err == nil {
		c.wrong = s.damaged.add
	}
	return c, err
}

// FindContent finds the content of a blob or manifest, whichever repository it is
// in. Errors: ErrBlobUnknown.
func FindContent(ctx context.Context, b bucket.Bucket, d digest.Digest) (*Content, error) {
	obj, err := b.Stat(ctx, ContentKey(d))
	if errors.Is(err, bucket.ErrNotFound) {
		return nil, fmt.Errorf("%w: %s", ErrBlobUnknown, d)
	}
	if err != nil {
		return nil, fmt.Errorf("look for %s: %w", d, err)
	}
	return &Content{Digest: d, Size: obj.Size, bucket: b}, nil
}

// Reader reads size bytes from off on. When that is the whole content it is
// verified, and its last part is kept back until the digest is known to be right:
// who got all bytes got the right ones. Its error is ErrDamaged then. It reads as
// long as ctx lives, and needs no closing.
func (c *Content) Reader(ctx context.Context, off, size int64) io.Reader {
	r := &reader{ctx: ctx, content: c, off: off, end: off + size, buf: make([]byte, min(size, Step))}
	if off == 0 && size == c.Size {
		r.sum = c.Digest.Algorithm().Digester()
	}
	return r
}

type reader struct {
	ctx      context.Context // of the one request that reads
	content  *Content
	off, end int64           // what is still to be read from the bucket
	sum      digest.Digester // nil when nothing is to be verified any more
	buf      []byte
	rest     []byte // of buf, not yet returned
}

// Read implements io.Reader.
func (r *reader) Read(p []byte) (int, error) {
	if len(r.rest) == 0 {
		if r.off == r.end && r.sum == nil {
			return 0, io.EOF
		}
		if err := r.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

func (r *reader) fill() error {
	buf := r.buf[:min(int64(len(r.buf)), r.end-r.off)]
	d := r.content.Digest
	if len(buf) > 0 {
		if err := r.content.bucket.ReadAt(r.ctx, ContentKey(d), buf, r.off); err != nil {
			return fmt.Errorf("read content %s: %w", d, err)
		}
	}
	r.off += int64(len(buf))
	if r.sum != nil {
		r.sum.Hash().Write(buf)
		if r.off == r.end {
			if got := r.sum.Digest(); got != d {
				if r.content.wrong != nil {
					r.content.wrong(d)
				}
				return fmt.Errorf("%w: %s: content has %s (push it again, or restore it)", ErrDamaged, d, got)
			}
			r.sum = nil
		}
	}
	r.rest = buf
	return nil
}

// Blob finds a blob of a repository. Who is told that it is there may name it in
// a manifest without uploading it. Errors: ErrBlobUnknown; of one that is known to be
// damaged it is ErrDamaged too, so that whoever asks before a push sends it again.
func (s *Store) Blob(ctx context.Context, repo string, d digest.Digest) (*Content, error) {
	unlock, err := s.locks.lock(ctx, d.String())
	if err != nil {
		return nil, err
	}
	defer unlock()
	return s.blob(ctx, repo, d)
}

// blob is Blob for who holds the lock of d.
func (s *Store) blob(ctx context.Context, repo string, d digest.Digest) (*Content, error) {
	rec, err := readRecord[blobRecord](ctx, s.bucket, BlobKey(repo, d), maxBlobRecord)
	if errors.Is(err, bucket.ErrNotFound) {
		return nil, fmt.Errorf("%w: %s has no blob %s", ErrBlobUnknown, repo, d)
	}
	if errors.Is(err, ErrDamaged) || bucket.IsDamage(err) {
		return nil, fmt.Errorf("%w: %w: %w", ErrBlobUnknown, ErrDamaged, err)
	}
	if err != nil {
		return nil, err
	}
	if s.damaged.has(d) {
		return nil, fmt.Errorf("%w: %w: %s (push it again)", ErrBlobUnknown, ErrDamaged, d)
	}
	c, err := s.find(ctx, d)
	if err != nil {
		return nil, err
	}
	if c.Size != rec.Size {
		return nil, fmt.Errorf("%w: %w: %s has %d bytes, pushed were %d (push it again, or restore it)", ErrBlobUnknown, ErrDamaged, ContentKey(d), c.Size, rec.Size)
	}
	s.recent.touch(d)
	return c, nil
}

// Mount makes a blob of one repository one of another. Errors: ErrBlobUnknown when
// from does not have it.
func (s *Store) Mount(ctx context.Context, repo, from string, d digest.Digest) error {
	unlock, err := s.locks.lock(ctx, d.String())
	if err != nil {
		return err
	}
	defer unlock()
	c, err := s.blob(ctx, from, d)
	if err != nil {
		return err
	}
	return s.putRecord(ctx, BlobKey(repo, d), blobRecord{Version: recordVersion, Size: c.Size})
}

// keepBlob makes verified content a blob of a repository, durably on nil. Of many
// that push it at once the first stores it.
func (s *Store) keepBlob(ctx context.Context, repo string, d digest.Digest, body io.ReaderAt, size int64) error {
	unlock, err := s.locks.lock(ctx, d.String())
	if err != nil {
		return err
	}
	defer unlock()
	there, err := s.whole(ctx, d, size)
	if err != nil {
		return err
	}
	if !there {
		done, err := s.uploads.copying(size)
		if err != nil {
			return fmt.Errorf("store blob %s: %w", d, err)
		}
		defer done()
		if err := s.bucket.Put(ctx, ContentKey(d), body, size); err != nil {
			return fmt.Errorf("store blob %s: %w", d, err)
		}
		s.damaged.forget(d)
	}
	s.recent.touch(d)
	return s.putRecord(ctx, BlobKey(repo, d), blobRecord{Version: recordVersion, Size: size})
}

// whole reports whether the content of d is stored and undamaged: whoever sends it
// again may do so because it is not. Reading it costs what storing it would.
func (s *Store) whole(ctx context.Context, d digest.Digest, size int64) (bool, error) {
	c, err := FindContent(ctx, s.bucket, d)
	if err == nil && c.Size == size {
		_, err = io.Copy(io.Discard, c.Reader(ctx, 0, size))
		if err == nil {
			return true, nil
		}
	}
	if err == nil || errors.Is(err, ErrBlobUnknown) || errors.Is(err, ErrDamaged) || bucket.IsDamage(err) {
		return false, nil
	}
	return false, fmt.Errorf("look whether blob %s is stored: %w", d, err)
}

// DeleteBlob takes a blob out of a repository; its content stays until it is
// collected. Errors: ErrBlobUnknown.
func (s *Store) DeleteBlob(ctx context.Context, repo string, d digest.Digest) error {
	unlock, err := s.locks.lock(ctx, d.String())
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := s.bucket.Stat(ctx, BlobKey(repo, d)); errors.Is(err, bucket.ErrNotFound) {
		return fmt.Errorf("%w: %s has no blob %s", ErrBlobUnknown, repo, d)
	} else if err != nil {
		return fmt.Errorf("look for %s in %s: %w", d, repo, err)
	}
	if err := s.bucket.Delete(ctx, BlobKey(repo, d)); err != nil {
		return fmt.Errorf("delete blob %s of %s: %w", d, repo, err)
	}
	return nil
}

// Drop removes the object at key, the content of d or a repository's record of it,
// unless a client was told less than grace ago that d is there: it reports whether
// the object is gone. It is for who has found that nothing refers to d.
func (s *Store) Drop(ctx context.Context, d digest.Digest, key string, grace time.Duration) (bool, error) {
	unlock, err := s.locks.lock(ctx, d.String())
	if err != nil {
		return false, err
	}
	defer unlock()
	if s.recent.since(d, grace) {
		return false, nil
	}
	// Another writer may have promised it to somebody by now.
	if err := s.confirm(ctx); err != nil {
		return false, fmt.Errorf("delete %s: %w", key, err)
	}
	if err := s.bucket.Delete(ctx, key); err != nil {
		return false, fmt.Errorf("delete %s: %w", key, err)
	}
	return true, nil
}

// confirm asks whether this process may still delete.
func (s *Store) confirm(ctx context.Context) error {
	if s.cfg.Confirm == nil {
		return nil
	}
	return s.cfg.Confirm(ctx)
}

// putRecord stores a record unless exactly it is there.
func (s *Store) putRecord(ctx context.Context, key string, rec any) error {
	b, err := json.Marshal(rec)
	if err != nil {
		return fmt.Errorf("encode %s: %w", key, err)
	}
	return s.putBytes(ctx, key, b)
}

// putBytes stores a small object unless exactly it is there.
func (s *Store) putBytes(ctx context.Context, key string, b []byte) error {
	old, err := bucket.ReadObject(ctx, s.bucket, key, int64(len(b)))
	if err == nil && bytes.Equal(old, b) {
		return nil
	}
	if err := s.bucket.Put(ctx, key, bytes.NewReader(b), int64(len(b))); err != nil {
		return fmt.Errorf("put %s: %w", key, err)
	}
	return nil
}

// readRecord reads a record strictly. Errors: bucket.ErrNotFound, ErrDamaged.
func readRecord[T any](ctx context.Context, b bucket.Bucket, key string, limit int) (T, error) {
	var zero T
	raw, err := bucket.ReadReplaced(ctx, b, key, int64(limit))
	if err != nil {
		return zero, err
	}
	rec, err := strictjson.Decode[T](raw, limit)
	if err != nil {
		return zero, fmt.Errorf("%w: %s: %w (push it again)", ErrDamaged, key, err)
	}
	return rec, nil
}
