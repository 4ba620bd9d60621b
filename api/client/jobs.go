package client

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"quarry/api"
	"quarry/store/chunk"
	"quarry/store/image"
)

// Convert has the server convert an image, and calls progress for each step it
// reports. Once the server has begun it is not sent again: whether a conversion
// that broke off should be repeated is for the caller.
func (c *Client) Convert(ctx context.Context, req api.ConvertRequest, progress func(api.Progress)) (api.ConvertResult, error) {
	var res api.ConvertResult
	texts := append(slices.Collect(maps.Keys(req.Limits)), req.Source, req.Name, req.Platform)
	body, err := encode(req, texts...)
	if err != nil {
		return res, fmt.Errorf("encode convert request: %w", err)
	}
	rq := request{method: http.MethodPost, path: "/v1/convert", body: body, contentType: api.TypeJSON, job: true}
	err = c.stream(ctx, rq, &res, func(e api.Event) {
		if e.Progress != nil && progress != nil {
			progress(*e.Progress)
		}
	})
	return res, err
}

// encode makes the JSON of a request. Its texts must be UTF-8, which JSON is: others
// would arrive as the names of something else.
func encode(v any, texts ...string) ([]byte, error) {
	for _, s := range texts {
		if !utf8.ValidString(s) {
			return nil, fmt.Errorf("%w: %q is not UTF-8, and JSON has no other names", api.ErrBadRequest, s)
		}
	}
	return json.Marshal(v)
}

// Check has the server check its store, and calls report for each problem.
func (c *Client) Check(ctx context.Context, req api.CheckRequest, report func(api.Problem)) (api.CheckSummary, error) {
	var res api.CheckSummary
	rq := request{method: http.MethodPost, path: "/v1/admin/check?quick=" + strconv.FormatBool(req.Quick), job: true}
	if req.From != "" {
		body, err := encode(req, req.From, req.FromToken, req.FromCA)
		if err != nil {
			return res, fmt.Errorf("encode check request: %w", err)
		}
		rq.body, rq.contentType = body, api.TypeJSON
	}
	err := c.stream(ctx, rq, &res, func(e api.Event) {
		if e.Problem != nil && report != nil {
			report(*e.Problem)
		}
	})
	return res, err
}

// Rebuild has the server rebuild its chunk index.
func (c *Client) Rebuild(ctx context.Context) (api.RebuildResult, error) {
	var res api.RebuildResult
	rq := request{method: http.MethodPost, path: "/v1/admin/rebuild", job: true}
	err := c.stream(ctx, rq, &res, func(api.Event) {})
	return res, err
}

// stream reads the events of a job up to its result or error.
func (c *Client) stream(ctx context.Context, rq request, result any, each func(api.Event)) error {
	return c.call(ctx, rq, func(resp *http.Response) error {
		lines := bufio.NewScanner(resp.Body)
		lines.Buffer(nil, api.MaxEvent)
		for lines.Scan() {
			var e api.Event
			if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
				return fmt.Errorf("%s: decode event: %w", rq.path, err)
			}
			switch e.Type {
			case api.EventResult:
				return json.Unmarshal(e.Result, result)
			case api.EventError:
				if e.Error == nil {
					return fmt.Errorf("%s: error event without an error", rq.path)
				}
				return e.Error
			}
			each(e)
		}
		if err := lines.Err(); err != nil {
			return fmt.Errorf("%s: read events: %w", rq.path, err)
		}
		return fmt.Errorf("%s: the stream ended without a result: %w", rq.path, io.ErrUnexpectedEOF)
	})
}

