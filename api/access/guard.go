package access

import (
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

var (
	// ErrUnauthenticated says that a request shows no valid token.
	ErrUnauthenticated = errors.New("no valid token")
	// ErrForbidden says that its token does not allow what it asks for.
	ErrForbidden = errors.New("the token does not allow this")
	// ErrUnavailable says that the tokens cannot be read now, so nobody gets in.
	ErrUnavailable = errors.New("the tokens cannot be read")
)

// maxHeader bounds what is looked at of an Authorization header. The largest is a
// bearer of the token flow, see bearer.go.
const maxHeader = 16 << 10

// Refusal is the error of a request that is not allowed. errors.Is finds one of the
// sentinels above.
type Refusal struct {
	Kind   error  // ErrUnauthenticated, ErrForbidden or ErrUnavailable
	Reason string // a sentence without any secret
	Need   Scope  // what the request needs, Any when no more than a token
	Repo   string // and where, "" when in no repository
	// Challenges are the WWW-Authenticate headers of the answer.
	Challenges []string
}

func (r *Refusal) Error() string { return r.Kind.Error() + ": " + r.Reason }

// Unwrap returns the kind.
func (r *Refusal) Unwrap() error { return r.Kind }

// Status is the HTTP status of the answer.
func (r *Refusal) Status() int {
	switch r.Kind {
	case ErrForbidden:
		return http.StatusForbidden
	case ErrUnavailable:
		return http.StatusServiceUnavailable
	}
	return http.StatusUnauthorized
}

// Config is what a Guard knows.
type Config struct {
	Tokens *File
	// Key makes the bearers of the token flow, 32 random bytes. Nodes with the same
	// tokens that stand behind one name share it.
	Key []byte
	// TLS says that the server speaks it. The connections of its listener do not tell.
	TLS bool
	Now func() time.Time // nil = time.Now
	Log *slog.Logger     // nil = discard
}

// Guard holds requests against tokens. Safe for concurrent use. An attempt costs one
// look-up and one SHA-256 of some bytes, whatever it shows.
type Guard struct {
	cfg     Config
	refused *prometheus.CounterVec
}

// New returns a guard of cfg.
func New(cfg Config) *Guard {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	return &Guard{cfg: cfg, refused: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "quarry_access_refused_total", Help: "Requests refused, by reason.",
	}, []string{"reason"})}
}

// Collectors returns the metrics, for their owner to register.
func (g *Guard) Collectors() []prometheus.Collector { return []prometheus.Collector{g.refused} }

// Reasons of refusals, as the metric counts them.
const (
	noneShown  = "no_token"
	wrongShown = "wrong_token"
	expired    = "expired"
	notAllowed = "not_allowed"
	unreadable = "tokens_unreadable"
)

// Authorize returns nil when the request shows a token that allows need in repo; ""
// is for what is in no repository. Errors: *Refusal.
func (g *Guard) Authorize(r *http.Request, need Scope, repo string) error {
	id, err := g.identify(r, need, repo)
	if err != nil {
		return err
	}
	if id.may(need, repo) {
		return nil
	}
	g.refused.WithLabelValues(notAllowed).Inc()
	if id.bearer && id.token.may(need, repo) {
		// The client asks the token service for more when it hears what for.
		return &Refusal{
			Kind: ErrUnauthenticated, Reason: "this bearer was not made for that: ask " + TokenPath + " for another", Need: need, Repo: repo,
			Challenges: g.challenges(r, need, repo, "insufficient_scope"),
		}
	}
	return &Refusal{Kind: ErrForbidden, Need: need, Repo: repo,
		Reason: fmt.Sprintf("token %s has %s; %s is needed%s: ask an operator, who makes another one with quarry token create",
			id.token.ID, id.token.describe(), need, inRepo(repo))}
}

// Covered is Authorize for what is in many repositories: it returns which of them the
// token covers. Errors: *Refusal.
func (g *Guard) Covered(r *http.Request, need Scope) (func(repo string) bool, error) {
	if err := g.Authorize(r, need, ""); err != nil {
		return nil, err
	}
	id, err := g.identify(r, need, "")
	return func(repo string) bool { return id.may(need, repo) }, err
}

