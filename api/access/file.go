package access

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"quarry/internal/durable"
	"quarry/internal/proc"
)

// lookEvery bounds how often the file is looked at: a token that was made or
// removed beside a running server counts so much later.
const lookEvery = 250 * time.Millisecond

var (
	// ErrUnknownToken says that no token has that id.
	ErrUnknownToken = errors.New("no such token")
	// ErrNoTokens says that a tokens file is missing or empty.
	ErrNoTokens = errors.New("there are no tokens")
)

// File is a tokens file. Safe for concurrent use, also by several processes.
type File struct {
	path string
	now  func() time.Time

	mu     sync.Mutex // guards what follows
	looked time.Time
	info   fs.FileInfo
	tokens map[string]Token // by id; what is returned is not changed any more
	err    error            // of the last reading
}

// Open returns the file at path, which need not exist yet. now nil = time.Now.
func Open(path string, now func() time.Time) *File {
	if now == nil {
		now = time.Now
	}
	return &File{path: path, now: now}
}

// Path returns where the file is.
func (f *File) Path() string { return f.path }

// current returns the tokens by id, at most lookEvery old. A file that cannot be read
// gives nobody access until it is whole again: whoever replaced it may have meant to
// take a token away.
func (f *File) current() (map[string]Token, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now := f.now()
	if !f.looked.IsZero() && now.Sub(f.looked) < lookEvery && !now.Before(f.looked) {
		return f.tokens, f.err
	}
	f.looked = now
	info, err := os.Stat(f.path)
	if err == nil && f.err == nil && f.info != nil && same(info, f.info) {
		return f.tokens, nil
	}
	tokens, err := f.read()
	f.info, f.err, f.tokens = info, err, make(map[string]Token, len(tokens))
	for _, t := range tokens {
		f.tokens[t.ID] = t
	}
	return f.tokens, f.err
}

// same reports whether a file was neither replaced nor written to.
func same(a, b fs.FileInfo) bool {
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// List returns the tokens, sorted by id. None when there is no file.
func (f *File) List() ([]Token, error) {
	tokens, err := f.read()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return tokens, err
}

func (f *File) read() ([]Token, error) {
	file, err := os.Open(f.path)
	if err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	defer file.Close()
	b, err := io.ReadAll(io.LimitReader(file, MaxFile+1))
	if err != nil {
		return nil, fmt.Errorf("tokens: %w", err)
	}
	tokens, err := Decode(b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w: put back the file that quarry token wrote, or remove it and make new tokens", f.path, err)
	}
	return tokens, nil
}

// Ready returns nil when some token is there, so that somebody can be served.
// Errors: ErrNoTokens; those of a file that cannot be read.
func (f *File) Ready() error {
	tokens, err := f.List()
	if err == nil && len(tokens) == 0 {
		err = fmt.Errorf("%w in %s", ErrNoTokens, f.path)
	}
	return err
}

// Create adds a token with what t says of scopes, repositories, label and expiry. It
// is durable on nil.
func (f *File) Create(ctx context.Context, t Token) (Token, Secret, error) {
	t, secret := newToken(t)
	t.Created = f.now().UTC().Truncate(time.Second)
	slices.Sort(t.Repos)
	t.Repos = slices.Compact(t.Repos)
	if err := t.validate(); err != nil {
		return Token{}, Secret{}, err
	}
	err := f.change(ctx, func(tokens []Token) ([]Token, error) {
		if len(tokens) >= MaxTokens {
			return nil, fmt.Errorf("there are %d tokens already, which is the most: remove some with quarry token rm", len(tokens))
		}
		return append(tokens, t), nil
	})
	return t, secret, err
}

// Remove takes a token away. Errors: ErrUnknownToken.
func (f *File) Remove(ctx context.Context, id string) error {
	return f.change(ctx, func(tokens []Token) ([]Token, error) {
		left := slices.DeleteFunc(slices.Clone(tokens), func(t Token) bool { return t.ID == id })
		if len(left) == len(tokens) {
			return nil, fmt.Errorf("%w: %q; quarry token ls shows the ids", ErrUnknownToken, id)
		}
		return left, nil
	})
}

// change replaces the file under a lock beside it, as two commands may run at once.
func (f *File) change(ctx context.Context, edit func([]Token) ([]Token, error)) error {
	if err := os.MkdirAll(filepath.Dir(f.path), 0o700); err != nil {
		return err
	}
	lock, err := proc.TakeLock(ctx, f.path+".lock")
	if err != nil {
		return err
	}
	defer lock.Unlock()
	tokens, err := f.List()
	if err != nil {
		return err
	}
	if tokens, err = edit(tokens); err != nil {
		return err
	}
	b, err := encode(tokens)
	if err != nil {
		return err
	}
	return durable.WriteFile(f.path, b, 0o600)
}
