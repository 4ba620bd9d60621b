package oci_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
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
