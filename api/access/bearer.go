package access

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"quarry/store/image"
)

const (
	bearerPrefix = "qrb_"
	// bearerTime is how long a bearer of the token flow is good: long enough for a
	// client to begin its next requests with, which asks for another by itself.
	bearerTime = 5 * time.Minute
	// maxGrants bounds what one bearer is for. A mount names two repositories. With
	// 16 of 255 bytes it has 8 KiB.
	maxGrants = 16
)

// bearer is what a client of the token flow gets: signed, so that no node has to
// remember it. Whose token it was made with is looked up again each time, so that it
// ends with that.
type bearer struct {
	Token   string  `json:"t"`
	Expires int64   `json:"e"` // seconds since 1970
	Grants  []grant `json:"g,omitempty"`
}

// grant is what of a token one bearer may use. The list of repositories is in none.
type grant struct {
	Repo   string  `json:"r,omitempty"`
	Scopes []Scope `json:"s"`
}

// granted: what is in no repository needs a grant of the scope anywhere, and the
// lists that come then hold the repositories against their own.
func granted(grants []grant, need Scope, repo string) bool {
	return need == Any || slices.ContainsFunc(grants, func(g grant) bool {
		return (repo == "" || g.Repo == repo || g.Repo == "") && slices.Contains(g.Scopes, need)
	})
}

func (g *Guard) seal(b bearer) (string, error) {
	body, err := json.Marshal(b)
	if err != nil {
		return "", err
	}
	enc := base64.RawURLEncoding
	return bearerPrefix + enc.EncodeToString(body) + "." + enc.EncodeToString(g.mac(body)), nil
}

func (g *Guard) mac(body []byte) []byte {
	h := hmac.New(sha256.New, g.cfg.Key)
	h.Write([]byte("quarry bearer 1\n"))
	h.Write(body)
	return h.Sum(nil)
}

// unseal finds the token that a bearer was made with. Nothing of it is decoded before
// its MAC is compared.
func (g *Guard) unseal(tokens map[string]Token, text string) (identity, string) {
	first, second, ok := strings.Cut(text[len(bearerPrefix):], ".")
	enc := base64.RawURLEncoding.Strict()
	body, err1 := enc.DecodeString(first)
	mac, err2 := enc.DecodeString(second)
	if !ok || err1 != nil || err2 != nil || !hmac.Equal(mac, g.mac(body)) {
		return identity{}, wrongShown
	}
	var b bearer
	if err := json.Unmarshal(body, &b); err != nil {
		return identity{}, wrongShown
	}
	now := g.cfg.Now()
	t, there := tokens[b.Token]
	switch {
	case !there:
		return identity{}, wrongShown
	case t.Expired(now) || now.Unix() >= b.Expires:
		return identity{}, expired
	}
	return identity{token: t, bearer: true, grants: b.Grants}, ""
}

// grantsOf returns what a token allows of the scopes that a client asks for, written
// as docker does: repository:team/x:pull,push. What it cannot have is left out, as
// the token protocol wants it: the request that needs it is refused then, and says
// what was lacking.
func grantsOf(t Token, asked []string) []grant {
	var out []grant
	for _, text := range asked {
		for one := range strings.FieldsSeq(text) {
			if len(out) == maxGrants {
				return out
			}
			if g, ok := grantOf(t, one); ok {
				out = append(out, g)
			}
		}
	}
	return out
}

func grantOf(t Token, text string) (grant, bool) {
	kind, rest, _ := strings.Cut(text, ":")
	i := strings.LastIndex(rest, ":")
	if i < 0 {
		return grant{}, false
	}
	name, actions := rest[:i], strings.Split(rest[i+1:], ",")
	// Some clients send a class: repository(plugin).
	kind, _, _ = strings.Cut(kind, "(")
	switch {
	case kind == "registry" && name == "catalog":
		if !t.may(Pull, "") {
			return grant{}, false
		}
		return grant{Scopes: []Scope{Pull}}, true
	case kind != "repository" || image.ValidateRepo(name) != nil:
		return grant{}, false
	}
	g := grant{Repo: name}
	for _, s := range []Scope{Pull, Push} {
		wanted := slices.Contains(actions, string(s)) || slices.Contains(actions, "*") || s == Push && slices.Contains(actions, "delete")
		if wanted && t.may(s, name) {
			g.Scopes = append(g.Scopes, s)
		}
	}
	return g, len(g.Scopes) > 0
}
