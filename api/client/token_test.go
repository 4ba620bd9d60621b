package client_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/access"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/store"
	"quarry/store/chunk"
)

// locked is a server that asks for tokens, and the file of a client's.
type locked struct {
	*httptest.Server
	tokens *access.File
	path   string // of the client's
	id     string
	text   string
}

func newLocked(t *testing.T, w *apitest.World) *locked {
	t.Helper()
	l := &locked{tokens: access.Open(filepath.Join(t.TempDir(), "tokens.json"), nil), path: filepath.Join(t.TempDir(), "token")}
	guard := access.New(access.Config{Tokens: l.tokens, Key: make([]byte, 32)})
	l.renew(t)
	l.Server, _ = w.Serve(t, func(cfg *api.Config) { cfg.Authorize, cfg.Covered = guard.Authorize, guard.Covered })
	return l
}

// renew makes a token and puts it into the client's file, as a rename does.
func (l *locked) renew(t *testing.T) {
	t.Helper()
	tok, secret, err := l.tokens.Create(t.Context(), access.Token{Scopes: []access.Scope{access.Pull}})
	if err != nil {
		t.Fatal(err)
	}
	l.id, l.text = tok.ID, secret.Reveal()
	tmp := l.path + ".new"
	if err := os.WriteFile(tmp, []byte(l.text+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, l.path); err != nil {
		t.Fatal(err)
	}
}

func (l *locked) revoke(t *testing.T) {
	t.Helper()
	if err := l.tokens.Remove(t.Context(), l.id); err != nil {
		t.Fatal(err)
	}
}

func (l *locked) stores(t *testing.T) *client.Stores {
	t.Helper()
	tok, err := client.FileToken(l.path)
	if err != nil {
		t.Fatal(err)
	}
	return client.NewStores(client.StoresConfig{Clients: []*client.Client{connect(t, client.Config{URL: l.URL, Token: tok})}})
}

// TestATokenRenewedInMidReadCostsNothing: reads go on while the token is taken away
// and replaced, and none fails.
func TestATokenRenewedInMidReadCostsNothing(t *testing.T) {
	w := apitest.New(t)
	want := []byte("the bytes of a chunk")
	d := w.PutChunk(t, want)
	l := newLocked(t, w)
	s := l.stores(t)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var reads atomic.Int64
	var stop atomic.Bool
	var readers sync.WaitGroup
	for range 4 {
		readers.Go(func() {
			for !stop.Load() {
				if got, err := s.Get(ctx, d, nil); err != nil || string(got) != string(want) {
					t.Errorf("a read failed: %q, %v", got, err)
					return
				}
				reads.Add(1)
			}
		})
	}
	await := func(what string, done func() bool) {
		t.Helper()
		for !done() {
			if ctx.Err() != nil {
				t.Fatal(what + " does not come")
			}
			time.Sleep(5 * time.Millisecond)
		}
	}
	await("a read", func() bool { return reads.Load() > 10 })
	for range 2 {
		l.revoke(t)
		refused := s.Stats().Stores[0].Refused
		await("a refusal", func() bool { return s.Stats().Stores[0].Refused > refused })
		l.renew(t)
		now := reads.Load()
		await("a read with the new token", func() bool { return reads.Load() > now+10 })
	}
	stop.Store(true)
	readers.Wait()
}

func TestWithoutAValidTokenAReadEndsByItsDeadline(t *testing.T) {
	w := apitest.New(t)
	d := w.PutChunk(t, []byte("x"))
	l := newLocked(t, w)
	for name, spoil := range map[string]func(){
		"a token that was removed": func() { l.revoke(t) },
		"no file": func() {
			if err := os.Remove(l.path); err != nil {
				t.Fatal(err)
			}
		},
	} {
		l.renew(t)
		s := l.stores(t)
		time.Sleep(300 * time.Millisecond) // the server has seen the new token
		if _, err := s.Get(t.Context(), d, nil); err != nil {
			t.Fatal(err)
		}
		spoil()
		time.Sleep(300 * time.Millisecond)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		_, err := s.Get(ctx, d, nil)
		ended := ctx.Err()
		cancel()
		if store.OutcomeOf(err) != store.Unauthorised || !errors.Is(ended, context.DeadlineExceeded) {
			t.Errorf("%s: %v, outcome %q, the deadline: %v", name, err, store.OutcomeOf(err), ended)
		}
		if err != nil && strings.Contains(err.Error(), l.text[17:]) {
			t.Errorf("%s: the error shows the token: %v", name, err)
		}
		if s.Stats().Stores[0].Refused == 0 {
			t.Errorf("%s: no refusal was counted", name)
		}
	}
}

func TestOtherCallsWithABadTokenFailAtOnce(t *testing.T) {
	w := apitest.New(t)
	l := newLocked(t, w)
	fixed := connect(t, client.Config{URL: l.URL, Token: client.FixedToken("qry_wrong")})
	if _, err := fixed.Names(t.Context()); !errors.Is(err, store.ErrUnauthorised) || fixed.Stats().Requests != 1 {
		t.Errorf("%v after %d requests", err, fixed.Stats().Requests)
	}
	if _, err := fixed.Get(t.Context(), chunk.Sum(nil), nil); !errors.Is(err, store.ErrUnauthorised) {
		t.Errorf("a chunk: %v", err)
	}
	if text := fmt.Sprintf("%v %+v %#v", client.FixedToken("hidden"), client.FixedToken("hidden"), client.FixedToken("hidden")); strings.Contains(text, "hidden") {
		t.Errorf("a token prints as %s", text)
	}
	for name, content := range map[string]string{"empty": " \n", "two lines": "a\nb\n", "long": strings.Repeat("x", 1<<20), "not text": "a\x00b"} {
		path := filepath.Join(t.TempDir(), "token")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := client.FileToken(path); err == nil || len(err.Error()) > 300 {
			t.Errorf("%s: %v", name, err)
		}
	}
}
