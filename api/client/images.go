package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/klauspost/compress/zstd"

	"quarry/api"
	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

// maxPages bounds the list of names: half a million at api.MaxNames a page.
const maxPages = 500

// Image returns the signed envelopes of a reference, of its name statement, nil
// when ref is a digest, and of its image statement, with what else the server
// says. Nobody has verified the envelopes yet: open them with signer.Open. A
// failure that the server reports is its word, which nobody signs. Errors are
// *api.Error: of status 202 while the image is not ready, which is for the
// caller to wait for.
func (c *Client) Image(ctx context.Context, ref image.Ref, p image.Platform) (api.Image, error) {
	var doc api.Image
	path := imagePath(ref) + "?platform=" + url.QueryEscape(p.String())
	if err := c.getJSON(ctx, request{method: http.MethodGet, path: path}, &doc); err != nil {
		return api.Image{}, err
	}
	if doc.Status != api.StatusReady || isNull(doc.Image) || (ref.Digest == nil && isNull(doc.Name)) {
		return api.Image{}, fmt.Errorf("image %s: the server answers 200 without the signed statements", ref)
	}
	if isNull(doc.Name) {
		doc.Name = nil
	}
	return doc, nil
}

func imagePath(ref image.Ref) string { return refPath("/v1/images/", ref) }

func refPath(prefix string, ref image.Ref) string {
	return (&url.URL{Path: prefix + ref.String()}).EscapedPath()
}

func isNull(raw []byte) bool { return len(raw) == 0 || string(raw) == "null" }

// Names returns all names of the store, sorted.
func (c *Client) Names(ctx context.Context) ([]api.NameInfo, error) {
	var all []api.NameInfo
	after := ""
	for range maxPages {
		path := "/v1/images"
		if after != "" {
			path += "?after=" + url.QueryEscape(after)
		}
		var page api.NamesPage
		if err := c.getJSON(ctx, request{method: http.MethodGet, path: path}, &page); err != nil {
			return nil, err
		}
		if err := validPage(page); err != nil {
			return nil, fmt.Errorf("list names: %w", err)
		}
		all = append(all, page.Names...)
		if page.Next == "" {
			return all, nil
		}
		after = page.Next
	}
	return nil, fmt.Errorf("list names: more than %d pages", maxPages)
}

// validPage keeps a lying server from filling memory with names that are none.
func validPage(page api.NamesPage) error {
	if len(page.Names) > api.MaxNames || (len(page.Names) == 0 && page.Next != "") {
		return fmt.Errorf("the server sent a page of %d names, followed by another", len(page.Names))
	}
	for _, n := range page.Names {
		if err := errors.Join(image.ValidateRepo(n.Repo), image.ValidateTag(n.Tag)); err != nil {
			return fmt.Errorf("the server sent a name that is none: %w", err)
		}
	}
	return nil
}

// DeleteName removes a name; the image stays until it is collected. It is sent
// once, since a second attempt would not find the name the first one removed.
func (c *Client) DeleteName(ctx context.Context, ref image.Ref) error {
	return c.call(ctx, request{method: http.MethodDelete, path: imagePath(ref), once: true}, discard)
}

func discard(*http.Response) error { return nil }

// Bootstrap returns the bootstrap of that digest and size, as the image
// statement tells them, verified. The size is asked for because a digest alone
// would let a lying server fill rafs.MaxBootstrap bytes of memory first.
func (c *Client) Bootstrap(ctx context.Context, d chunk.Digest, size int64) ([]byte, error) {
	if size < 0 || size > rafs.MaxBootstrap {
		return nil, fmt.Errorf("bootstrap %s of %d bytes, at most %d are allowed", d, size, int64(rafs.MaxBootstrap))
	}
	var out []byte
	rq := request{method: http.MethodGet, path: "/v1/bootstraps/" + d.String(), accept: "zstd"}
	err := c.call(ctx, rq, func(resp *http.Response) (err error) {
		out, err = readBootstrap(resp, d, size)
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

func readBootstrap(resp *http.Response, d chunk.Digest, size int64) ([]byte, error) {
	switch coding := resp.Header.Get("Content-Encoding"); coding {
	case "":
	case "zstd":
		dec, err := zstd.NewReader(resp.Body, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(api.BootstrapWindow))
		if err != nil {
			return nil, &stop{fmt.Errorf("zstd decoder: %w", err)}
		}
		defer dec.Close()
		resp.Body, resp.ContentLength = io.NopCloser(dec), -1
	default:
		return nil, &stop{fmt.Errorf("bootstrap %s: Content-Encoding %q was not asked for", d, coding)}
	}
	p, err := readAll(resp, size)
	if err != nil {
		return nil, err
	}
	if int64(len(p)) != size {
		return nil, fmt.Errorf("bootstrap %s: %d bytes came, want %d: %w", d, len(p), size, io.ErrUnexpectedEOF)
	}
	return verified("bootstrap", p, d)
}

// Config returns the OCI image config of that digest, verified.
func (c *Client) Config(ctx context.Context, d chunk.Digest) ([]byte, error) {
	var out []byte
	rq := request{method: http.MethodGet, path: "/v1/configs/" + d.String()}
	err := c.call(ctx, rq, func(resp *http.Response) error {
		p, err := readAll(resp, image.MaxConfig)
		if err != nil {
			return err
		}
		out, err = verified("config", p, d)
		return err
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// verified returns p when it has digest d.
func verified(what string, p []byte, d chunk.Digest) ([]byte, error) {
	if got := chunk.Sum(p); got != d {
		return nil, &stop{fmt.Errorf("%w: %s %s: the server sent content with digest %s", api.ErrObjectCorrupt, what, d, got)}
	}
	return p, nil
}
