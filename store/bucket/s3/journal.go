package s3

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"net/http"
	"strconv"
	"strings"

	"github.com/aws/aws-sdk-go-v2/aws"
	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"golang.org/x/sync/errgroup"

	"quarry/store/bucket"
)

const (
	logDir = "log"
	tmpDir = "tmp"
	// maxAhead bounds the entries that are read at once: 16 MiB of them at most.
	maxAhead = 16
)

func entryKey(n uint64) string { return fmt.Sprintf("%s/%020d", logDir, n) }

// Append implements bucket.Journal, by a put that the server must refuse when the
// key exists. Once an attempt has failed in a way that does not say whether it was
// applied, a refusal may be of that one: then the error is not ErrTaken, and the
// caller has to read the entry.
func (b *Bucket) Append(ctx context.Context, n uint64, entry []byte) error {
	if err := bucket.ValidEntry(n, entry); err != nil {
		return err
	}
	if err := b.append(ctx, n, entry); err != nil {
		return fmt.Errorf("append journal entry %d: %w", n, err)
	}
	b.learn(n)
	return nil
}

func (b *Bucket) append(ctx context.Context, n uint64, entry []byte) error {
	if n > 1 && b.known.Load() < n-1 {
		_, err := b.size(ctx, entryKey(n-1))
		if errors.Is(err, bucket.ErrNotFound) {
			return fmt.Errorf("entry %d does not exist", n-1)
		}
		if err != nil {
			return err
		}
		b.learn(n - 1)
	}
	if b.cfg.UnsafeSingleWriter {
		if _, err := b.size(ctx, entryKey(n)); !errors.Is(err, bucket.ErrNotFound) {
			return errors.Join(err, takenUnless(err))
		}
	}
	sum := crc32.Checksum(entry, castagnoli)
	doubt, sent := false, false
	return b.retry(ctx, int64(len(entry)), func(ctx context.Context) error {
		if !sent {
			err := b.send(ctx, entryKey(n), bytes.NewReader(entry), int64(len(entry)), sum, aws.String("*"))
			switch {
			case statusOf(err) == http.StatusPreconditionFailed && doubt:
				return final{errors.New("the entry exists, and may be of an earlier attempt of this call")}
			case statusOf(err) == http.StatusPreconditionFailed:
				return final{bucket.ErrTaken}
			case err != nil:
				doubt = doubt || statusOf(err) != http.StatusConflict && passing(err)
				return err
			}
			sent = true
		}
		err := b.confirm(ctx, entryKey(n), int64(len(entry)), sum)
		if err == errNotStored { // an error with status 200, or not to be seen yet
			sent, doubt = false, true
		}
		return err
	})
}

func takenUnless(err error) error {
	if err == nil {
		return bucket.ErrTaken
	}
	return nil
}

// learn remembers that entry n exists.
func (b *Bucket) learn(n uint64) {
	for old := b.known.Load(); old < n && !b.known.CompareAndSwap(old, n); old = b.known.Load() {
	}
}

// Read implements bucket.Journal. Where the journal ends is asked of each entry
// by its key, for a listing may be old; the listing only tells of a gap.
func (b *Bucket) Read(ctx context.Context, from uint64) iter.Seq2[bucket.Entry, error] {
	return func(yield func(bucket.Entry, error) bool) {
		n := max(from, 1)
		for ahead := 1; ; ahead = min(2*ahead, maxAhead) { // a reader at the end asks for one
			entries, err := b.entries(ctx, n, ahead)
			for _, data := range entries {
				if data == nil {
					break
				}
				b.learn(n)
				if !yield(bucket.Entry{N: n, Data: data}, nil) {
					return
				}
				n++
				entries = entries[1:]
			}
			if err == nil && len(entries) > 0 {
				var more bool
				if more, err = b.existsAfter(ctx, n); err == nil && !more {
					return
				}
				if err == nil { // appended since, or a gap
					if _, err = b.size(ctx, entryKey(n)); errors.Is(err, bucket.ErrNotFound) {
						err = fmt.Errorf("%w: the entry is missing, and there are later ones", bucket.ErrDamaged)
					}
				}
			}
			if err != nil {
				yield(bucket.Entry{}, fmt.Errorf("read journal entry %d: %w", n, err))
				return
			}
		}
	}
}

// entries reads the entries from n on, nil for one that does not exist.
func (b *Bucket) entries(ctx context.Context, n uint64, count int) ([][]byte, error) {
	entries := make([][]byte, count)
	g, ctx := errgroup.WithContext(ctx)
	for i := range entries {
		g.Go(func() (err error) {
			entries[i], err = b.entry(ctx, n+uint64(i))
			if errors.Is(err, bucket.ErrNotFound) {
				return nil
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return nil, err
	}
	return entries, nil
}

func (b *Bucket) entry(ctx context.Context, n uint64) (data []byte, err error) {
	err = b.retry(ctx, bucket.MaxEntry, func(ctx context.Context) error {
		out, err := b.client.GetObject(ctx, &awss3.GetObjectInput{
			Bucket: &b.cfg.Location.Bucket, Key: b.object(entryKey(n)), ChecksumMode: types.ChecksumModeEnabled,
		})
		if missing(err) {
			return final{bucket.ErrNotFound}
		}
		if err != nil {
			return err
		}
		defer out.Body.Close()
		if aws.ToString(out.ETag) == "" {
			return errNoObject
		}
		if data, err = io.ReadAll(io.LimitReader(out.Body, bucket.MaxEntry+1)); err != nil {
			return err
		}
		if out.ContentLength == nil || *out.ContentLength != int64(len(data)) && len(data) <= bucket.MaxEntry {
			return fmt.Errorf("the answer ended after %d bytes", len(data))
		}
		if err := bucket.ValidEntry(n, data); err != nil {
			return final{fmt.Errorf("%w: %w", bucket.ErrDamaged, err)}
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return data, nil
}

// existsAfter says whether there is an entry behind n. Anything else there may be
// an entry under a wrong name, which nothing else would tell.
func (b *Bucket) existsAfter(ctx context.Context, n uint64) (found bool, err error) {
	err = b.walk(ctx, logDir+"/", entryKey(n), 1, func(key string, _ int64) error {
		got, err := strconv.ParseUint(strings.TrimPrefix(key, logDir+"/"), 10, 64)
		if err != nil || key != entryKey(got) {
			return fmt.Errorf("%w: %s is no journal entry; move it away", bucket.ErrDamaged, key)
		}
		found = true
		return errStop
	})
	if errors.Is(err, errStop) {
		err = nil
	}
	return found, err
}
