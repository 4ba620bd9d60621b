package access

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"quarry/internal/strictjson"
	"quarry/store/image"
)

const (
	// Version is the version of a tokens file.
	Version = 1
	// MaxTokens bounds the tokens of one file.
	MaxTokens = 4096
	// MaxRepos bounds the prefixes of one token.
	MaxRepos = 64
	// MaxLabel bounds the remark of a token, in bytes.
	MaxLabel = 128
	// MaxFile bounds a tokens file: 4096 tokens of 300 bytes are 1.2 MiB, and those
	// with many long prefixes have room beside them.
	MaxFile = 8 << 20

	prefix     = "qry_"
	idBytes    = 6  // names one of 4096 tokens, and is no secret
	secretSize = 32 // nobody guesses one of 2^256
	// textSize is the length of a token: qry_<12 hex digits>_<64 hex digits>.
	textSize = len(prefix) + 2*idBytes + 1 + 2*secretSize
)

// ErrMalformed says that a tokens file is not what this package writes.
var ErrMalformed = errors.New("malformed tokens file")

// Token is what is kept of a token: not its secret.
type Token struct {
	ID      string     `json:"id"`
	Hash    string     `json:"sha256"` // of the secret's 32 bytes, in hex
	Scopes  []Scope    `json:"scopes"`
	Repos   []string   `json:"repos,omitempty"` // prefixes; none: all repositories
	Label   string     `json:"label,omitempty"`
	Created time.Time  `json:"created"`
	Expires *time.Time `json:"expires,omitempty"`
}

// Secret is a token's text. It prints and logs as [redacted]; Reveal has it.
type Secret struct {
	text func() string // a function, as fmt looks into what stands in unexported fields
}

// Reveal returns the text, to be shown once to whoever made the token.
func (s Secret) Reveal() string { return s.text() }

// String implements fmt.Stringer.
func (Secret) String() string { return "[redacted]" }

// GoString implements fmt.GoStringer, for %#v.
func (Secret) GoString() string { return "[redacted]" }

// LogValue implements slog.LogValuer.
func (Secret) LogValue() slog.Value { return slog.StringValue("[redacted]") }

// newToken makes the secret of t and sets what is kept of it.
//
// The hash is a plain SHA-256. bcrypt and the like are slow so that short words
// that people choose cannot be tried one after the other; these 32 bytes are
// random, nobody tries 2^256 of them, and a slow hash would cost each request, also
// those of whoever has no token at all.
func newToken(t Token) (Token, Secret) {
	id, secret := make([]byte, idBytes), make([]byte, secretSize)
	rand.Read(id)
	rand.Read(secret)
	hash := sha256.Sum256(secret)
	t.ID, t.Hash = hex.EncodeToString(id), hex.EncodeToString(hash[:])
	text := prefix + t.ID + "_" + hex.EncodeToString(secret)
	return t, Secret{func() string { return text }}
}

// cut returns the two parts of a token's text; false when it is none.
func cut(text string) (id string, secret []byte, ok bool) {
	if len(text) != textSize || !strings.HasPrefix(text, prefix) {
		return "", nil, false
	}
	id, digits, ok := strings.Cut(text[len(prefix):], "_")
	secret, err := hex.DecodeString(digits)
	return id, secret, ok && err == nil && len(id) == 2*idBytes
}

// is reports whether secret is the token's, in the same time for every wrong one.
func (t Token) is(secret []byte) bool {
	want, err := hex.DecodeString(t.Hash)
	got := sha256.Sum256(secret)
	return err == nil && subtle.ConstantTimeCompare(got[:], want) == 1
}

// Expired reports whether the token's time is over.
func (t Token) Expired(now time.Time) bool { return t.Expires != nil && !now.Before(*t.Expires) }

