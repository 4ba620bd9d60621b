package oci_test

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	"quarry/converter/oci"
	"quarry/internal/testimage"
)

// Credentials for one scheme are not shown to who speaks the other one.
func TestAPushKeepsToItsScheme(t *testing.T) {
	l := testimage.New(t)
	l.Tag("one", l.Image(testimage.Image{Layers: []testimage.Layer{{Entries: []testimage.Entry{testimage.File("f", "1")}}}}))
	asked := 0
	answer := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { asked++ })
	plain, secure := httptest.NewServer(answer), httptest.NewTLSServer(answer)
	defer plain.Close()
	defer secure.Close()
	for _, c := range []struct {
		url   string
		plain bool
	}{{plain.URL, false}, {secure.URL, true}} {
		_, host, _ := strings.Cut(c.url, "://")
		_, err := oci.Push(t.Context(), l.Source(":one"), oci.PushConfig{
			Host: host, Plain: c.plain, Repo: "t/x", Tag: "one", Transport: secure.Client().Transport,
			Credentials: oci.Credentials{Username: "u", Password: "p"},
		})
		if err == nil || asked > 0 {
			t.Errorf("plain %t to %s: got %v, and %d requests", c.plain, c.url, err, asked)
		}
	}
}

// What a push has sent when it gives up is cancelled, with the credentials it was sent by.
func TestAPushThatGivesUpCancelsItsUploads(t *testing.T) {
	l := testimage.New(t)
	l.Tag("one", l.Image(testimage.Image{Layers: []testimage.Layer{{Entries: []testimage.Entry{testimage.File("f", "1")}}}}))
	for name, refuse := range map[string]func(w http.ResponseWriter, interrupt func()){
		"the disk is full": func(w http.ResponseWriter, _ func()) { w.WriteHeader(http.StatusInsufficientStorage) },
		"interrupted":      func(w http.ResponseWriter, interrupt func()) { interrupt(); w.WriteHeader(http.StatusAccepted) },
	} {
		t.Run(name, func(t *testing.T) {
			ctx, interrupt := context.WithCancel(t.Context())
			defer interrupt()
			var mu sync.Mutex                               // guards what is below
			begun, open, busy := 0, map[string]bool{}, true // open: something came of it
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				mu.Lock()
				defer mu.Unlock()
				_, password, _ := r.BasicAuth()
				id := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
				switch {
				case r.URL.Path == "/v2/" && password == "":
					w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
					w.WriteHeader(http.StatusUnauthorized)
				case r.URL.Path == "/v2/":
				case password != "p":
					w.WriteHeader(http.StatusUnauthorized)
				case r.Method == http.MethodPost:
					begun++
					w.Header().Set("Location", r.URL.Path+strconv.Itoa(begun))
					w.WriteHeader(http.StatusAccepted)
				case r.Method == http.MethodPatch:
					open[id] = true
					w.Header().Set("Location", r.URL.Path)
					refuse(w, interrupt)
				case r.Method == http.MethodDelete && busy:
					busy = false // it has not seen yet that its client has gone
					w.WriteHeader(http.StatusConflict)
				case r.Method == http.MethodDelete:
					open[id] = false
					w.WriteHeader(http.StatusNoContent)
				default:
					w.WriteHeader(http.StatusNotFound)
				}
			}))
			defer srv.Close()
			_, err := oci.Push(ctx, l.Source(":one"), oci.PushConfig{
				Host: strings.TrimPrefix(srv.URL, "http://"), Plain: true, Repo: "t/x", Tag: "one", Transport: http.DefaultTransport,
				Credentials: oci.Credentials{Username: "u", Password: "p"},
			})
			mu.Lock()
			defer mu.Unlock()
			if err == nil || len(open) == 0 {
				t.Errorf("got %v after %d uploads", err, len(open))
			}
			for id, left := range open {
				if left {
					t.Errorf("upload %s is left, of %d", id, len(open))
				}
			}
		})
	}
}
