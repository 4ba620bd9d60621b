package converter

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"time"

	"quarry/rafs"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
)

// publish stores the bootstrap, the config and the image statement, in this
// order, so that a statement is never there without what it names.
func (c *conversion) publish(ctx context.Context, t *rafs.Tree) error {
	boot, im, treeDigest, err := encode(t)
	if err != nil {
		return err
	}
	s := image.Statement{
		Source: c.image.Source, Platform: c.image.Platform, Config: c.image.ConfigDigest,
		Bootstrap: chunk.Sum(boot), BootstrapSize: int64(len(boot)),
		Tree: treeDigest, ChunkSize: c.cfg.ChunkSize, Converter: Version,
	}
	if im.Blob != nil {
		s.Blob = &im.Blob.ID
	}
	payload, err := image.EncodeStatement(s)
	if err != nil {
		return err
	}
	objects := []object{
		{image.BootstrapKey(s.Bootstrap), boot},
		{image.ConfigKey(s.Config), c.image.Config},
	}
	if s.Blob != nil {
		objects = append(objects, object{image.BlobKey(*s.Blob), []byte(s.Bootstrap.String())})
	}
	for _, o := range objects {
		if err := c.putObject(ctx, o.key, o.body); err != nil {
			return err
		}
	}
	if err := c.putStatement(ctx, s, payload); err != nil {
		return err
	}
	c.result.ImageID, c.result.Statement = image.ID(payload), s
	c.count(im)
	return nil
}

// putStatement stores the statement and its signature. Another converter
// version may have made another statement of the same source; it is replaced,
// and its signatures go first, because they would show as altered beside the
// new payload. In between the image is unsigned, never wrong.
func (c *conversion) putStatement(ctx context.Context, s image.Statement, payload []byte) error {
	key := image.StatementKey(s.Source, s.Platform)
	old, err := bucket.ReadObject(ctx, c.cfg.Bucket, key, image.MaxStatement)
	if err != nil && !errors.Is(err, bucket.ErrNotFound) {
		return err
	}
	if !bytes.Equal(old, payload) {
		if err := c.deleteSignatures(ctx, s); err != nil {
			return err
		}
		if err := c.putObject(ctx, key, payload); err != nil {
			return err
		}
	}
	if c.cfg.SigningKey == nil {
		return nil
	}
	sig := signer.Sign(c.cfg.SigningKey, image.StatementType, payload)
	b, err := sig.Encode()
	if err != nil {
		return err
	}
	return c.putObject(ctx, image.SigKey(s.Source, s.Platform, sig.KeyID), b)
}

func (c *conversion) deleteSignatures(ctx context.Context, s image.Statement) error {
	for o, err := range c.cfg.Bucket.List(ctx, image.SigPrefix(s.Source, s.Platform)) {
		if err != nil {
			return fmt.Errorf("list signatures of %s: %w", s.Source, err)
		}
		if err := c.cfg.Bucket.Delete(ctx, o.Key); err != nil {
			return fmt.Errorf("delete %s: %w", o.Key, err)
		}
	}
	return nil
}

// count fills in the figures that the finished image shows.
func (c *conversion) count(im *rafs.Image) {
	seen := map[*rafs.Inode]bool{}
	_ = im.Walk(func(_ string, n *rafs.Inode) error { // which returns only what this function does
		c.result.Entries++
		if n.IsRegular() && !seen[n] {
			seen[n] = true
			c.result.FileBytes += n.Size
		}
		return nil
	})
	if im.Blob != nil {
		c.result.ChunkBytes = im.Blob.DataSize()
	}
}

// serialAttempts is how often a name statement is made anew because another
// conversion moved the same name at the same moment.
const serialAttempts = 16

// name moves the requested name to the image, last of all.
func (c *conversion) name(ctx context.Context) error {
	repo, tag := c.req.Name.Repo, c.req.Name.Tag
	if repo == "" {
		return nil
	}
	var err error
	for range serialAttempts {
		n := catalog.Name{Repo: repo, Tag: tag, Source: c.result.Source, Serial: c.cfg.Catalog.Serial(repo, tag) + 1}
		if n.Statement, err = c.nameStatement(n); err != nil {
			return err
		}
		if err = c.cfg.Catalog.SetName(ctx, n); !errors.Is(err, catalog.ErrStale) {
			return err
		}
	}
	return err
}

// nameStatement returns the signed envelope, nil without a key.
func (c *conversion) nameStatement(n catalog.Name) ([]byte, error) {
	if c.cfg.SigningKey == nil {
		return nil, nil
	}
	payload, err := image.EncodeNameStatement(image.NameStatement{
		Repo: n.Repo, Tag: n.Tag, Source: n.Source, Serial: n.Serial,
		Issued: c.cfg.Now().UTC().Truncate(time.Second),
	})
	if err != nil {
		return nil, err
	}
	return signer.Envelope{
		PayloadType: image.NameStatementType,
		Payload:     payload,
		Signatures:  []signer.Signature{signer.Sign(c.cfg.SigningKey, image.NameStatementType, payload)},
	}.Encode()
}

type object struct {
	key  string
	body []byte
}

// putObject stores body under key unless exactly that is there: comparing costs
// less than a durable write, and unlike asking for the size alone it heals a
// damaged copy.
func (c *conversion) putObject(ctx context.Context, key string, body []byte) error {
	if c.holds(ctx, key, body) {
		return nil
	}
	if err := c.cfg.Bucket.Put(ctx, key, bytes.NewReader(body), int64(len(body))); err != nil {
		return fmt.Errorf("put %s: %w", key, err)
	}
	return nil
}
