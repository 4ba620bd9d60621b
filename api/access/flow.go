package access

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"time"
)

const (
	// TokenPath is where the token flow of registries is served.
	TokenPath = "/v2/token"
	// Service is this service's name in it, the same for all nodes.
	Service = "quarry"

	// maxForm bounds the query and the body of a request for a bearer: a token, a
	// client id and 16 scopes of 300 bytes.
	maxForm = 16 << 10
)

// hostText is what a Host header may be to stand in a challenge.
var hostText = regexp.MustCompile(`^[A-Za-z0-9.:\[\]_-]{1,255}$`)

// challenges are the WWW-Authenticate headers that tell a client where to get in: the
// token flow, and basic credentials, of which every client knows one. The order is
// that of preference.
func (g *Guard) challenges(r *http.Request, need Scope, repo, hint string) []string {
	basic := `Basic realm="quarry"`
	if !hostText.MatchString(r.Host) {
		return []string{basic}
	}
	scheme := "http"
	// Who ends TLS before this server says so; who lies about it misleads himself.
	if g.cfg.TLS || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https") {
		scheme = "https"
	}
	text := fmt.Sprintf(`Bearer realm="%s://%s%s",service="%s"`, scheme, r.Host, TokenPath, Service)
	switch {
	case repo != "" && need == Push:
		text += fmt.Sprintf(`,scope="repository:%s:pull,push"`, repo)
	case repo != "" && need == Pull:
		text += fmt.Sprintf(`,scope="repository:%s:pull"`, repo)
	case need == Pull:
		text += `,scope="registry:catalog:*"`
	}
	if hint != "" {
		text += fmt.Sprintf(`,error="%s"`, hint)
	}
	return []string{text, basic}
}

// tokenAnswer is the answer of the token flow. Clients read one or the other name.
type tokenAnswer struct {
	Token       string `json:"token"`
	AccessToken string `json:"access_token"`
	ExpiresIn   int64  `json:"expires_in"`
	IssuedAt    string `json:"issued_at"`
}

// ServeToken answers a request for a bearer: GET with basic credentials, or POST with a
// password or refresh_token grant, in which the token is the password or the refresh
// token. Errors: *Refusal, and ErrForm for what it cannot read.
func (g *Guard) ServeToken(w http.ResponseWriter, r *http.Request) error {
	asked, err := g.tokenRequest(w, r)
	if err != nil {
		return err
	}
	id, err := g.identify(r, Any, "")
	if err != nil {
		// The answer to a request for a bearer must not send the client for a bearer.
		if ref := new(Refusal); errors.As(err, &ref) && ref.Kind == ErrUnauthenticated {
			ref.Challenges = []string{`Basic realm="quarry"`}
		}
		return err
	}
	if id.bearer {
		return &Refusal{
			Kind: ErrUnauthenticated, Reason: "a bearer is not exchanged for another: show the token",
			Challenges: []string{`Basic realm="quarry"`},
		}
	}
	now := g.cfg.Now()
	end := now.Add(bearerTime)
	if e := id.token.Expires; e != nil && e.Before(end) {
		end = *e
	}
	text, err := g.seal(bearer{Token: id.token.ID, Expires: end.Unix(), Grants: grantsOf(id.token, asked)})
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	b, err := json.Marshal(tokenAnswer{text, text, max(1, int64(end.Sub(now)/time.Second)), now.UTC().Format(time.RFC3339)})
	if err != nil {
		return err
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(b)))
	_, err = w.Write(b)
	return err
}

// ErrForm says that a request for a bearer cannot be read.
var ErrForm = errors.New("not a request for a token")

// tokenRequest reads which scopes are asked for, and makes the credentials of a form
// those of the request.
func (g *Guard) tokenRequest(w http.ResponseWriter, r *http.Request) ([]string, error) {
	if len(r.URL.RawQuery) > maxForm {
		return nil, fmt.Errorf("%w: its query has %d bytes, at most %d", ErrForm, len(r.URL.RawQuery), maxForm)
	}
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return nil, fmt.Errorf("%w: its query: %w", ErrForm, err)
	}
	if r.Method != http.MethodPost {
		return query["scope"], nil
	}
	r.Body = http.MaxBytesReader(w, r.Body, maxForm)
	if err := r.ParseForm(); err != nil {
		return nil, fmt.Errorf("%w: its form: %w", ErrForm, err)
	}
	secret := ""
	switch kind := r.PostForm.Get("grant_type"); kind {
	case "password":
		secret = r.PostForm.Get("password")
	case "refresh_token":
		secret = r.PostForm.Get("refresh_token")
	case "":
	default:
		return nil, fmt.Errorf("%w: grant_type %q: want password or refresh_token", ErrForm, kind)
	}
	if secret != "" {
		r.Header.Set("Authorization", "Bearer "+secret)
	}
	return append(query["scope"], r.PostForm["scope"]...), nil
}
