package converter

import (
	"context"

	"quarry/converter/oci"
	"quarry/store/chunk"
	"quarry/store/image"
)

// Publish proves and publishes a bootstrap as that of a source, as a conversion
// does at its end with what it has encoded itself.
func Publish(ctx context.Context, cfg Config, source image.Statement, config, boot []byte, treeDigest chunk.Digest) error {
	c := &conversion{cfg: cfg.withDefaults(), doubted: true, image: &oci.Image{
		Source: source.Source, Platform: source.Platform, Config: config, ConfigDigest: source.Config,
	}}
	return c.publish(ctx, boot, treeDigest)
}
