package converter

import (
	"bytes"
	"context"

	"quarry/rafs"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
)

// published fills in the result and returns true when this very image is
// already in the store: every layer is known, so every chunk is live; the
// statement is signed by the key that would sign it now; and each object it
// names has the right bytes. Then merging and encoding, most of the time of
// converting a known image again, could only give the same. Anything else, a
// damaged object too, returns false and is made anew.
func (c *conversion) published(ctx context.Context) bool {
	if c.cfg.SigningKey == nil || c.result.LayersReused < c.result.Layers {
		return false
	}
	payload, ok := c.ownStatement(ctx)
	if !ok {
		return false
	}
	s, err := image.DecodeStatement(payload)
	if err != nil || s.Source != c.image.Source || s.Platform != c.image.Platform || s.Config != c.image.ConfigDigest ||
		s.ChunkSize != c.cfg.ChunkSize || s.Converter != Version {
		return false
	}
	if !c.holds(ctx, image.ConfigKey(s.Config), c.image.Config) {
		return false
	}
	if ok, err := c.mapped(ctx, s); !ok || err != nil {
		return false
	}
	boot, err := bucket.ReadObject(ctx, c.cfg.Bucket, image.BootstrapKey(s.Bootstrap), s.BootstrapSize)
	if err != nil || chunk.Sum(boot) != s.Bootstrap {
		return false
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		return false
	}
	c.result.ImageID, c.result.Statement = image.ID(payload), s
	c.result.FileBytes, c.result.Unchanged = im.FileBytes(), true
	return true
}

// ownStatement returns the payload of the stored image statement when our key
// has signed it.
func (c *conversion) ownStatement(ctx context.Context) ([]byte, bool) {
	key := c.cfg.SigningKey.Public()
	payload, err := bucket.ReadObject(ctx, c.cfg.Bucket, image.StatementKey(c.image.Source, c.image.Platform), image.MaxStatement)
	if err != nil {
		return nil, false
	}
	b, err := bucket.ReadObject(ctx, c.cfg.Bucket, image.SigKey(c.image.Source, c.image.Platform, key.ID()), signer.MaxSignature)
	if err != nil {
		return nil, false
	}
	sig, err := signer.DecodeSignature(b)
	if err != nil {
		return nil, false
	}
	envelope, err := signer.Envelope{PayloadType: image.StatementType, Payload: payload, Signatures: []signer.Signature{sig}}.Encode()
	if err != nil {
		return nil, false
	}
	payload, _, err = signer.Open(envelope, image.StatementType, signer.NewTrust(key))
	return payload, err == nil
}

// holds reports whether exactly body is stored under key.
func (c *conversion) holds(ctx context.Context, key string, body []byte) bool {
	b, err := bucket.ReadObject(ctx, c.cfg.Bucket, key, int64(len(body)))
	return err == nil && bytes.Equal(b, body)
}
