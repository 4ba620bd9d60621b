package main

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"quarry/api"
	"quarry/signer"
	"quarry/store/image"
)

// signing is a run of the command with a store that says something else than w's.
func (w *signWorld) signing(t *testing.T, key, trust string) *signing {
	t.Helper()
	k, err := signer.LoadKey(key)
	if err != nil {
		t.Fatal(err)
	}
	trusted, err := signer.LoadTrust(trust)
	if err != nil {
		t.Fatal(err)
	}
	s := &signing{key: k, own: signer.NewTrust(k.Public()), trust: trusted, store: w.Client, stdout: io.Discard, bar: newProgress(io.Discard)}
	s.target.store = "http://" + w.url
	return s
}

// A store that shows an old name statement again does not get one that is newer than
// what workers have seen, and none gets one after which a tag cannot be moved.
func TestASerialIsNotTheStoresWord(t *testing.T) {
	w := newSignWorld(t)
	path, _ := w.newKey(t, "k", true)
	newPath, _ := w.newKey(t, "new", true)
	unsigned, err := w.Signable(t.Context(), w.ref)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.sign(t, signOptions{key: path}, w.ref.String()); err != nil {
		t.Fatal(err)
	}
	signed, err := w.Signable(t.Context(), w.ref) // with serial 2
	if err != nil {
		t.Fatal(err)
	}
	const day = 24 * time.Hour
	for name, tt := range map[string]struct {
		there  api.Signable
		serial uint64 // that the store says
		key    string
		life   time.Duration
		want   uint64 // 0: refused
	}{
		"of a tag that has moved on":           {signed, 40, newPath, 0, 3},
		"the same, for a time":                 {signed, 40, newPath, day, 3},
		"the same, by the key that has signed": {signed, 40, path, day, 3},
		"the last but one, signed before":      {signed, image.MaxSerial - 1, newPath, day, 3},
		"the last but one, never signed":       {unsigned, image.MaxSerial - 1, newPath, 0, 0},
		"the same for a time":                  {unsigned, image.MaxSerial - 1, newPath, day, 0},
		"the highest":                          {unsigned, maxFirstSerial - 1, newPath, 0, maxFirstSerial},
		"one more":                             {unsigned, maxFirstSerial, newPath, 0, 0},
	} {
		s := w.signing(t, tt.key, path+".pub")
		s.life = tt.life
		lie := *tt.there.Name
		lie.Serial, tt.there.Name = tt.serial, &lie
		req, _, err := s.sign(t.Context(), w.ref, tt.there)
		if tt.want == 0 {
			if !errors.Is(err, errDamage) || req.Name != nil {
				t.Errorf("%s: signed: %t, error %v", name, req.Name != nil, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		payload, _, err := signer.Open(req.Name, image.NameStatementType, s.own)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := image.DecodeNameStatement(payload); err != nil || n.Serial != tt.want {
			t.Errorf("%s: it has serial %d, %v; want %d", name, n.Serial, err, tt.want)
		}
	}
}

// What this key has signed of one image is not its signature of another.
func TestTheSignedImageOfAnotherSourceIsRefused(t *testing.T) {
	w := newSignWorld(t)
	path, key := w.newKey(t, "k", true)
	source := w.push(t, w.layout, "two", "other")
	w.convertAll(t)
	other := image.Ref{Repo: "t/x", Tag: "other", Digest: &source}
	if _, err := w.sign(t, signOptions{key: path}, other.String()); err != nil {
		t.Fatal(err)
	}
	there, err := w.Signable(t.Context(), w.ref)
	if err != nil {
		t.Fatal(err)
	}
	signed, err := w.Signable(t.Context(), other)
	if err != nil {
		t.Fatal(err)
	}
	platform := signed
	platform.Images = []api.SignableImage{signed.Images[0]}
	platform.Images[0].Platform = "linux/arm64"
	there.Images = signed.Images
	for ref, there := range map[image.Ref]api.Signable{w.ref: there, other: platform} {
		req, _, err := w.signing(t, path, path+".pub").sign(t.Context(), ref, there)
		if !errors.Is(err, errDamage) || !strings.Contains(err.Error(), "the statement of source "+source.String()) || req.Name != nil {
			t.Errorf("%s: signed: %t, error %v", ref, req.Name != nil, err)
		}
	}
	if _, err := w.verified(t, key); !errors.Is(err, api.ErrUnsigned) {
		t.Errorf("error %v, want %v", err, api.ErrUnsigned)
	}
}

func TestATagThatTheStoreSaysNothingOfIsNotSigned(t *testing.T) {
	w := newSignWorld(t)
	path, _ := w.newKey(t, "k", true)
	there, err := w.Signable(t.Context(), w.ref)
	if err != nil {
		t.Fatal(err)
	}
	there.Name = nil
	_, _, err = w.signing(t, path, path+".pub").sign(t.Context(), image.Ref{Repo: "t/x", Tag: "v1"}, there)
	if !errors.Is(err, errNobodySaid) || !strings.Contains(err.Error(), "it is not signed") {
		t.Errorf("error %v", err)
	}
}

// An answer that is lost does not make signatures that were taken a failure.
func TestSignaturesAreSentAgain(t *testing.T) {
	w := newSignWorld(t)
	path, key := w.newKey(t, "k", true)
	var posts atomic.Int32
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || posts.Add(1) > 1 {
			w.handler.ServeHTTP(rw, r)
			return
		}
		rec := httptest.NewRecorder()
		if w.handler.ServeHTTP(rec, r); rec.Code >= 300 {
			t.Errorf("the first time: %d %s", rec.Code, rec.Body)
		}
		panic(http.ErrAbortHandler)
	}))
	t.Cleanup(srv.Close)
	o := signOptions{key: path, target: target{store: srv.URL}}
	if err := runSign(t.Context(), o, []string{w.ref.String()}, io.Discard, io.Discard); err != nil || posts.Load() != 2 {
		t.Errorf("sent %d times, error %v", posts.Load(), err)
	}
	if v, err := w.verified(t, key); err != nil || v.Name.Serial != 2 {
		t.Errorf("%+v, %v", v, err)
	}
}
