package registry

import (
	"fmt"
	"io"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"

	"quarry/api/access"
	"quarry/store/registry"
)

// getBlob answers with a blob, or the one range of it that is asked for.
func (h *Handler) getBlob(w http.ResponseWriter, r *http.Request, req request) error {
	c, err := h.store.Blob(r.Context(), req.repo, req.digest)
	if err != nil {
		return err
	}
	off, size, part, err := parseRange(r.Header.Get("Range"), c.Size)
	if err != nil {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", c.Size))
		return err
	}
	if !req.head {
		leave, err := h.blobs.Enter(r.Context(), h.holder(r), min(size, registry.Step))
		if err != nil {
			return err
		}
		defer leave()
	}
	setContent(w, c.Digest, size, "application/octet-stream")
	w.Header().Set("Accept-Ranges", "bytes")
	if part && !req.head {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", off, off+size-1, c.Size))
		w.WriteHeader(http.StatusPartialContent)
	}
	if req.head {
		w.Header().Set("Content-Length", strconv.FormatInt(c.Size, 10))
		return nil
	}
	if _, err := io.Copy(w, c.Reader(r.Context(), off, size)); err != nil {
		return begunError{fmt.Errorf("send blob: %w", err)}
	}
	return nil
}

// parseRange reads a Range header of one range. What is no range of bytes, or are
// several, is ignored as RFC 9110 lets a server do; one that is not in the blob, or
// ends before it starts, is an error.
func parseRange(header string, total int64) (off, size int64, part bool, err error) {
	spec, ok := strings.CutPrefix(header, "bytes=")
	first, last, dash := strings.Cut(strings.TrimSpace(spec), "-")
	if !ok || !dash || strings.Contains(spec, ",") {
		return 0, total, false, nil
	}
	a, aErr := strconv.ParseUint(first, 10, 63)
	b, bErr := strconv.ParseUint(last, 10, 63)
	switch {
	case first == "" && bErr == nil:
		a, b = uint64(max(0, total-int64(b))), uint64(total)
	case aErr == nil && last == "":
		b = uint64(total)
	case aErr != nil || bErr != nil:
		return 0, total, false, nil
	}
	if off = int64(a); off >= total || b < a {
		return 0, 0, false, fmt.Errorf("%w: %.64q of %d bytes", errRange, header, total)
	}
	return off, min(int64(b), total-1) + 1 - off, true, nil
}

// startUpload mounts a blob, takes a whole one, or begins an upload. Of a mount that
// names no repository, or one that may not be pulled from, it is not said whether the
// blob is anywhere: it has to be uploaded.
func (h *Handler) startUpload(w http.ResponseWriter, r *http.Request, req request) error {
	if req.mount != "" && req.from != "" && h.authorize(r, access.Pull, req.from) == nil {
		d := digest.Digest(req.mount)
		switch err := h.store.Mount(r.Context(), req.repo, req.from, d); {
		case err == nil:
			return created(w, req.repo, "blobs", d)
		case lookup(err).target != registry.ErrBlobUnknown:
			return err
		}
	}
	id, err := h.store.StartUpload(req.repo, h.holder(r))
	if err != nil {
		return err
	}
	req.id = id
	if req.digest == "" {
		setUpload(w, req, 0)
		w.WriteHeader(http.StatusAccepted)
		return nil
	}
	if err := h.finishUpload(w, r, req); err != nil {
		w.Header().Del("Location") // nobody knows of this upload
		_ = h.store.CancelUpload(req.repo, id)
		return err
	}
	return nil
}

// setUpload tells where an upload goes on. An empty one has no last byte, and 0-0 is
// what registries say of it.
func setUpload(w http.ResponseWriter, req request, offset int64) {
	w.Header().Set("Location", "/v2/"+req.repo+"/blobs/uploads/"+req.id)
	w.Header().Set("Range", fmt.Sprintf("0-%d", max(0, offset-1)))
	w.Header().Set("Docker-Upload-UUID", req.id)
	w.Header().Set("Content-Length", "0")
}

