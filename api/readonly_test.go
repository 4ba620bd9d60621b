package api_test

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"quarry/api"
	"quarry/api/apitest"
)

// TestANodeThatOnlyReadsNamesItsWriter: what changes the store is refused before
// anything of it is looked at, and what reads is served.
func TestANodeThatOnlyReadsNamesItsWriter(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "team/app:v1", 1, 1)
	srv, _ := w.Serve(t, func(c *api.Config) {
		c.Local = true
		c.ReadOnly = func(context.Context) error { return api.ReadOnlyError("pid 7 on store-1") }
		c.Lag = func() api.Lag { return api.Lag{Applied: 12, Entries: 3, Seconds: 1.5} }
	})
	for _, request := range [][2]string{
		{"POST", "/v1/convert"}, {"POST", "/v1/admin/check"}, {"DELETE", "/v1/images/team/app:v1"},
		{"POST", "/v1/images/" + w.ID(t, img).Hex() + "/trace"},
		{"POST", "/v1/signatures/team/app@" + img.Source.String()},
	} {
		a := ask(t, request[0], srv.URL+request[1], "")
		var doc struct{ Error api.Error }
		if err := json.Unmarshal(a.body, &doc); err != nil {
			t.Fatal(err)
		}
		e := doc.Error
		if a.StatusCode != http.StatusMisdirectedRequest || e.Code != "read_only" || e.Retryable || !strings.Contains(e.Message, "pid 7 on store-1") ||
			len(e.Details["writer"]) != 1 {
			t.Errorf("%v: got %d %s, want 421 read_only that names the writer", request, a.StatusCode, a.body)
		}
	}
	if a := ask(t, "GET", srv.URL+"/v1/images/team/app:v1", ""); a.StatusCode != http.StatusOK {
		t.Errorf("GET of an image: got %d %s", a.StatusCode, a.body)
	}
	want := `{"status":"ready","journal":{"applied_entry":12,"behind_entries":3,"behind_seconds":1.5}}` + "\n"
	if a := ask(t, "GET", srv.URL+"/readyz", ""); string(a.body) != want {
		t.Errorf("readyz: got %s, want %s", a.body, want)
	}
}

func TestANodeThatIsBehindIsNotReady(t *testing.T) {
	srv, _ := apitest.New(t).Serve(t, func(c *api.Config) {
		c.Ready = func(context.Context) error { return errors.New("3 entries and 40 s behind the journal") }
	})
	a := ask(t, "GET", srv.URL+"/readyz", "")
	if a.StatusCode != http.StatusServiceUnavailable || !strings.Contains(string(a.body), "3 entries and 40 s behind") {
		t.Errorf("readyz: got %d %s", a.StatusCode, a.body)
	}
}
