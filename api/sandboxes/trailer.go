package sandboxes

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"unicode/utf16"
)

// maxTrailer bounds HeaderError: clients have 4 KiB for all trailers (Go's), and the
// others are less than 200 bytes.
const maxTrailer = 3 << 10

// trailing declares what comes behind the bytes of an answer, and reports whether that
// can be HeaderError.
func (w *response) trailing(r *http.Request, names ...string) bool {
	if w.tells = r.ProtoAtLeast(1, 1) && takesTrailers(r); w.tells {
		names = append(names, HeaderError)
	}
	if len(names) > 0 {
		w.Header().Set("Trailer", strings.Join(names, ", "))
	}
	return w.tells
}

// takesTrailers reports whether a client has said that it reads trailers.
func takesTrailers(r *http.Request) bool {
	for _, part := range strings.Split(strings.Join(r.Header.Values("TE"), ","), ",") {
		if coding, _, _ := strings.Cut(part, ";"); strings.EqualFold(strings.TrimSpace(coding), "trailers") {
			return true
		}
	}
	return false
}

// tell says behind the bytes of an answer why no more of them come, and reports whether
// the client can see that. An answer with HeaderError never has its digest.
func (w *response) tell(e *Error) bool {
	if !w.tells || e.Status == statusClientGone {
		return false
	}
	w.Header().Del(HeaderSHA256)
	w.Header().Set(HeaderError, e.trailer())
	return true
}

// trailer is an error in one line of ASCII. What would make it too long is left out: the
// sandbox's record has it, and the end of a message says the reason.
func (e *Error) trailer() string {
	short := *e
	if e.End != nil {
		end := *e.End
		end.Evidence.ImageErrors, end.Message = nil, last(end.Message, 256)
		short.End = &end
	}
	for most := 1 << 10; ; most /= 2 { // a byte may become six
		short.Message = last(e.Message, most)
		if text := ascii(short); len(text) <= maxTrailer || most == 0 {
			return text
		}
	}
}

// last is the end of a text, of at most n bytes.
func last(text string, n int) string {
	if n >= len(text) {
		return text
	}
	return strings.ToValidUTF8(text[len(text)-n:], "")
}

// ascii is JSON whose text has no byte that a header cannot have.
func ascii(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // a struct of plain fields
	}
	var out strings.Builder
	for _, r := range string(b) {
		if r >= ' ' && r <= '~' {
			out.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&out, `\u%04x`, unit)
		}
	}
	return out.String()
}