// GC has the server collect garbage, calls progress for each step, and decodes the
// report into report.
func (c *Client) GC(ctx context.Context, req api.GCRequest, report any, progress func(api.Progress)) error {
	body, err := encode(req, req.Retain, req.Grace, req.Wait, req.PushGrace)
	if err != nil {
		return fmt.Errorf("encode gc request: %w", err)
	}
	rq := request{method: http.MethodPost, path: "/v1/admin/gc", body: body, contentType: api.TypeJSON, job: true}
	return c.stream(ctx, rq, report, func(e api.Event) {
		if e.Progress != nil && progress != nil {
			progress(*e.Progress)
		}
	})
}

// Pin keeps the images of the source that ref names, and returns it.
func (c *Client) Pin(ctx context.Context, ref image.Ref) (chunk.Digest, error) {
	return c.pin(ctx, http.MethodPut, ref)
}

// Unpin takes a Pin back.
func (c *Client) Unpin(ctx context.Context, ref image.Ref) (chunk.Digest, error) {
	return c.pin(ctx, http.MethodDelete, ref)
}

func (c *Client) pin(ctx context.Context, method string, ref image.Ref) (chunk.Digest, error) {
	var doc api.PinList
	if err := c.getJSON(ctx, request{method: method, path: refPath("/v1/admin/pins/", ref)}, &doc); err != nil {
		return chunk.Digest{}, err
	}
	if len(doc.Pins) != 1 {
		return chunk.Digest{}, fmt.Errorf("pin %s: the answer names %d sources", ref, len(doc.Pins))
	}
	return doc.Pins[0], nil
}

// Pins returns the pinned sources.
func (c *Client) Pins(ctx context.Context) ([]chunk.Digest, error) {
	var doc api.PinList
	err := c.getJSON(ctx, request{method: http.MethodGet, path: "/v1/admin/pins"}, &doc)
	return doc.Pins, err
}

// RenewLease creates a lease or extends it to ttl from now. bootstrap is what a mount
// reads by; zero when it is not known.
func (c *Client) RenewLease(ctx context.Context, id, image string, bootstrap chunk.Digest, ttl time.Duration) (api.Lease, error) {
	var lease api.Lease
	req := api.LeaseRequest{TTLSeconds: int64(ttl / time.Second), Image: image}
	if !bootstrap.IsZero() {
		req.Bootstrap = bootstrap.String()
	}
	body, err := encode(req, image)
	if err != nil {
		return lease, fmt.Errorf("encode lease: %w", err)
	}
	rq := request{method: http.MethodPut, path: leasePath(id), body: body, contentType: api.TypeJSON}
	err = c.getJSON(ctx, rq, &lease)
	return lease, err
}

// Lease returns a live lease.
func (c *Client) Lease(ctx context.Context, id string) (api.Lease, error) {
	var lease api.Lease
	err := c.getJSON(ctx, request{method: http.MethodGet, path: leasePath(id)}, &lease)
	return lease, err
}

// Leases returns the live leases, sorted by id.
func (c *Client) Leases(ctx context.Context) ([]api.Lease, error) {
	var doc api.LeaseList
	err := c.getJSON(ctx, request{method: http.MethodGet, path: "/v1/admin/leases"}, &doc)
	return doc.Leases, err
}

// EndLease ends a lease, live or not.
func (c *Client) EndLease(ctx context.Context, id string) error {
	return c.call(ctx, request{method: http.MethodDelete, path: leasePath(id)}, discard)
}

func leasePath(id string) string { return "/v1/leases/" + url.PathEscape(id) }

// ServerStats returns the server's figures.
func (c *Client) ServerStats(ctx context.Context) (api.Stats, error) {
	var s api.Stats
	err := c.getJSON(ctx, request{method: http.MethodGet, path: "/v1/stats"}, &s)
	return s, err
}

// Health returns nil when the server answers at all.
func (c *Client) Health(ctx context.Context) error {
	return c.call(ctx, request{method: http.MethodGet, path: "/healthz"}, discard)
}

// Ready returns nil when the server can serve images.
func (c *Client) Ready(ctx context.Context) error {
	return c.call(ctx, request{method: http.MethodGet, path: "/readyz"}, discard)
}