// Admin reports whether the token of a request that was let in has the scope admin.
// That it has not is no refusal, and is not counted as one.
func (g *Guard) Admin(r *http.Request) bool {
	id, err := g.identify(r, Any, "")
	return err == nil && id.may(Admin, "")
}

// Holder returns the id of the token that a request shows, "" when none is valid.
func (g *Guard) Holder(r *http.Request) string {
	id, err := g.identify(r, Any, "")
	if err != nil {
		return ""
	}
	return id.token.ID
}

// TokenName returns what the token that a request shows is called: its label, which its
// successor may have too, or without one its id; "" when none is valid.
func (g *Guard) TokenName(r *http.Request) string {
	id, err := g.identify(r, Any, "")
	if err != nil {
		return ""
	}
	return cmp.Or(id.token.Label, id.token.ID)
}

func inRepo(repo string) string {
	if repo == "" {
		return ""
	}
	return " in repository " + repo
}

// describe says what a token allows, for its holder.
func (t Token) describe() string {
	words := make([]string, len(t.Scopes))
	for i, s := range t.Scopes {
		words[i] = string(s)
	}
	text := strings.Join(words, ",")
	if len(t.Repos) > 0 {
		text += " in " + strings.Join(t.Repos, ", ")
	}
	return text
}

// identity is who a request is: a token, and for a bearer of the token flow what of it
// was granted.
type identity struct {
	token  Token
	bearer bool
	grants []grant
}

func (id identity) may(need Scope, repo string) bool {
	return id.token.may(need, repo) && (!id.bearer || granted(id.grants, need, repo))
}

// identify finds the token of a request.
func (g *Guard) identify(r *http.Request, need Scope, repo string) (identity, error) {
	tokens, err := g.cfg.Tokens.current()
	if err != nil {
		g.refused.WithLabelValues(unreadable).Inc()
		g.cfg.Log.ErrorContext(r.Context(), "tokens cannot be read, everybody is refused", "err", err)
		return identity{}, &Refusal{Kind: ErrUnavailable, Reason: "see the log of the server"}
	}
	id, why := g.find(tokens, r)
	if why == "" {
		return id, nil
	}
	g.refused.WithLabelValues(why).Inc()
	reason := map[string]string{
		noneShown:  "the request shows none: pass a token (--token-file FILE, or docker login with the token as password)",
		wrongShown: "the token is unknown here, or was removed",
		expired:    "the token has expired",
	}[why]
	hint := ""
	if why != noneShown {
		hint = "invalid_token"
	}
	return identity{}, &Refusal{Kind: ErrUnauthenticated, Reason: reason, Need: need, Repo: repo, Challenges: g.challenges(r, need, repo, hint)}
}

// find returns whose token the request shows, or why there is none.
func (g *Guard) find(tokens map[string]Token, r *http.Request) (identity, string) {
	headers := r.Header.Values("Authorization")
	if len(headers) == 0 || headers[0] == "" {
		return identity{}, noneShown
	}
	if len(headers) > 1 || len(headers[0]) > maxHeader {
		return identity{}, wrongShown
	}
	scheme, text, _ := strings.Cut(headers[0], " ")
	text = strings.TrimSpace(text)
	switch {
	case strings.EqualFold(scheme, "basic"):
		return g.known(tokens, password(text))
	case !strings.EqualFold(scheme, "bearer"):
		return identity{}, wrongShown
	case strings.HasPrefix(text, bearerPrefix):
		return g.unseal(tokens, text)
	}
	return g.known(tokens, text)
}

// password returns that of basic credentials. The user may be anybody.
func password(text string) string {
	raw, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return ""
	}
	_, pass, _ := strings.Cut(string(raw), ":")
	return pass
}

// known finds a token by its text.
func (g *Guard) known(tokens map[string]Token, text string) (identity, string) {
	id, secret, ok := cut(text)
	t, there := tokens[id]
	switch {
	case !ok || !there || !t.is(secret):
		return identity{}, wrongShown
	case t.Expired(g.cfg.Now()):
		return identity{}, expired
	}
	return identity{token: t}, ""
}
