package converter

import (
	"bytes"
	"context"
	"fmt"
	"runtime/debug"

	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/names"
)

// bootstrap merges the layers and encodes their tree.
func (c *conversion) bootstrap(recs []*image.LayerRecord) (boot []byte, treeDigest chunk.Digest, err error) {
	t, err := c.merge(recs)
	if err != nil {
		return nil, treeDigest, err
	}
	treeDigest = tree.Digest(t)
	if boot, err = encode(t); err != nil {
		return nil, treeDigest, &InputError{err} // a file that RAFS cannot hold
	}
	return boot, treeDigest, nil
}

// publish proves that the bootstrap has the tree and then stores it, the config
// and the image statement, in this order, so that a statement is never there
// without what it names.
func (c *conversion) publish(ctx context.Context, boot []byte, treeDigest chunk.Digest) error {
	makeRoom(int64(len(boot))) // the tree was used for the last time
	im, err := c.prove(ctx, boot, treeDigest)
	if err != nil {
		return fmt.Errorf("nothing was published, because the image could not be proved: %w", err)
	}
	s := c.statement(boot, treeDigest, im)
	payload, err := image.EncodeStatement(s)
	if err != nil {
		return err
	}
	if err := c.putObject(ctx, image.BootstrapKey(s.Bootstrap), boot); err != nil {
		return err
	}
	if err := c.putObject(ctx, image.ConfigKey(s.Config), c.image.Config); err != nil {
		return err
	}
	if err := c.putMapping(ctx, s); err != nil {
		return err
	}
	if err := c.putStatement(ctx, s, payload); err != nil {
		return err
	}
	c.result.ImageID, c.result.Statement = image.ID(payload), s
	c.result.FileBytes = im.FileBytes()
	return nil
}

// statement describes the image whose bootstrap, read back, is im.
func (c *conversion) statement(boot []byte, treeDigest chunk.Digest, im *rafs.Image) image.Statement {
	s := image.Statement{
		Source: c.image.Source, Platform: c.image.Platform, Config: c.image.ConfigDigest,
		Bootstrap: chunk.Sum(boot), BootstrapSize: int64(len(boot)),
		Tree: treeDigest, ChunkSize: c.cfg.ChunkSize, Converter: Version,
	}
	if im.Blob != nil {
		s.Blob = &im.Blob.ID
	}
	return s
}

// encode is rafs.Encode.
func encode(t *rafs.Tree) ([]byte, error) {
	return rafs.EncodeTo(t, func(size int64) []byte {
		makeRoom(size)
		return make([]byte, size)
	})
}

// largeBootstrap is the length of one for some 150 000 files.
const largeBootstrap = 32 << 20

// makeRoom gives unused memory back before the next step of making or proving a
// large bootstrap needs as much: tree, plan, bootstrap and the tree read back are
// each most of what a large conversion has in memory, and never all at once.
func makeRoom(bootstrap int64) {
	if bootstrap >= largeBootstrap {
		debug.FreeOSMemory()
	}
}

// putMapping stores which bootstrap has the image's virtual blob. Two images
// with the same chunks share one, and the first mapping stays: it is as good, and
// objects do not change. Only one that leads nowhere is replaced.
func (c *conversion) putMapping(ctx context.Context, s image.Statement) error {
	if ok, err := c.mapped(ctx, s); ok || err != nil {
		return err
	}
	return c.putObject(ctx, image.BlobKey(*s.Blob), []byte(s.Bootstrap.String()))
}

// mapped reports whether the stored mapping of the image's virtual blob leads to
// a bootstrap that has it; it does when there is no blob. The image's own
// bootstrap is not read again. The error is about the bucket, not the mapping.
func (c *conversion) mapped(ctx context.Context, s image.Statement) (bool, error) {
	if s.Blob == nil {
		return true, nil
	}
	raw, err := bucket.ReadObject(ctx, c.cfg.Bucket, image.BlobKey(*s.Blob), int64(len(s.Bootstrap.String())))
	if err != nil {
		return false, unlessDamage(err)
	}
	d, err := chunk.Parse(string(raw))
	if err != nil {
		return false, nil
	}
	if d == s.Bootstrap {
		return true, nil
	}
	boot, err := bucket.ReadObject(ctx, c.cfg.Bucket, image.BootstrapKey(d), rafs.MaxBootstrap)
	if err != nil {
		return false, unlessDamage(err)
	}
	if chunk.Sum(boot) != d {
		return false, nil
	}
	im, err := rafs.Decode(boot)
	return err == nil && im.Blob != nil && im.Blob.ID == *s.Blob, nil
}

// unlessDamage is nil for an object that is gone or damaged and can be written
// anew, and err otherwise.
func unlessDamage(err error) error {
	if bucket.IsDamage(err) {
		return nil
	}
	return err
}

// putStatement stores the statement and its signature. Another converter
// version may have made another statement of the same source; it is replaced as
// image.StatementKey says, signatures going first and coming last, so that a
// reader never takes them for signatures of the other payload. In between the
// image is unsigned, never wrong.
func (c *conversion) putStatement(ctx context.Context, s image.Statement, payload []byte) error {
	key := image.StatementKey(s.Source, s.Platform)
	old, err := bucket.ReadObject(ctx, c.cfg.Bucket, key, image.MaxStatement)
	if err := unlessDamage(err); err != nil {
		return err
	}
	if !bytes.Equal(old, payload) {
		c.warnReplaced(old)
		if err := c.deleteSignatures(ctx, s); err != nil {
			return err
		}
		if err := c.putObject(ctx, key, payload); err != nil {
			return err
		}
		// Once more: somebody may have added one to the old statement, and not have
		// seen yet that it is gone.
		if err := c.deleteSignatures(ctx, s); err != nil {
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

// warnReplaced says that a statement of another converter is replaced, and with
// it the image id that the source had.
func (c *conversion) warnReplaced(old []byte) {
	s, err := image.DecodeStatement(old)
	if err != nil || s.Converter == Version {
		return
	}
	c.warn("the image of %s by %s is replaced by one of %s: its image id was %s", s.Source, s.Converter, Version, image.ID(old))
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

// name moves the requested name to the image, last of all.
func (c *conversion) name(ctx context.Context) error {
	repo, tag := c.req.Name.Repo, c.req.Name.Tag
	if repo == "" {
		return nil
	}
	return names.Config{Catalog: c.cfg.Catalog, Key: c.cfg.SigningKey, Now: c.cfg.Now}.Set(ctx, repo, tag, c.result.Source)
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
