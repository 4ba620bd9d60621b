package sandboxes

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"math"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"quarry/worker/sandbox"
)

// byteRange is a Range header of one range, which is all that is served.
var byteRange = regexp.MustCompile(`^bytes=(\d{0,18})-(\d{0,18})$`)

// readOptions reads the Range header.
func readOptions(r *http.Request) (sandbox.ReadOptions, bool, error) {
	o := sandbox.ReadOptions{Length: -1}
	text := r.Header.Get("Range")
	if text == "" {
		return o, false, nil
	}
	m := byteRange.FindStringSubmatch(text)
	switch {
	case strings.Contains(text, ",") || len(r.Header.Values("Range")) > 1:
		return o, false, noRange("Range %q: one range a request: ask for each by itself", text)
	case m == nil || m[1] == "" && m[2] == "":
		return o, false, fmt.Errorf("%w: Range %q: want bytes=FIRST-LAST, bytes=FIRST- or bytes=-COUNT", sandbox.ErrInvalid, text)
	}
	first, _ := strconv.ParseInt(m[1], 10, 64) // 18 digits fit
	last, _ := strconv.ParseInt(m[2], 10, 64)
	switch {
	case m[1] == "" && last == 0:
		return o, false, noRange("Range %q asks for no byte", text)
	case m[1] == "":
		o.Offset = -last
	case m[2] == "":
		o.Offset = first
	case last < first:
		return o, false, fmt.Errorf("%w: Range %q ends before it begins", sandbox.ErrInvalid, text)
	default:
		o.Offset, o.Length = first, last-first+1
	}
	return o, true, nil
}

// noRange is 416, for ranges that are not served.
func noRange(format string, args ...any) error {
	return &Error{Status: http.StatusRequestedRangeNotSatisfiable, Code: "range_not_satisfiable", Blame: sandbox.BlameUser, Message: fmt.Sprintf(format, args...)}
}

// readFile sends a file, or a range of it. Up to MaxHashed bytes its digest stands in
// the head; of more it comes as a trailer.
func (h *Handler) readFile(c call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	o, partial, err := readOptions(c.r)
	if err != nil {
		return err
	}
	s := &fileSender{c: c, partial: partial, sum: sha256.New()}
	if err := h.cfg.Node.ReadFile(c.r.Context(), c.id, path, o, func(fi sandbox.FileInfo) error { return s.begin(fi, o) }, s); err != nil {
		return err
	}
	return s.end()
}

// fileSender sends a file whose size is known before its first byte.
type fileSender struct {
	c       call
	partial bool
	offset  int64
	size    int64 // of what is sent
	whole   int64
	sum     hash.Hash
	got     int64
	held    *bytes.Buffer // a small one, until its digest is known
	info    []byte
}

func (s *fileSender) begin(fi sandbox.FileInfo, o sandbox.ReadOptions) error {
	s.whole = fi.Size
	s.offset, s.size = o.Part(fi.Size)
	if s.partial && s.size == 0 {
		s.c.w.Header().Set("Content-Range", fmt.Sprintf("bytes */%d", fi.Size))
		return noRange("%s has %d bytes, none of them in %s", fi.Encoded().Path, fi.Size, s.c.r.Header.Get("Range"))
	}
	var err error
	if s.info, err = json.Marshal(fi.Encoded()); err != nil {
		return err
	}
	if s.size <= MaxHashed {
		s.held = new(bytes.Buffer)
		return nil
	}
	s.head()
	s.c.w.trailing(s.c.r, HeaderSHA256)
	// A length of its own would leave no room for a trailer in HTTP/1.1.
	s.c.w.WriteHeader(s.status())
	return nil
}

func (s *fileSender) head() {
	head := s.c.w.Header()
	head.Set("Content-Type", "application/octet-stream")
	head.Set("Accept-Ranges", "bytes")
	head.Set(HeaderInfo, string(s.info))
	if s.partial {
		head.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", s.offset, s.offset+s.size-1, s.whole))
	}
}

func (s *fileSender) status() int {
	if s.partial {
		return http.StatusPartialContent
	}
	return http.StatusOK
}

