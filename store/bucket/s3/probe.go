package s3

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/crc32"
	"net/http"
	"sync/atomic"

	"github.com/aws/aws-sdk-go-v2/aws"
	"golang.org/x/sync/errgroup"
)

// ErrUnconditional says that the server does not keep two writers apart.
var ErrUnconditional = errors.New("the server ignores conditional writes (If-None-Match), so two writers could both append the same journal entry: use a server that has them, or pass --unsafe-single-writer when nothing else will ever write to this bucket")

const (
	// probers is how many writers Probe has at once.
	probers = 16
	// maxProbes bounds how often a probe that cannot be judged is made again.
	maxProbes = 4
)

// errUnclear says that more writers were told that they won than have.
var errUnclear = errors.New("more than one writer was told that it won")

// Probe finds out whether the journal can have more than one writer: a key that
// exists must not be written again, and of many at once one must win. A process
// that will write calls it once, unless it is told that it is the only one.
func (b *Bucket) Probe(ctx context.Context) error {
	if b.cfg.UnsafeSingleWriter {
		return nil
	}
	for _, writers := range []int{1, probers} {
		err := errUnclear
		for range maxProbes {
			if !errors.Is(err, errUnclear) {
				break
			}
			// No two probes meet at a key, and none at that of one that failed.
			err = b.probe(ctx, fmt.Sprintf("%s/probe-%s", tmpDir, rand.Text()), writers)
		}
		if errors.Is(err, errUnclear) {
			err = ErrUnconditional
		}
		if err != nil {
			return fmt.Errorf("probe bucket %s: %w", b.cfg.Location, err)
		}
	}
	return nil
}

// probe has so many writers create one key at once, and one more after them. Two
// that were told that they won and then saw their own bytes prove that the server
// keeps nobody apart. Who saw other bytes may have had an error with status 200.
func (b *Bucket) probe(ctx context.Context, key string, writers int) error {
	var won, told atomic.Int64
	create := func(id int) error {
		p := fmt.Appendf(nil, "writer %d", id)
		sum := crc32.Checksum(p, castagnoli)
		return b.retry(ctx, 0, func(ctx context.Context) error {
			err := b.send(ctx, key, bytes.NewReader(p), int64(len(p)), sum, aws.String("*"))
			if statusOf(err) == http.StatusPreconditionFailed {
				return nil
			}
			if err != nil {
				return err
			}
			if err := b.confirm(ctx, key, int64(len(p)), sum); err == errNotStored {
				told.Add(1)
				return nil
			} else if err != nil {
				return err
			}
			won.Add(1)
			return nil
		})
	}
	var g errgroup.Group
	for id := range writers {
		g.Go(func() error { return create(id + 10) }) // all of two digits, so of one size
	}
	err := g.Wait()
	if err == nil {
		err = create(writers + 10)
	}
	err = errors.Join(err, b.remove(context.WithoutCancel(ctx), key))
	switch {
	case err != nil:
		return err
	case won.Load() > 1:
		return ErrUnconditional
	case told.Load() > 0:
		return errUnclear
	}
	// An attempt whose answer got lost may have won, so nobody may know that it did.
	return nil
}
