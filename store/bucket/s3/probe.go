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

// probers is how many writers Probe has at once.
const probers = 16

// Probe finds out whether the journal can have more than one writer: a key that
// exists must not be written again, and of many at once one must win. A process
// that will write calls it once, unless it is told that it is the only one.
func (b *Bucket) Probe(ctx context.Context) error {
	if b.cfg.UnsafeSingleWriter {
		return nil
	}
	for _, at := range []int{1, probers} {
		// No two probes meet at a key, and none at that of one that failed.
		if err := b.probe(ctx, fmt.Sprintf("%s/probe-%s", tmpDir, rand.Text()), at); err != nil {
			return fmt.Errorf("probe bucket %s: %w", b.cfg.Location, err)
		}
	}
	return nil
}

// probe has so many writers create one key at once, and one more after them.
func (b *Bucket) probe(ctx context.Context, key string, writers int) error {
	var won, lost atomic.Int64
	create := func(id int) error {
		p := fmt.Appendf(nil, "writer %d", id)
		return b.retry(ctx, 0, func(ctx context.Context) error {
			err := b.send(ctx, key, bytes.NewReader(p), int64(len(p)), crc32.Checksum(p, castagnoli), aws.String("*"))
			switch {
			case err == nil:
				won.Add(1)
			case statusOf(err) == http.StatusPreconditionFailed:
				lost.Add(1)
			default:
				return err
			}
			return nil
		})
	}
	var g errgroup.Group
	for id := range writers {
		g.Go(func() error { return create(id) })
	}
	err := g.Wait()
	if err == nil {
		err = create(writers)
	}
	err = errors.Join(err, b.remove(context.WithoutCancel(ctx), key))
	switch {
	case err != nil:
		return err
	// An attempt whose answer got lost may have won, so nobody may have.
	case won.Load() > 1:
		return ErrUnconditional
	}
	return nil
}
