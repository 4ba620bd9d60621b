package client

import (
	"context"
	"errors"
	"net/http"

	"quarry/api"
	"quarry/store/chunk"
)

// SendTrace sends the encoded record of a run of an image. It is sent once: a
// record that is lost is worth nothing.
func (c *Client) SendTrace(ctx context.Context, id chunk.Digest, record []byte) error {
	return c.call(ctx, request{
		method: http.MethodPost, path: "/v1/images/" + id.Hex() + "/trace",
		body: record, contentType: api.TypeTrace, once: true,
	}, discard)
}

// SendTrace is Client.SendTrace to the first store that takes the record.
func (s *Stores) SendTrace(ctx context.Context, id chunk.Digest, record []byte) error {
	var all []error
	for _, m := range s.members {
		err := m.SendTrace(ctx, id, record)
		if err == nil || ctx.Err() != nil {
			return err
		}
		all = append(all, err)
	}
	return errors.Join(all...)
}
