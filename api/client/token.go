package client

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"quarry/api"
	"quarry/store"
)

// maxTokenFile bounds a token file: a token has 81 bytes, those of others some
// thousand.
const maxTokenFile = 16 << 10

// renewWait is how long a fetch of chunks waits for a token that the store takes,
// when its own deadline is later: as long as whoever renews it may take.
const renewWait = 5 * time.Minute

// renewLook is how often it tries meanwhile.
const renewLook = 500 * time.Millisecond

// Token is what a client shows to its store. The zero value, and nil, show nothing.
// Safe for concurrent use. It prints as [redacted].
type Token struct {
	path  string
	fixed string

	mu     sync.Mutex // guards what follows
	info   os.FileInfo
	text   string
	failed error
}

// FixedToken is a token that does not change.
func FixedToken(text string) *Token { return &Token{fixed: strings.TrimSpace(text)} }

// FileToken is the token that a file has, whose first line it is. The file is looked at
// for each request, and read when it is another one, so that who renews it need tell
// nobody. Errors: it has no token now.
func FileToken(path string) (*Token, error) {
	t := &Token{path: path}
	_, err := t.current(false)
	return t, err
}

// String implements fmt.Stringer.
func (*Token) String() string { return "[redacted]" }

// GoString implements fmt.GoStringer, for %#v.
func (*Token) GoString() string { return "[redacted]" }

// renewable reports whether a token that is refused may be another one soon.
func (t *Token) renewable() bool { return t != nil && t.path != "" }

// current returns the text to show; anew reads the file whatever it looks like.
func (t *Token) current(anew bool) (string, error) {
	if t == nil || t.path == "" {
		if t == nil {
			return "", nil
		}
		return t.fixed, nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	info, err := os.Stat(t.path)
	if err == nil && !anew && t.failed == nil && t.info != nil &&
		os.SameFile(info, t.info) && info.Size() == t.info.Size() && info.ModTime().Equal(t.info.ModTime()) {
		return t.text, nil
	}
	t.info = info
	t.text, t.failed = readToken(t.path)
	return t.text, t.failed
}

// Text is the token as it is now, for a client of another kind; "" without one.
func (t *Token) Text() (string, error) { return t.current(false) }

// readToken never puts what it has read into an error.
func readToken(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxTokenFile+1))
	if err != nil {
		return "", fmt.Errorf("token file: %w", err)
	}
	text := strings.TrimSpace(string(b))
	if len(b) > maxTokenFile || text == "" || strings.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r >= 0x7f }) {
		return "", fmt.Errorf("token file %s: want one line with a token, as quarry token create prints it", path)
	}
	return text, nil
}

// noToken is the error of a request that cannot be sent: it has no token to show.
type noToken struct{ error }

func (e noToken) Unwrap() error { return e.error }

// Is makes it a refusal, as the store would refuse it.
func (noToken) Is(target error) bool { return target == store.ErrUnauthorised }

// authorize puts the token into a request's header and returns it.
func (t *Token) authorize(hr *http.Request) (shown string, err error) {
	if shown, err = t.current(false); err != nil {
		return "", noToken{err}
	}
	if shown != "" {
		hr.Header.Set("Authorization", "Bearer "+shown)
	}
	return shown, nil
}

// another reports whether the token is another one than was shown: it was renewed
// while the request was under way.
func (t *Token) another(shown string) bool {
	if !t.renewable() {
		return false
	}
	text, err := t.current(true)
	return err == nil && text != shown
}

// refused reports whether an error says that the token was not taken. A 403 counts:
// who replaces a token may give it more.
func refused(err error) bool {
	var e *api.Error
	return errors.As(err, new(noToken)) || errors.As(err, &e) && (e.Status == http.StatusUnauthorized || e.Status == http.StatusForbidden)
}