// may reports whether the token allows a scope in a repository; "" is for what is in
// none.
func (t Token) may(need Scope, repo string) bool {
	if need == Any || slices.Contains(t.Scopes, Admin) {
		return true
	}
	return slices.Contains(t.Scopes, need) && (repo == "" || t.covers(repo))
}

func (t Token) covers(repo string) bool {
	return len(t.Repos) == 0 || slices.ContainsFunc(t.Repos, func(p string) bool { return Covers(p, repo) })
}

// Check finds what cannot be in a new token's scopes, repositories and label.
func (t Token) Check() error {
	t, _ = newToken(t)
	return t.validate()
}

func (t Token) validate() error {
	if id, err := hex.DecodeString(t.ID); err != nil || len(id) != idBytes || strings.ToLower(t.ID) != t.ID {
		return fmt.Errorf("token id %q: want %d lower-case hex digits", t.ID, 2*idBytes)
	}
	if h, err := hex.DecodeString(t.Hash); err != nil || len(h) != sha256.Size || strings.ToLower(t.Hash) != t.Hash {
		return fmt.Errorf("token %s: its sha256 is not 64 lower-case hex digits", t.ID)
	}
	words := make([]string, len(t.Scopes))
	for i, s := range t.Scopes {
		words[i] = string(s)
	}
	if sorted, err := ParseScopes(strings.Join(words, ",")); err != nil || !slices.Equal(sorted, t.Scopes) {
		return fmt.Errorf("token %s: scopes %v: want some of %v, in this order", t.ID, t.Scopes, scopes)
	}
	if len(t.Repos) > MaxRepos {
		return fmt.Errorf("token %s has %d repositories, at most %d", t.ID, len(t.Repos), MaxRepos)
	}
	if len(t.Repos) > 0 && slices.Contains(t.Scopes, Admin) {
		return fmt.Errorf("token %s: scope admin is for all repositories: leave out the repositories or the scope", t.ID)
	}
	for _, repo := range t.Repos {
		if err := image.ValidateRepo(repo); err != nil {
			return fmt.Errorf("token %s: %w", t.ID, err)
		}
	}
	if len(t.Label) > MaxLabel || !utf8.ValidString(t.Label) {
		return fmt.Errorf("token %s: its label is longer than %d bytes, or not UTF-8", t.ID, MaxLabel)
	}
	return nil
}

// document is the file.
type document struct {
	Version int     `json:"version"`
	Tokens  []Token `json:"tokens"`
}

// encode writes the tokens in the order of their ids.
func encode(tokens []Token) ([]byte, error) {
	tokens = slices.SortedFunc(slices.Values(tokens), func(a, b Token) int { return strings.Compare(a.ID, b.ID) })
	if err := validate(tokens); err != nil {
		return nil, err
	}
	b, err := json.Marshal(document{Version, tokens})
	if err == nil && len(b) > MaxFile {
		err = fmt.Errorf("the tokens take %d bytes, at most %d: give them fewer repositories, or remove some", len(b), MaxFile)
	}
	return b, err
}

func validate(tokens []Token) error {
	if len(tokens) > MaxTokens {
		return fmt.Errorf("%w: %d tokens, at most %d", ErrMalformed, len(tokens), MaxTokens)
	}
	for i, t := range tokens {
		if err := t.validate(); err != nil {
			return fmt.Errorf("%w: %w", ErrMalformed, err)
		}
		if i > 0 && tokens[i-1].ID >= t.ID {
			return fmt.Errorf("%w: token %s stands there twice, or out of order", ErrMalformed, t.ID)
		}
	}
	return nil
}

// Decode reads exactly what a tokens file has. Errors: ErrMalformed.
func Decode(b []byte) ([]Token, error) {
	doc, err := strictjson.Decode[document](b, MaxFile)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if doc.Version != Version {
		return nil, fmt.Errorf("%w: version %d, this program knows %d", ErrMalformed, doc.Version, Version)
	}
	return doc.Tokens, validate(doc.Tokens)
}
