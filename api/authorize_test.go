package api_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"quarry/api"
	"quarry/api/access"
	"quarry/api/apitest"
	"quarry/store/chunk"
)

// guarded is a server that asks for tokens, and a token of each kind.
type guarded struct {
	url   string
	file  *access.File
	token map[string]string
}

func newGuarded(t *testing.T, w *apitest.World, change func(*api.Config)) guarded {
	t.Helper()
	file := access.Open(filepath.Join(t.TempDir(), "tokens.json"), nil)
	g := guarded{file: file, token: map[string]string{"none": "", "wrong": "qry_000000000000_" + strings.Repeat("0", 64)}}
	for name, tok := range map[string]access.Token{
		"pull":  {Scopes: []access.Scope{access.Pull}},
		"team":  {Scopes: []access.Scope{access.Pull, access.Push}, Repos: []string{"team"}},
		"trace": {Scopes: []access.Scope{access.Trace}},
		"admin": {Scopes: []access.Scope{access.Admin}},
	} {
		_, secret, err := file.Create(t.Context(), tok)
		if err != nil {
			t.Fatal(err)
		}
		g.token[name] = secret.Reveal()
	}
	guard := access.New(access.Config{Tokens: file, Key: make([]byte, 32)})
	srv, _ := w.Serve(t, func(cfg *api.Config) {
		cfg.Authorize, cfg.Covered, cfg.Admin, cfg.Token = guard.Authorize, guard.Covered, guard.Admin, guard.ServeToken
		cfg.TokenName = guard.TokenName
		cfg.Convert = func(_ context.Context, r api.ConvertRequest, _ func(api.Progress)) (api.ConvertResult, error) {
			return api.ConvertResult{Name: r.Name, Source: chunk.Sum(nil)}, nil
		}
		if change != nil {
			change(cfg)
		}
	})
	g.url = srv.URL
	return g
}

func (g guarded) ask(t *testing.T, who, method, path, body string) answer {
	t.Helper()
	header := []string{"Content-Type", api.TypeJSON}
	if tok := g.token[who]; tok != "" {
		header = append(header, "Authorization", "Bearer "+tok)
	}
	return ask(t, method, g.url+path, body, header...)
}

