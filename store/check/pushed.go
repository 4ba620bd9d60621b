package check

import (
	"context"
	"errors"
	"fmt"
	"io"

	"quarry/store/registry"
)

// pushed checks the content of what was pushed to /v2/ against the digests that it
// is kept by.
func (c *checker) pushed(ctx context.Context) error {
	for obj, err := range c.cfg.Bucket.List(ctx, registry.BlobsPrefix) {
		if err != nil {
			return c.unlisted(registry.BlobsPrefix, err)
		}
		d, ok := registry.ParseContentKey(obj.Key)
		if !ok {
			c.tell(Problem{Kind: "blob", Object: obj.Key, Message: "the key has no digest: no blob is found by it, delete the object"})
			continue
		}
		if c.cfg.Quick {
			continue
		}
		content, err := registry.FindContent(ctx, c.cfg.Bucket, d)
		if errors.Is(err, registry.ErrBlobUnknown) {
			continue // deleted meanwhile
		}
		if err == nil {
			_, err = io.Copy(io.Discard, content.Reader(ctx, 0, content.Size))
		}
		switch {
		case errors.Is(err, registry.ErrDamaged):
			c.tell(Problem{Kind: "blob", Object: obj.Key, Message: err.Error()})
		case err != nil && isDamage(err):
			c.tell(Problem{Kind: "blob", Object: obj.Key, Message: fmt.Sprintf("%v; push it again", err)})
		case err != nil:
			return fmt.Errorf("check %s: %w", obj.Key, err)
		}
	}
	return nil
}
