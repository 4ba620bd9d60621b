package api

import (
	"container/list"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/singleflight"

	"quarry/rafs"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
)

const (
	// maxCachedChunks bounds the decoded blobs kept: a chunk takes 56 bytes, so
	// 1 Mi of them are 56 MiB. One larger blob is kept alone.
	maxCachedChunks = 1 << 20
	// maxBlobLoads bounds the bootstraps decoded at once, as each is in memory
	// whole with its tree.
	maxBlobLoads = 2
	// blobLoadTimeout ends a load that nobody may be waiting for any more.
	blobLoadTimeout = time.Minute
)

// blobCache keeps the virtual blobs used last, decoded. Blobs never change, so
// nothing in it ever goes stale.
type blobCache struct {
	flight singleflight.Group
	loads  chan struct{}

	mu     sync.Mutex // guards the rest
	order  *list.List // of *rafs.Blob, last used first
	byID   map[chunk.Digest]*list.Element
	chunks int
}

func newBlobCache() *blobCache {
	return &blobCache{
		loads: make(chan struct{}, maxBlobLoads),
		order: list.New(),
		byID:  make(map[chunk.Digest]*list.Element),
	}
}

// get returns blob v. However many ask for it at once, it is loaded once; the
// load outlives a caller who goes away, since others may wait for it.
func (c *blobCache) get(ctx context.Context, b bucket.Bucket, v chunk.Digest) (*rafs.Blob, error) {
	if blob := c.cached(v); blob != nil {
		return blob, nil
	}
	done := c.flight.DoChan(v.Hex(), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), blobLoadTimeout)
		defer cancel()
		select {
		case c.loads <- struct{}{}:
			defer func() { <-c.loads }()
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		blob, err := loadBlob(ctx, b, v)
		if err == nil {
			c.add(blob)
		}
		return blob, err
	})
	select {
	case res := <-done:
		if res.Err != nil {
			return nil, res.Err
		}
		return res.Val.(*rafs.Blob), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (c *blobCache) cached(v chunk.Digest) *rafs.Blob {
	c.mu.Lock()
	defer c.mu.Unlock()
	el, ok := c.byID[v]
	if !ok {
		return nil
	}
	c.order.MoveToFront(el)
	return el.Value.(*rafs.Blob)
}

func (c *blobCache) add(blob *rafs.Blob) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if _, ok := c.byID[blob.ID]; ok {
		return
	}
	c.byID[blob.ID] = c.order.PushFront(blob)
	c.chunks += len(blob.Chunks)
	for c.chunks > maxCachedChunks && c.order.Len() > 1 {
		old := c.order.Remove(c.order.Back()).(*rafs.Blob)
		delete(c.byID, old.ID)
		c.chunks -= len(old.Chunks)
	}
}

// loadBlob goes from the id of a virtual blob to its bootstrap and decodes that.
func loadBlob(ctx context.Context, b bucket.Bucket, v chunk.Digest) (*rafs.Blob, error) {
	key := image.BlobKey(v)
	text, err := readObject(ctx, b, key, int64(len(chunk.Digest{}.String())))
	if errors.Is(err, bucket.ErrNotFound) {
		return nil, fmt.Errorf("blob %s: %w", v.Hex(), err)
	}
	if err != nil {
		return nil, err
	}
	d, err := chunk.Parse(string(text))
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrObjectCorrupt, key, err)
	}
	boot, err := readVerified(ctx, b, image.BootstrapKey(d), d, rafs.MaxBootstrap)
	if err != nil {
		return nil, fmt.Errorf("bootstrap of blob %s: %w", v.Hex(), err)
	}
	img, err := rafs.Decode(boot)
	if err != nil {
		return nil, fmt.Errorf("%w: %s: %w", ErrObjectCorrupt, image.BootstrapKey(d), err)
	}
	if img.Blob == nil || img.Blob.ID != v {
		return nil, fmt.Errorf("%w: %s leads to bootstrap %s, which has another blob", ErrObjectCorrupt, key, d)
	}
	return img.Blob, nil
}