// TestEveryRouteNeedsItsScope: a status that is neither 401 nor 403 is that of
// whoever got in.
func TestEveryRouteNeedsItsScope(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "team/x:1", 2, 1)
	w.Publish(t, "teamwork/y:1", 2, 2)
	g := newGuarded(t, w, nil)
	id := strings.TrimPrefix(w.ID(t, img).String(), "sha256:")
	digest := chunk.Sum(nil).String()
	const (
		in, no, none = 0, http.StatusForbidden, http.StatusUnauthorized
	)
	for _, tc := range []struct {
		method, path, body             string
		none, pull, team, trace, admin int
	}{
		{"GET", "/healthz", "", in, in, in, in, in},
		{"GET", "/readyz", "", in, in, in, in, in},
		{"GET", "/", "", none, in, in, no, in},
		{"GET", "/page.css", "", in, in, in, in, in},
		{"GET", "/v1/images", "", none, in, in, no, in},
		{"GET", "/v1/images/team/x:1", "", none, in, in, no, in},
		{"GET", "/v1/images/teamwork/y:1", "", none, in, no, no, in},
		{"GET", "/v1/images/absent/z:1", "", none, in, no, no, in},
		{"GET", "/v1/start/team/x:1", "", none, in, in, no, in},
		{"GET", "/v1/start/teamwork/y:1", "", none, in, no, no, in},
		{"DELETE", "/v1/images/teamwork/y:2", "", none, no, no, no, in},
		{"DELETE", "/v1/images/team/x:2", "", none, no, in, no, in},
		{"POST", "/v1/images/" + id + "/trace", "", none, no, no, in, in},
		{"GET", "/v1/signatures/team/x:1", "", none, in, in, no, in},
		{"GET", "/v1/signatures/teamwork/y:1", "", none, in, no, no, in},
		{"POST", "/v1/signatures/team/x@" + digest, "", none, no, in, no, in},
		{"POST", "/v1/signatures/teamwork/y@" + digest, "", none, no, no, no, in},
		{"GET", "/v1/bootstraps/" + digest, "", none, in, in, no, in},
		{"GET", "/v1/configs/" + digest, "", none, in, in, no, in},
		{"GET", "/v1/chunks/" + digest, "", none, in, in, no, in},
		{"POST", "/v1/chunks:batchGet", `{"digests":["` + digest + `"]}`, none, in, in, no, in},
		{"GET", "/v1/blobs/" + strings.Repeat("0", 64), "", none, in, in, no, in},
		{"POST", "/v1/convert", `{"source":"registry://a/b","name":"c"}`, none, no, no, no, in},
		{"POST", "/v1/admin/check", "", none, no, no, no, in},
		{"POST", "/v1/admin/rebuild", "", none, no, no, no, in},
		{"GET", "/v1/admin/leases", "", none, no, no, no, in},
		{"PUT", "/v1/leases/a", `{"ttl_seconds":1,"image":""}`, none, in, in, no, in},
		{"PUT", "/v1/admin/leases/a", `{"ttl_seconds":1,"image":""}`, none, no, no, no, in},
		{"GET", "/v1/admin/leases/a", "", none, no, no, no, in},
		{"DELETE", "/v1/admin/leases/a", "", none, no, no, no, in},
		{"PUT", "/v1/leases/a", `{"ttl_seconds":1,"image":""}`, none, in, in, no, in},
		{"DELETE", "/v1/leases/b", "", none, in, in, no, in},
		{"POST", "/v1/admin/gc", `{"dry_run":true}`, none, no, no, no, in},
		{"PUT", "/v1/admin/pins/a", "", none, no, no, no, in},
		{"GET", "/v1/jobs", "", none, in, in, no, in},
		{"GET", "/v1/jobs/events", "", none, in, in, no, in},
		{"GET", "/v1/stats", "", none, no, no, no, in},
		{"GET", "/metrics", "", none, no, no, no, in},
	} {
		for who, want := range map[string]int{"none": tc.none, "wrong": tc.none, "pull": tc.pull, "team": tc.team, "trace": tc.trace, "admin": tc.admin} {
			a := g.ask(t, who, tc.method, tc.path, tc.body)
			got := 0
			if a.StatusCode == none || a.StatusCode == no {
				got = a.StatusCode
			}
			if got != want {
				t.Errorf("%s %s with token %s: %d %s, want %d", tc.method, tc.path, who, a.StatusCode, a.body, want)
			}
			challenged := len(a.Header.Values("WWW-Authenticate"))
			if (got == none) != (challenged == 2) {
				t.Errorf("%s %s with token %s: %d with %d challenges", tc.method, tc.path, who, a.StatusCode, challenged)
			}
		}
	}
}

func TestARefusalSaysWhatIsLacking(t *testing.T) {
	w := apitest.New(t)
	w.Publish(t, "other/x:1", 1, 1)
	g := newGuarded(t, w, nil)
	e := wantError(t, g.ask(t, "team", "GET", "/v1/images/other/x:1", ""), http.StatusForbidden, "forbidden")
	if e.Retryable || e.Blame != api.BlameUser || len(e.Details["need"]) != 1 || e.Details["need"][0] != "pull" || e.Details["repository"][0] != "other/x" {
		t.Errorf("got %+v", e)
	}
	e = wantError(t, g.ask(t, "none", "GET", "/v1/images/other/x:1", ""), http.StatusUnauthorized, "unauthorized")
	if e.Retryable || !strings.Contains(e.Message, "--token-file") {
		t.Errorf("got %+v", e)
	}
	wantError(t, g.ask(t, "admin", "POST", "/v1/convert", `{"source":"oci:/etc","name":"c"}`), http.StatusBadRequest, "bad_request")
}

