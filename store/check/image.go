package check

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"quarry/rafs"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
)

// hasBatch is the number of chunks looked up at once.
const hasBatch = 1024

// images checks every image statement and what it names. Where the listing ends
// early, it looks for the images that have names.
func (c *checker) images(ctx context.Context) error {
	before := c.sum.Problems
	defer func() { c.lacking = c.lacking || c.sum.Problems > before }()
	whole, err := c.imagesBelow(ctx, image.ImagesPrefix)
	if err != nil || whole {
		return err
	}
	for _, n := range c.names {
		if c.sources[n.Source] {
			continue
		}
		whole, err := c.imagesBelow(ctx, image.ImagesPrefix+n.Source.Hex()+"/")
		if err != nil {
			return err
		}
		if !whole {
			c.sources[n.Source] = true // not known to be missing, and told
		}
	}
	return nil
}

// imagesBelow reports whether the listing was whole.
func (c *checker) imagesBelow(ctx context.Context, prefix string) (bool, error) {
	for obj, err := range c.cfg.Bucket.List(ctx, prefix) {
		if err != nil {
			return false, c.unlisted(prefix, err)
		}
		if !strings.HasSuffix(obj.Key, "/statement") {
			continue
		}
		c.sum.Images++
		source, platform, ok := image.ParseStatementKey(obj.Key)
		if !ok {
			c.tell(Problem{Kind: "statement", Object: obj.Key, Message: "the key names no source and platform: no image is found by it, delete the object"})
			continue
		}
		c.sources[source] = true
		if err := c.image(ctx, source, platform); err != nil {
			return false, err
		}
	}
	return true, nil
}

// image checks one image.
func (c *checker) image(ctx context.Context, source chunk.Digest, platform image.Platform) error {
	key, u := image.StatementKey(source, platform), c.users(source)
	payload, wrong, err := c.signedStatement(ctx, source, platform)
	if err != nil {
		return c.damaged("statement", key, err, u)
	}
	s, err := image.DecodeStatement(payload)
	isDamaged := func(w wrongSig) bool { return !errors.Is(w.err, errUnsigned) }
	if errors.Is(err, image.ErrVersion) && !slices.ContainsFunc(wrong, isDamaged) {
		c.lacking = true
		c.tell(Problem{
			Kind: "unknown", Object: key, Images: u.list(), Note: true,
			Message: fmt.Sprintf("%v: it and what it names were not checked, use the quarry that wrote it", err),
		})
		return nil
	}
	if err != nil {
		return c.damaged("statement", key, damage{err}, u)
	}
	if s.Source != source || s.Platform != platform {
		return c.damaged("statement", key, damagef("the statement is about %s for %s", s.Source, s.Platform), u)
	}
	for _, w := range wrong {
		if !isDamaged(w) {
			c.unsigned(key, "the image", u)
			continue
		}
		if err := c.damaged("statement", w.key, w.err, u); err != nil {
			return err
		}
	}
	if _, err := c.verified(ctx, image.ConfigKey(s.Config), s.Config, image.MaxConfig); err != nil {
		if err := c.damaged("object", image.ConfigKey(s.Config), err, u); err != nil {
			return err
		}
	}
	return c.bootstrap(ctx, s, u)
}

// signedStatement returns an image statement and what is wrong with its
// signatures. A conversion may replace both meanwhile, so that signatures count
// only beside the statement that is there before and after, see
// image.StatementKey.
func (c *checker) signedStatement(ctx context.Context, source chunk.Digest, platform image.Platform) (payload []byte, wrong []wrongSig, err error) {
	key := image.StatementKey(source, platform)
	payload, err = bucket.ReadObject(ctx, c.cfg.Bucket, key, image.MaxStatement)
	for err == nil {
		wrong = c.signatures(ctx, key, image.SigPrefix(source, platform), payload)
		if len(wrong) == 0 {
			return payload, nil, nil
		}
		before := payload
		payload, err = bucket.ReadObject(ctx, c.cfg.Bucket, key, image.MaxStatement)
		if err == nil && bytes.Equal(before, payload) {
			return payload, wrong, nil
		}
	}
	return nil, nil, err
}

// wrongSig is what is wrong with a signature, or, under the key of the
// statement, with all of them.
type wrongSig struct {
	key string
	err error
}

// errUnsigned says that a statement has no signature: a state, no damage.
var errUnsigned = errors.New("it has no signature")

