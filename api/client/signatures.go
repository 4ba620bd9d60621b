package client

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"quarry/api"
	"quarry/store/image"
)

// Signable returns what there is of ref to sign: the store's word alone. Errors as
// those of Image, but an image that is unsigned is none.
func (c *Client) Signable(ctx context.Context, ref image.Ref) (api.Signable, error) {
	var s api.Signable
	if err := c.getJSON(ctx, request{method: http.MethodGet, path: refPath("/v1/signatures/", ref)}, &s); err != nil {
		return api.Signable{}, err
	}
	if s.Name != nil && isNull(s.Name.Statement) {
		s.Name.Statement = nil
	}
	for i := range s.Images {
		if isNull(s.Images[i].Image) {
			s.Images[i].Image = nil
		}
	}
	return s, nil
}

// Sign gives the store signatures of ref, which has a digest. What it has already it
// takes again.
func (c *Client) Sign(ctx context.Context, ref image.Ref, req api.SignRequest) error {
	body, err := json.Marshal(req)
	if err != nil {
		return fmt.Errorf("signatures of %s: %w", ref, err)
	}
	return c.call(ctx, request{method: http.MethodPost, path: refPath("/v1/signatures/", ref), body: body, contentType: api.TypeJSON}, discard)
}