func TestAListHasWhatTheTokenCovers(t *testing.T) {
	w := apitest.New(t)
	for i, name := range []string{"a:1", "team:1", "team/x:1", "team/y:1", "teamwork:1"} {
		w.Publish(t, name, 1, uint64(i))
	}
	g := newGuarded(t, w, nil)
	for who, want := range map[string]int{"team": 3, "pull": 5, "admin": 5} {
		var page api.NamesPage
		if err := json.Unmarshal(g.ask(t, who, "GET", "/v1/images", "").body, &page); err != nil || len(page.Names) != want {
			t.Errorf("%s sees %v, %v; want %d", who, page.Names, err, want)
		}
	}
	var first, second api.NamesPage
	err := json.Unmarshal(g.ask(t, "team", "GET", "/v1/images?limit=2", "").body, &first)
	if err != nil || len(first.Names) != 2 || first.Next == "" {
		t.Fatalf("first page %+v, %v", first, err)
	}
	if err := json.Unmarshal(g.ask(t, "team", "GET", "/v1/images?after="+first.Next, "").body, &second); err != nil || len(second.Names) != 1 || second.Next != "" {
		t.Errorf("second page %+v, %v", second, err)
	}
}

func TestMetricsCanBeOpen(t *testing.T) {
	g := newGuarded(t, apitest.New(t), func(cfg *api.Config) { cfg.MetricsOpen = true })
	if a := g.ask(t, "none", "GET", "/metrics", ""); a.StatusCode != http.StatusOK {
		t.Errorf("metrics: %d", a.StatusCode)
	}
	wantError(t, g.ask(t, "none", "GET", "/v1/stats", ""), http.StatusUnauthorized, "unauthorized")
}

func TestTheTokenFlowIsServed(t *testing.T) {
	g := newGuarded(t, apitest.New(t), nil)
	wantError(t, g.ask(t, "none", "GET", "/v2/token?service=quarry&scope=a&scope=b", ""), http.StatusUnauthorized, "unauthorized")
	a := g.ask(t, "team", "GET", "/v2/token?service=quarry&scope=repository:team/x:pull&scope=repository:team/y:pull", "")
	var doc struct{ Token string }
	if err := json.Unmarshal(a.body, &doc); err != nil || a.StatusCode != http.StatusOK || doc.Token == "" {
		t.Fatalf("%d %s", a.StatusCode, a.body)
	}
	if b := ask(t, "GET", g.url+"/v1/images", "", "Authorization", "Bearer "+doc.Token); b.StatusCode != http.StatusOK {
		t.Errorf("with the bearer: %d %s", b.StatusCode, b.body)
	}
}

func TestThePageIsToldWhatItsViewerMaySee(t *testing.T) {
	g := newGuarded(t, apitest.New(t), func(cfg *api.Config) {
		cfg.Page = func(w http.ResponseWriter, _ *http.Request, sees func(string) bool, admin bool) error {
			_, err := fmt.Fprint(w, sees("team/x"), sees("teamwork"), admin)
			return err
		}
	})
	for who, want := range map[string]string{"team": "true false false", "pull": "true true false", "admin": "true true true"} {
		if a := g.ask(t, who, "GET", "/", ""); string(a.body) != want {
			t.Errorf("%s: %s, want %s", who, a.body, want)
		}
	}
}

// TestAnotherSitesPageChangesNothing: a browser that logged in shows its token for
// whatever any page has it send.
func TestAnotherSitesPageChangesNothing(t *testing.T) {
	g := newGuarded(t, apitest.New(t), nil)
	for _, header := range [][]string{{"Sec-Fetch-Site", "cross-site"}, {"Origin", "https://evil.example"}} {
		header = append(header, "Authorization", "Bearer "+g.token["admin"])
		a := ask(t, "POST", g.url+"/v1/convert", `{"source":"registry://a/b","name":"c"}`, header...)
		wantError(t, a, http.StatusForbidden, "cross_site")
	}
}