// signatures returns what is wrong with the signatures of a statement: those
// that are none, that no trusted key has signed it, and errUnsigned.
func (c *checker) signatures(ctx context.Context, key, prefix string, payload []byte) (wrong []wrongSig) {
	fail := func(err error) []wrongSig { return append(wrong, wrongSig{key, err}) }
	var sigs []signer.Signature
	for obj, err := range c.cfg.Bucket.List(ctx, prefix) {
		if err != nil {
			return fail(err)
		}
		if len(sigs)+len(wrong) == signer.MaxSignatures {
			return fail(damagef("it has more than %d signatures", signer.MaxSignatures))
		}
		raw, err := bucket.ReadObject(ctx, c.cfg.Bucket, obj.Key, signer.MaxSignature)
		if errors.Is(err, bucket.ErrNotFound) {
			continue // a conversion has just deleted it
		}
		var sig signer.Signature
		if err == nil {
			if sig, err = signer.DecodeSignature(raw); err != nil {
				err = damage{err}
			}
		}
		if err != nil {
			wrong = append(wrong, wrongSig{obj.Key, err})
			continue
		}
		sigs = append(sigs, sig)
	}
	if len(sigs) == 0 {
		if len(wrong) == 0 {
			return fail(errUnsigned)
		}
		return wrong
	}
	env, err := signer.Envelope{PayloadType: image.StatementType, Payload: payload, Signatures: sigs}.Encode()
	if err == nil {
		_, _, err = signer.Open(env, image.StatementType, c.cfg.Trust)
	}
	if err != nil {
		return fail(damage{err})
	}
	return wrong
}

// verified reads an object whose digest is known.
func (c *checker) verified(ctx context.Context, key string, want chunk.Digest, limit int64) ([]byte, error) {
	p, err := bucket.ReadObject(ctx, c.cfg.Bucket, key, limit)
	if err != nil {
		return nil, err
	}
	if got := chunk.Sum(p); got != want {
		return nil, damagef("content has digest %s", got)
	}
	return p, nil
}

// decoded reads a bootstrap and notes which virtual blob it has.
func (c *checker) decoded(ctx context.Context, d chunk.Digest) (*rafs.Image, error) {
	boot, err := c.verified(ctx, image.BootstrapKey(d), d, rafs.MaxBootstrap)
	if err != nil {
		return nil, err
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		return nil, damage{err}
	}
	c.blobs[d] = chunk.Digest{}
	if im.Blob != nil {
		c.blobs[d] = im.Blob.ID
	}
	return im, nil
}

// bootstrap checks the metadata, and that the store holds every chunk of it.
func (c *checker) bootstrap(ctx context.Context, s image.Statement, u users) error {
	key := image.BootstrapKey(s.Bootstrap)
	im, err := c.decoded(ctx, s.Bootstrap)
	if err != nil {
		return c.damaged("object", key, err, u)
	}
	if im.Blob == nil {
		return nil
	}
	if err := c.mapping(ctx, im.Blob.ID); err != nil {
		if err := c.damaged("object", image.BlobKey(im.Blob.ID), err, u); err != nil {
			return err
		}
	}
	var missing []chunk.Digest
	for batch := range slices.Chunk(im.Blob.Chunks, hasBatch) {
		if missing, err = c.chunks(ctx, batch, s.Source, u, missing); err != nil {
			return fmt.Errorf("check %s: %w", key, err)
		}
	}
	if len(missing) > 0 {
		c.tell(Problem{
			Kind: "chunk-missing", Object: key, Digest: missing[0], Images: u.list(),
			Message: fmt.Sprintf("no pack holds %d of its chunks; convert the image again", len(missing)),
		})
	}
	return nil
}

// mapping checks that the object of a virtual blob leads to a bootstrap that has
// this blob. It may be another image's: one that has the same chunks.
func (c *checker) mapping(ctx context.Context, v chunk.Digest) error {
	raw, err := bucket.ReadObject(ctx, c.cfg.Bucket, image.BlobKey(v), int64(len(v.String())))
	if err != nil {
		return err
	}
	d, err := chunk.Parse(string(raw))
	if err != nil {
		return damage{err}
	}
	if _, known := c.blobs[d]; !known {
		if _, err := c.decoded(ctx, d); err != nil {
			return fmt.Errorf("it leads to bootstrap %s: %w", d, err)
		}
	}
	if c.blobs[d] != v {
		return damagef("it leads to bootstrap %s, which has another virtual blob", d)
	}
	return nil
}

// chunks adds to missing what no pack holds, and notes the image for the chunks
// that were found damaged.
func (c *checker) chunks(ctx context.Context, batch []rafs.Chunk, source chunk.Digest, u users, missing []chunk.Digest) ([]chunk.Digest, error) {
	ds := make([]chunk.Digest, len(batch))
	for i, ch := range batch {
		ds[i] = ch.Digest
	}
	have, err := c.cfg.Store.Readable(ctx, ds)
	if err != nil {
		return nil, err
	}
	c.sum.Chunks += int64(len(ds))
	for i, d := range ds {
		if !have[i] && c.cfg.Lost != nil {
			c.cfg.Lost(d)
		}
		if touched := c.touched[d]; touched != nil {
			touched.addSource(source, u)
		} else if !have[i] {
			missing = append(missing, d)
		}
	}
	return missing, nil
}