func (h *Handler) uploadOffset(w http.ResponseWriter, req request) error {
	offset, err := h.store.UploadOffset(req.repo, req.id)
	if err != nil {
		return err
	}
	setUpload(w, req, offset)
	w.Header().Del("Content-Length")
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (h *Handler) appendUpload(w http.ResponseWriter, r *http.Request, req request) error {
	body := watch(w, r.Body)
	defer body.done()
	p, err := part(r, body)
	if err != nil {
		return h.where(w, req, err)
	}
	offset, err := h.store.AppendUpload(req.repo, req.id, p)
	if err != nil {
		return h.where(w, req, err)
	}
	setUpload(w, req, offset)
	w.WriteHeader(http.StatusAccepted)
	return nil
}

func (h *Handler) finishUpload(w http.ResponseWriter, r *http.Request, req request) error {
	body := watch(w, r.Body)
	defer body.done()
	p, err := part(r, body)
	if err != nil {
		return h.where(w, req, err)
	}
	if err := h.store.FinishUpload(r.Context(), req.repo, req.id, p, req.digest); err != nil {
		return h.where(w, req, err)
	}
	return created(w, req.repo, "blobs", req.digest)
}

// where adds to an error where the upload goes on, when it does.
func (h *Handler) where(w http.ResponseWriter, req request, err error) error {
	if offset, offErr := h.store.UploadOffset(req.repo, req.id); offErr == nil {
		setUpload(w, req, offset)
	}
	return err
}

// part reads which part of a blob a request has, from the specification's
// Content-Range, "<first>-<last>" without a unit, when there is one.
func part(r *http.Request, body io.Reader) (registry.Part, error) {
	p := registry.Part{Body: body, At: -1, Size: r.ContentLength}
	header := r.Header.Get("Content-Range")
	if header == "" {
		return p, nil
	}
	first, last, _ := strings.Cut(strings.TrimPrefix(header, "bytes "), "-")
	last, _, _ = strings.Cut(last, "/")
	a, aErr := strconv.ParseUint(first, 10, 62)
	b, bErr := strconv.ParseUint(last, 10, 62)
	if aErr != nil || bErr != nil || b < a {
		return p, fmt.Errorf("%w: Content-Range %.64q: want FIRST-LAST", errHeader, header)
	}
	size := int64(b-a) + 1
	if p.Size >= 0 && p.Size != size {
		return p, fmt.Errorf("%w: Content-Range %.64q has %d bytes, Content-Length is %d", registry.ErrSizeInvalid, header, size, p.Size)
	}
	p.At, p.Size = int64(a), size
	return p, nil
}

// mediaType is the type of the request's body, without its parameters.
func mediaType(r *http.Request) string {
	header := r.Header.Get("Content-Type")
	if t, _, err := mime.ParseMediaType(header); err == nil {
		return t
	}
	return header
}

const (
	// stallTimeout is how long a client may send nothing of a body.
	stallTimeout = 30 * time.Second
	// stallStep is how often the deadline is moved on, at most.
	stallStep = 2 * time.Second
)

// watched is a body whose client must not fall silent: an upload is held by who
// writes to it.
type watched struct {
	io.Reader
	ctl   *http.ResponseController
	moved time.Time
}

func watch(w http.ResponseWriter, body io.Reader) *watched {
	return &watched{Reader: body, ctl: http.NewResponseController(w)}
}

// Read implements io.Reader.
func (b *watched) Read(p []byte) (int, error) {
	if now := time.Now(); now.Sub(b.moved) > stallStep {
		b.moved = now
		_ = b.ctl.SetReadDeadline(now.Add(stallTimeout)) // a test's recorder has no connection
	}
	n, err := b.Reader.Read(p)
	if err != nil {
		b.done() // nothing more is read of it
	}
	return n, err
}

// done lets what follows on the body take its time: a deadline that passes would
// end the request's context.
func (b *watched) done() { _ = b.ctl.SetReadDeadline(time.Time{}) }
