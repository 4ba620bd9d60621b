package converter

import (
	"context"

	"quarry/rafs"
)

// ConvertEncoding is Convert with another encoder of bootstraps, for tests of
// what happens when there is a bug in ours.
func ConvertEncoding(ctx context.Context, cfg Config, req Request, encode func(*rafs.Tree) ([]byte, error)) (*Result, error) {
	c := &conversion{cfg: cfg.withDefaults(), req: req, encode: encode}
	if err := c.convert(ctx); err != nil {
		return nil, err
	}
	return &c.result, nil
}
