package client

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"quarry/api/sandboxes"
	"quarry/worker/sandbox"
)

// ReadFile copies a file, or a part of it, and compares what came with the digest that
// the worker says. Errors: sandbox.ErrDigest.
func (c *Client) ReadFile(ctx context.Context, id, path string, o sandbox.ReadOptions, w io.Writer) (sandbox.FileInfo, error) {
	var fi sandbox.FileInfo
	r := request{method: http.MethodGet, path: at(id, "files"), query: url.Values{"path": {path}}}
	if o.Offset < 0 {
		r.header = map[string]string{"Range": fmt.Sprintf("bytes=%d", o.Offset)}
	}
	if o.Offset > 0 || o.Length > 0 {
		last := ""
		if o.Length > 0 {
			last = strconv.FormatInt(o.Offset+o.Length-1, 10)
		}
		r.header = map[string]string{"Range": fmt.Sprintf("bytes=%d-%s", o.Offset, last)}
	}
	resp, err := c.do(ctx, r)
	if err != nil {
		return fi, err
	}
	defer resp.Body.Close()
	if err := json.Unmarshal([]byte(resp.Header.Get(sandboxes.HeaderInfo)), &fi); err != nil {
		return fi, fmt.Errorf("%w: no %s in the answer: %w", ErrCutOff, sandboxes.HeaderInfo, err)
	}
	if fi, err = fi.Decoded(); err != nil {
		return fi, err
	}
	return fi, verified(resp, w)
}

// verified copies a body and compares its digest, which is a header or a trailer. In the
// place of the digest the worker may say why there is no more of it.
func verified(resp *http.Response, w io.Writer) error {
	sum := sha256.New()
	if _, err := io.Copy(io.MultiWriter(sum, w), body{resp.Body}); err != nil {
		return err
	}
	if err := failed(resp); err != nil {
		return err
	}
	want := resp.Header.Get(sandboxes.HeaderSHA256)
	if want == "" {
		want = resp.Trailer.Get(sandboxes.HeaderSHA256)
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != want {
		return fmt.Errorf("%w: sha256 %s came, the worker says %q", sandbox.ErrDigest, got, want)
	}
	return nil
}

// body is a body whose errors are ErrCutOff too.
type body struct{ io.Reader }

func (b body) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	if err != nil && err != io.EOF {
		err = fmt.Errorf("%w: %w", ErrCutOff, err)
	}
	return n, err
}

// WriteFile writes a file and compares what the worker has written with what was sent.
func (c *Client) WriteFile(ctx context.Context, id, path string, o sandbox.WriteOptions, r io.Reader) (sandboxes.WriteAnswer, error) {
	q := url.Values{"path": {path}}
	if o.Mode != nil {
		q.Set("mode", strconv.FormatUint(uint64(*o.Mode), 8))
	}
	set(q, "user", o.User)
	if o.MkDirs {
		q.Set("mkdirs", "true")
	}
	sum := sha256.New()
	req := request{method: http.MethodPut, path: at(id, "files"), query: q, body: io.TeeReader(r, sum), size: o.Size, file: true}
	if o.SHA256 != "" {
		req.header = map[string]string{sandboxes.HeaderSHA256: o.SHA256}
	}
	if o.Size == 0 {
		req.body = http.NoBody
	}
	a, err := call[sandboxes.WriteAnswer](ctx, c, req, nil)
	if err != nil {
		return a, err
	}
	if a.FileInfo, err = a.FileInfo.Decoded(); err != nil {
		return a, err
	}
	if got := hex.EncodeToString(sum.Sum(nil)); got != a.SHA256 {
		return a, fmt.Errorf("%w: sha256 %s was sent, the worker wrote %s", sandbox.ErrDigest, got, a.SHA256)
	}
	return a, nil
}

// StatFile tells of a file; of a symlink, not of what it leads to.
func (c *Client) StatFile(ctx context.Context, id, path string) (sandbox.FileInfo, error) {
	fi, err := call[sandbox.FileInfo](ctx, c, request{method: http.MethodGet, path: at(id, "stat"), query: url.Values{"path": {path}}}, nil)
	if err != nil {
		return fi, err
	}
	return fi.Decoded()
}

// ListFiles tells of what is in a folder, so many levels down.
func (c *Client) ListFiles(ctx context.Context, id, path string, depth int) ([]sandbox.FileInfo, error) {
	q := url.Values{"path": {path}, "depth": {strconv.Itoa(depth)}}
	page, err := call[sandboxes.FilesPage](ctx, c, request{method: http.MethodGet, path: at(id, "list"), query: q}, nil)
	if err != nil {
		return nil, err
	}
	for i, fi := range page.Files {
		if page.Files[i], err = fi.Decoded(); err != nil {
			return nil, err
		}
	}
	return page.Files, nil
}

// RemoveFile removes a file, or a folder with what is in it.
func (c *Client) RemoveFile(ctx context.Context, id, path string) error {
	_, err := call[struct{}](ctx, c, request{method: http.MethodDelete, path: at(id, "files"), query: url.Values{"path": {path}}}, nil)
	return err
}

// TarDown copies a folder or file as a tar.
func (c *Client) TarDown(ctx context.Context, id string, o sandbox.TarOptions, w io.Writer) error {
	q := url.Values{"path": {o.Path}}
	for _, e := range o.Exclude {
		q.Add("exclude", e)
	}
	if o.MaxBytes > 0 {
		q.Set("max_bytes", strconv.FormatInt(o.MaxBytes, 10))
	}
	resp, err := c.do(ctx, request{method: http.MethodGet, path: at(id, "tar"), query: q})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return verified(resp, w)
}

// TarUp unpacks a tar in a folder.
func (c *Client) TarUp(ctx context.Context, id, path string, r io.Reader) error {
	_, err := call[struct{}](ctx, c, request{method: http.MethodPost, path: at(id, "tar"), query: url.Values{"path": {path}}, body: r, size: -1, file: true}, nil)
	return err
}
