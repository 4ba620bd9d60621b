package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sort"
	"strconv"
	"strings"

	"quarry/rafs"
	"quarry/store/chunk"
)

const (
	// windowBytes and windowChunks bound what one blob request holds in memory
	// beside one chunk: 1 MiB is what nydusd asks for at a time.
	windowBytes  = 1 << 20
	windowChunks = 256
)

// serveBlob serves the virtual blob, or one range of it, decompressed on the
// fly. The first window is read before the status line is out, so that most
// failures have their proper status; a later one cuts the connection.
func (h *Handler) serveBlob(ctx context.Context, w *response, r *http.Request, v chunk.Digest) error {
	blob, err := h.blobs.get(ctx, h.cfg.Bucket, v)
	if err != nil {
		return err
	}
	tag := `"` + v.Hex() + `"`
	if immutable(w, r, tag) {
		return nil
	}
	size := blob.Size()
	w.Header().Set("Accept-Ranges", "bytes")
	header := r.Header.Values("Range")
	if ifRange := r.Header.Get("If-Range"); ifRange != "" && ifRange != tag {
		header = nil
	}
	rg, err := parseRange(header, size)
	if err != nil {
		w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", size))
		return err
	}
	w.Header().Set("Content-Type", TypeBytes)
	w.Header().Set("Content-Length", strconv.FormatInt(rg.end-rg.start, 10))
	status := http.StatusOK
	if rg.partial {
		status = http.StatusPartialContent
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", rg.start, rg.end-1, size))
	}
	if r.Method == http.MethodHead {
		w.WriteHeader(status)
		return nil
	}
	leave, err := h.reads.Enter(ctx, bulkReads)
	if err != nil {
		return err
	}
	defer leave()
	return h.writeBlob(ctx, w, status, blob, rg)
}

// writeBlob writes bytes rg of the blob, window by window.
func (h *Handler) writeBlob(ctx context.Context, w *response, status int, blob *rafs.Blob, rg byteRange) error {
	for off := rg.start; off < rg.end; {
		parts, err := h.window(ctx, blob, off, rg.end)
		if err != nil {
			return err
		}
		if !w.wrote {
			w.WriteHeader(status)
		}
		for _, p := range parts {
			if _, err := w.Write(p); err != nil {
				return err
			}
			off += int64(len(p))
		}
	}
	if !w.wrote {
		w.WriteHeader(status)
	}
	return nil
}

// window returns the next bytes of the blob from off on, before end: some
// chunks, verified, or the tail.
func (h *Handler) window(ctx context.Context, blob *rafs.Blob, off, end int64) ([][]byte, error) {
	if data := blob.DataSize(); off >= data {
		return [][]byte{blob.Tail()[off-data : end-data]}, nil
	}
	first := sort.Search(len(blob.Chunks), func(i int) bool {
		c := blob.Chunks[i]
		return c.Off+int64(c.Len) > off
	})
	place := make(map[chunk.Digest]int)
	var ds []chunk.Digest
	total := int64(0)
	for i := first; i < len(blob.Chunks) && blob.Chunks[i].Off < end && len(ds) < windowChunks; i++ {
		c := blob.Chunks[i]
		if total += int64(c.Len); total > windowBytes && len(ds) > 0 {
			break
		}
		place[c.Digest] = i - first
		ds = append(ds, c.Digest)
	}
	parts := make([][]byte, len(ds))
	err := h.cfg.Chunks.GetBatch(ctx, ds, func(d chunk.Digest, p []byte, err error) error {
		if err != nil {
			return err
		}
		c := blob.Chunks[first+place[d]]
		if len(p) != int(c.Len) {
			return fmt.Errorf("chunk %s has %d bytes, the bootstrap says %d", d, len(p), c.Len)
		}
		from := max(off-c.Off, 0)
		to := min(end-c.Off, int64(c.Len))
		parts[place[d]] = append([]byte(nil), p[from:to]...)
		return nil
	})
	if err != nil {
		return nil, err
	}
	for i, p := range parts {
		if p == nil {
			return nil, fmt.Errorf("store left chunk %s out of a batch", ds[i])
		}
	}
	return parts, nil
}

// byteRange is [start, end) of a blob.
type byteRange struct {
	start, end int64
	partial    bool
}

// parseRange reads Range headers for a blob of the given size. One range of
// bytes is served; several are refused with 416 rather than answered with the
// whole blob, which a client that asked for little may not expect. Units other
// than bytes are ignored, as RFC 9110 demands.
func parseRange(headers []string, size int64) (byteRange, error) {
	whole := byteRange{end: size}
	if len(headers) == 0 {
		return whole, nil
	}
	bad := func(why string) (byteRange, error) {
		return byteRange{}, fmt.Errorf("%w: %q: %s; the blob has %d bytes", ErrRange, headers[0], why, size)
	}
	if len(headers) > 1 {
		return bad("more than one Range header")
	}
	unit, spec, ok := strings.Cut(headers[0], "=")
	if ok && !strings.EqualFold(strings.TrimSpace(unit), "bytes") {
		return whole, nil
	}
	if strings.Contains(spec, ",") {
		return bad("ask for one range at a time")
	}
	from, to, ok := strings.Cut(strings.TrimSpace(spec), "-")
	if !ok {
		return bad("want bytes=FIRST-LAST, bytes=FIRST- or bytes=-LENGTH")
	}
	if from == "" {
		n, err := parseOffset(to)
		if err != nil || n == 0 {
			return bad("no length after the dash")
		}
		return byteRange{start: max(size-n, 0), end: size, partial: true}, nil
	}
	start, err := parseOffset(from)
	if err != nil || start >= size {
		return bad("starts at or after the end")
	}
	if to == "" {
		return byteRange{start: start, end: size, partial: true}, nil
	}
	last, err := parseOffset(to)
	if err != nil || last < start {
		return bad("ends before it starts")
	}
	return byteRange{start: start, end: min(last, size-1) + 1, partial: true}, nil
}

// parseOffset reads decimal digits alone: no sign, no space. A number that
// needs more than 63 bits is as good as the largest one.
func parseOffset(s string) (int64, error) {
	if s == "" || strings.Trim(s, "0123456789") != "" {
		return 0, fmt.Errorf("%q is no offset", s)
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if errors.Is(err, strconv.ErrRange) {
		return n, nil
	}
	return n, err
}