// Write implements io.Writer.
func (s *fileSender) Write(p []byte) (int, error) {
	if s.got+int64(len(p)) > s.size {
		return 0, fmt.Errorf("%w: the file has grown while it was read: read it again when nothing writes to it", sandbox.ErrFileType)
	}
	s.got += int64(len(p))
	s.sum.Write(p)
	if s.held != nil {
		return s.held.Write(p)
	}
	return s.c.w.Write(p)
}

func (s *fileSender) end() error {
	if s.got != s.size {
		return fmt.Errorf("%w: %d bytes of %d came: the file has changed while it was read: read it again when nothing writes to it", sandbox.ErrFileType, s.got, s.size)
	}
	digest := hex.EncodeToString(s.sum.Sum(nil))
	s.c.w.Header().Set(HeaderSHA256, digest)
	if s.held == nil {
		return nil
	}
	s.head()
	s.c.w.Header().Set("Content-Length", strconv.Itoa(s.held.Len()))
	s.c.w.WriteHeader(s.status())
	_, err := s.c.w.Write(s.held.Bytes())
	return err
}

// hexDigest is a SHA-256 as the header has it.
var hexDigest = regexp.MustCompile(`^[0-9a-f]{64}$`)

func (h *Handler) writeFile(c call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	o := sandbox.WriteOptions{Size: c.r.ContentLength, SHA256: c.r.Header.Get(HeaderSHA256), User: c.q.Get("user")}
	if o.SHA256 != "" && !hexDigest.MatchString(o.SHA256) {
		return fmt.Errorf("%w: %s %q: want 64 hex digits in lower case", sandbox.ErrInvalid, HeaderSHA256, o.SHA256)
	}
	if text := c.q.Get("mode"); text != "" {
		mode, err := strconv.ParseUint(text, 8, 32)
		if err != nil || mode > 0o7777 {
			return fmt.Errorf("%w: mode=%q: want octal digits up to 7777", sandbox.ErrInvalid, text)
		}
		m := uint32(mode)
		o.Mode = &m
	}
	if o.MkDirs, err = c.flag("mkdirs"); err != nil {
		return err
	}
	sum := sha256.New()
	fi, err := h.cfg.Node.WriteFile(c.r.Context(), c.id, path, o, io.TeeReader(c.r.Body, sum))
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, WriteAnswer{fi.Encoded(), hex.EncodeToString(sum.Sum(nil))})
}

func (h *Handler) removeFile(c call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	if err := h.cfg.Node.RemoveFile(c.r.Context(), c.id, path); err != nil {
		return err
	}
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

func (h *Handler) statFile(c call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	fi, err := h.cfg.Node.StatFile(c.r.Context(), c.id, path)
	if err != nil {
		return err
	}
	return c.w.json(http.StatusOK, fi.Encoded())
}

func (h *Handler) listFiles(c call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	depth, err := c.number("depth", 1, math.MaxInt32)
	if err != nil {
		return err
	}
	list, err := h.cfg.Node.ListFiles(c.r.Context(), c.id, path, int(depth))
	if err != nil {
		return err
	}
	page := FilesPage{Files: make([]sandbox.FileInfo, len(list))}
	for i, fi := range list {
		page.Files[i] = fi.Encoded()
	}
	return c.w.json(http.StatusOK, page)
}

func (h *Handler) tarDown(c call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	most, err := c.number("max_bytes", 0, sandbox.MaxContent)
	if err != nil {
		return err
	}
	c.w.Header().Set("Content-Type", "application/x-tar")
	c.w.trailing(c.r, HeaderSHA256)
	sum := sha256.New()
	o := sandbox.TarOptions{Path: path, Exclude: c.q["exclude"], MaxBytes: most}
	if err := h.cfg.Node.TarDown(c.r.Context(), c.id, o, io.MultiWriter(sum, c.w)); err != nil {
		return err
	}
	c.w.Header().Set(HeaderSHA256, hex.EncodeToString(sum.Sum(nil)))
	return nil
}

func (h *Handler) tarUp(c call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	if err := h.cfg.Node.TarUp(c.r.Context(), c.id, path, c.r.Body); err != nil {
		return err
	}
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}
