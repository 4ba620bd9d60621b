package access_test

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"quarry/api/access"
)

// world is a guard with a clock of its own.
type world struct {
	*access.Guard
	file *access.File
	now  atomic.Pointer[time.Time]
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{}
	start := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	w.now.Store(&start)
	w.file = access.Open(filepath.Join(t.TempDir(), "keys", "tokens.json"), w.time)
	w.Guard = access.New(access.Config{Tokens: w.file, Key: []byte("0123456789abcdef0123456789abcdef"), Now: w.time})
	return w
}

func (w *world) time() time.Time { return *w.now.Load() }

func (w *world) pass(d time.Duration) {
	later := w.time().Add(d)
	w.now.Store(&later)
}

// create makes a token; scopes "pull,push", repos "a b", life 0 for ever.
func (w *world) create(t *testing.T, scopes, repos string, life time.Duration) (id, text string) {
	t.Helper()
	list, err := access.ParseScopes(scopes)
	if err != nil {
		t.Fatal(err)
	}
	tok := access.Token{Scopes: list, Repos: strings.Fields(repos)}
	if life != 0 {
		end := w.time().Add(life)
		tok.Expires = &end
	}
	tok, secret, err := w.file.Create(t.Context(), tok)
	if err != nil {
		t.Fatal(err)
	}
	w.pass(time.Second) // the guard looks at the file again
	return tok.ID, secret.Reveal()
}

func request(authorization string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "http://store.test:7070/v2/", nil)
	if authorization != "" {
		r.Header.Set("Authorization", authorization)
	}
	return r
}

func basic(text string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte("anybody:"+text))
}

func TestWhatATokenAllows(t *testing.T) {
	w := newWorld(t)
	_, reader := w.create(t, "pull", "team other/one", 0)
	_, pusher := w.create(t, "push,pull", "team", 0)
	_, everywhere := w.create(t, "pull,trace", "", 0)
	_, admin := w.create(t, "admin", "", 0)
	for _, tc := range []struct {
		token string
		need  access.Scope
		repo  string
		want  error
	}{
		{reader, access.Pull, "team", nil},
		{reader, access.Pull, "team/x", nil},
		{reader, access.Pull, "team/x/y", nil},
		{reader, access.Pull, "other/one", nil},
		{reader, access.Pull, "teamwork", access.ErrForbidden},
		{reader, access.Pull, "other", access.ErrForbidden},
		{reader, access.Pull, "other/onetwo", access.ErrForbidden},
		{reader, access.Pull, "x/team", access.ErrForbidden},
		{reader, access.Pull, "", nil},
		{reader, access.Any, "", nil},
		{reader, access.Push, "team", access.ErrForbidden},
		{reader, access.Trace, "", access.ErrForbidden},
		{reader, access.Admin, "", access.ErrForbidden},
		{pusher, access.Push, "team/x", nil},
		{pusher, access.Pull, "team/x", nil},
		{pusher, access.Push, "elsewhere", access.ErrForbidden},
		{everywhere, access.Pull, "what/ever", nil},
		{everywhere, access.Trace, "", nil},
		{everywhere, access.Push, "what/ever", access.ErrForbidden},
		{admin, access.Push, "what/ever", nil},
		{admin, access.Trace, "", nil},
		{admin, access.Admin, "", nil},
	} {
		for _, header := range []string{"Bearer " + tc.token, "bearer " + tc.token, basic(tc.token)} {
			err := w.Authorize(request(header), tc.need, tc.repo)
			if !errors.Is(err, tc.want) {
				t.Errorf("%q in %q: %v, want %v", tc.need, tc.repo, err, tc.want)
			}
			if err != nil && strings.Contains(err.Error(), tc.token[20:]) {
				t.Errorf("the error shows the token: %v", err)
			}
		}
	}
	seen, err := w.Covered(request("Bearer "+reader), access.Pull)
	if err != nil || !seen("team/x") || seen("teamwork") {
		t.Errorf("list of a limited token: %v, team/x %v, teamwork %v", err, seen("team/x"), seen("teamwork"))
	}
}

func TestWhatIsNoTokenIsRefused(t *testing.T) {
	w := newWorld(t)
	id, good := w.create(t, "admin", "", time.Hour)
	other := good[:len(good)-1] + map[bool]string{true: "0", false: "1"}[good[len(good)-1] != '0']
	for name, header := range map[string]string{
		"none": "", "another last digit": "Bearer " + other, "a shorter one": "Bearer " + good[:len(good)-1], "a longer one": "Bearer " + good + "0",
		"upper case": "Bearer " + strings.ToUpper(good), "the id alone": "Bearer qry_" + id + "_", "another scheme": "Digest " + good,
		"no scheme": good, "empty basic": "Basic ", "bad base64": "Basic ====", "user without password": "Basic " + base64.StdEncoding.EncodeToString([]byte(good)),
		"a bearer that is none": "Bearer qrb_", "half a bearer": "Bearer qrb_e30.", "a long one": "Bearer " + strings.Repeat("x", 1<<20),
	} {
		err := w.Authorize(request(header), access.Pull, "")
		if ref := new(access.Refusal); !errors.As(err, &ref) || ref.Status() != http.StatusUnauthorized || len(ref.Challenges) != 2 {
			t.Errorf("%s: %v", name, err)
		}
	}
	twice := request("Bearer " + good)
	twice.Header.Add("Authorization", "Bearer "+good)
	if err := w.Authorize(twice, access.Pull, ""); !errors.Is(err, access.ErrUnauthenticated) {
		t.Errorf("two headers: %v", err)
	}
	if err := w.Authorize(request("Bearer "+good), access.Pull, ""); err != nil {
		t.Errorf("the right one: %v", err)
	}
	w.pass(time.Hour)
	if err := w.Authorize(request("Bearer "+good), access.Pull, ""); !errors.Is(err, access.ErrUnauthenticated) || !strings.Contains(err.Error(), "expired") {
		t.Errorf("an expired one: %v", err)
	}
}

func TestARemovedTokenEndsAtOnceWithItsBearers(t *testing.T) {
	w := newWorld(t)
	id, text := w.create(t, "pull,push", "team", 0)
	bearer := w.exchange(t, text, "repository:team/x:pull,push")
	for _, header := range []string{"Bearer " + text, "Bearer " + bearer} {
		if err := w.Authorize(request(header), access.Push, "team/x"); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.file.Remove(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	w.pass(time.Second)
	for _, header := range []string{"Bearer " + text, "Bearer " + bearer} {
		if err := w.Authorize(request(header), access.Push, "team/x"); !errors.Is(err, access.ErrUnauthenticated) {
			t.Errorf("after its removal: %v", err)
		}
	}
	if err := w.file.Remove(t.Context(), id); !errors.Is(err, access.ErrUnknownToken) {
		t.Errorf("removed twice: %v", err)
	}
}

// exchange asks the token service with basic credentials.
func (w *world) exchange(t *testing.T, text string, scopes ...string) string {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, "http://store.test/v2/token?service=quarry&"+url.Values{"scope": scopes}.Encode(), nil)
	r.Header.Set("Authorization", basic(text))
	return w.served(t, r)
}

func (w *world) served(t *testing.T, r *http.Request) string {
	t.Helper()
	rec := httptest.NewRecorder()
	if err := w.ServeToken(rec, r); err != nil {
		t.Fatal(err)
	}
	var doc struct {
		Token       string `json:"token"`
		AccessToken string `json:"access_token"`
		ExpiresIn   int    `json:"expires_in"`
	}
	if err := json.Unmarshal(rec.Body.Bytes(), &doc); err != nil || doc.Token == "" || doc.Token != doc.AccessToken || doc.ExpiresIn < 1 || doc.ExpiresIn > 300 {
		t.Fatalf("answer %s: %v", rec.Body, err)
	}
	return doc.Token
}

func TestABearerCarriesWhatWasGranted(t *testing.T) {
	w := newWorld(t)
	_, text := w.create(t, "pull,push", "team", 0)
	_, reader := w.create(t, "pull", "", 0)
	for _, tc := range []struct {
		name, bearer string
		need         access.Scope
		repo         string
		want         error
	}{
		{"as asked", w.exchange(t, text, "repository:team/x:pull,push"), access.Push, "team/x", nil},
		{"another repository that the token covers", w.exchange(t, text, "repository:team/x:pull"), access.Pull, "team/y", access.ErrUnauthenticated},
		{"more than was asked", w.exchange(t, text, "repository:team/x:pull"), access.Push, "team/x", access.ErrUnauthenticated},
		{"more than the token has", w.exchange(t, reader, "repository:team/x:pull,push"), access.Push, "team/x", access.ErrForbidden},
		{"a repository that it does not cover", w.exchange(t, text, "repository:else:pull"), access.Pull, "else", access.ErrForbidden},
		{"no scope, for docker login", w.exchange(t, text), access.Any, "", nil},
		{"no scope, and reading", w.exchange(t, text), access.Pull, "", access.ErrUnauthenticated},
		{"the first of two", w.exchange(t, text, "repository:team/x:pull", "repository:team/y:pull,push"), access.Pull, "team/x", nil},
		{"the second of two", w.exchange(t, text, "repository:team/x:pull", "repository:team/y:pull,push"), access.Push, "team/y", nil},
		{"two in one", w.exchange(t, text, "repository:team/x:pull repository:team/y:push"), access.Push, "team/y", nil},
		{"all there is", w.exchange(t, text, "repository:team/x:*"), access.Push, "team/x", nil},
		{"deleting", w.exchange(t, text, "repository:team/x:delete"), access.Push, "team/x", nil},
		{"the list", w.exchange(t, text, "registry:catalog:*"), access.Pull, "", nil},
		{"nonsense is left out", w.exchange(t, text, "x", "repository:", "repository:UP:pull", "repository:team/x:pull"), access.Pull, "team/x", nil},
	} {
		if err := w.Authorize(request("Bearer "+tc.bearer), tc.need, tc.repo); !errors.Is(err, tc.want) {
			t.Errorf("%s: %v, want %v", tc.name, err, tc.want)
		}
	}
	if err := w.Authorize(request("Bearer "+w.exchange(t, text, "repository:team/x:*")), access.Admin, ""); !errors.Is(err, access.ErrForbidden) {
		t.Errorf("a bearer is no admin: %v", err)
	}
	bearer := w.exchange(t, text, "repository:team/x:pull")
	first, second, _ := strings.Cut(bearer, ".")
	for name, bad := range map[string]string{
		"another document": first[:len(first)-2] + "AA." + second, "another MAC": first + "." + strings.Repeat("A", len(second)), "none": first,
	} {
		if err := w.Authorize(request("Bearer "+bad), access.Pull, "team/x"); !errors.Is(err, access.ErrUnauthenticated) {
			t.Errorf("%s: %v", name, err)
		}
	}
	w.pass(5 * time.Minute)
	if err := w.Authorize(request("Bearer "+bearer), access.Pull, "team/x"); !errors.Is(err, access.ErrUnauthenticated) {
		t.Errorf("after five minutes: %v", err)
	}
}

func TestTheFormsOfTheTokenFlow(t *testing.T) {
	w := newWorld(t)
	_, text := w.create(t, "pull", "", 2*time.Minute)
	post := func(form url.Values) *http.Request {
		r := httptest.NewRequest(http.MethodPost, "http://store.test/v2/token", strings.NewReader(form.Encode()))
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		return r
	}
	for name, form := range map[string]url.Values{
		"password": {"grant_type": {"password"}, "username": {"u"}, "password": {text}, "scope": {"repository:a:pull"}},
		"refresh":  {"grant_type": {"refresh_token"}, "refresh_token": {text}, "scope": {"repository:a:pull"}},
	} {
		if err := w.Authorize(request("Bearer "+w.served(t, post(form))), access.Pull, "a"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	refusals := map[string]*http.Request{
		"a wrong password": post(url.Values{"grant_type": {"password"}, "password": {text[:len(text)-1]}}),
		"nothing":          httptest.NewRequest(http.MethodGet, "http://store.test/v2/token", nil),
	}
	again := httptest.NewRequest(http.MethodGet, "http://store.test/v2/token", nil)
	again.Header.Set("Authorization", "Bearer "+w.exchange(t, text))
	refusals["a bearer"] = again
	for name, r := range refusals {
		err := w.ServeToken(httptest.NewRecorder(), r)
		if ref := new(access.Refusal); !errors.As(err, &ref) || ref.Status() != http.StatusUnauthorized || len(ref.Challenges) != 1 || !strings.HasPrefix(ref.Challenges[0], "Basic ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, r := range map[string]*http.Request{
		"another grant": post(url.Values{"grant_type": {"magic"}}),
		"a long body":   post(url.Values{"grant_type": {"password"}, "password": {strings.Repeat("x", 1<<20)}}),
		"a long query":  httptest.NewRequest(http.MethodGet, "http://store.test/v2/token?scope="+strings.Repeat("x", 1<<20), nil),
	} {
		if err := w.ServeToken(httptest.NewRecorder(), r); !errors.Is(err, access.ErrForm) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestChallengesSayWhereAndWhatFor(t *testing.T) {
	w := newWorld(t)
	w.create(t, "pull", "", 0)
	r := request("")
	err := w.Authorize(r, access.Push, "team/x")
	want := []string{`Bearer realm="http://store.test:7070/v2/token",service="quarry",scope="repository:team/x:pull,push"`, `Basic realm="quarry"`}
	if ref := new(access.Refusal); !errors.As(err, &ref) || fmt.Sprint(ref.Challenges) != fmt.Sprint(want) {
		t.Errorf("got %v\nwant %q", err, want)
	}
	r.Header.Set("X-Forwarded-Proto", "https")
	if ref := new(access.Refusal); !errors.As(w.Authorize(r, access.Any, ""), &ref) || !strings.HasPrefix(ref.Challenges[0], `Bearer realm="https://store.test:7070/v2/token"`) {
		t.Errorf("behind a proxy: %q", ref.Challenges)
	}
	r.Host = "a\",evil=\"b"
	if ref := new(access.Refusal); !errors.As(w.Authorize(r, access.Any, ""), &ref) || len(ref.Challenges) != 1 {
		t.Errorf("a host that is none stands in %q", ref.Challenges)
	}
}

func TestTheFileIsReadAgainAndADamagedOneLetsNobodyIn(t *testing.T) {
	w := newWorld(t)
	if err := w.file.Ready(); !errors.Is(err, access.ErrNoTokens) {
		t.Errorf("without a file: %v", err)
	}
	_, text := w.create(t, "pull", "", 0)
	if err := w.file.Ready(); err != nil {
		t.Error(err)
	}
	good, err := os.ReadFile(w.file.Path())
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(good), text[17:]) {
		t.Error("the file has the secret")
	}
	if info, err := os.Stat(w.file.Path()); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file's mode: %v, %v", info.Mode(), err)
	}
	for name, bad := range map[string]string{
		"cut off": string(good[:len(good)-1]), "more": string(good) + " ", "another version": strings.Replace(string(good), `"version":1`, `"version":2`, 1),
		"an unknown scope": strings.Replace(string(good), `["pull"]`, `["root"]`, 1), "empty": "",
		"scopes and repositories that cannot be": strings.Replace(string(good), `["pull"]`, `["admin"],"repos":["a"]`, 1),
	} {
		if err := os.WriteFile(w.file.Path(), []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		w.pass(time.Second)
		if err := w.Authorize(request("Bearer "+text), access.Pull, ""); !errors.Is(err, access.ErrUnavailable) {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, err := w.file.Create(t.Context(), access.Token{Scopes: []access.Scope{access.Pull}}); !errors.Is(err, access.ErrMalformed) {
			t.Errorf("%s: a new token beside it: %v", name, err)
		}
	}
	if err := os.WriteFile(w.file.Path(), good, 0o600); err != nil {
		t.Fatal(err)
	}
	w.pass(time.Second)
	if err := w.Authorize(request("Bearer "+text), access.Pull, ""); err != nil {
		t.Errorf("after it was put back: %v", err)
	}
}

func TestTokensMadeAtOnceAreAllKept(t *testing.T) {
	w := newWorld(t)
	const n = 16
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			if _, _, err := access.Open(w.file.Path(), nil).Create(t.Context(), access.Token{Scopes: []access.Scope{access.Pull}}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if list, err := w.file.List(); err != nil || len(list) != n {
		t.Errorf("%d tokens, %v; want %d", len(list), err, n)
	}
}

func TestSecretsPrintAsNothing(t *testing.T) {
	w := newWorld(t)
	_, secret, err := w.file.Create(t.Context(), access.Token{Scopes: []access.Scope{access.Pull}})
	if err != nil {
		t.Fatal(err)
	}
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q"} {
		if text := fmt.Sprintf(verb, struct {
			Secret access.Secret
			hidden access.Secret
		}{secret, secret}); strings.Contains(text, secret.Reveal()) || !strings.Contains(text, "redacted") {
			t.Errorf("%s prints %s", verb, text)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte(`{"version":1,"tokens":[]}`))
	f.Add([]byte(`{"version":1,"tokens":[{"id":"0123456789ab","sha256":"` + strings.Repeat("0", 64) + `","scopes":["pull","push"],"repos":["a"],"created":"2026-05-01T12:00:00Z"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		tokens, err := access.Decode(b)
		if err != nil && !errors.Is(err, access.ErrMalformed) {
			t.Fatalf("an error of another kind: %v", err)
		}
		if err == nil && len(tokens) > access.MaxTokens {
			t.Fatalf("%d tokens", len(tokens))
		}
	})
}

func FuzzAuthorization(f *testing.F) {
	dir := f.TempDir()
	file := access.Open(filepath.Join(dir, "tokens.json"), nil)
	_, secret, err := file.Create(f.Context(), access.Token{Scopes: []access.Scope{access.Admin}})
	if err != nil {
		f.Fatal(err)
	}
	g := access.New(access.Config{Tokens: file, Key: make([]byte, 32)})
	for _, seed := range []string{"", "Bearer qrb_e30.e30", "Basic dTpw", "Bearer " + secret.Reveal()[:70]} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, header string) {
		r := request("")
		r.Header["Authorization"] = []string{header}
		if err := g.Authorize(r, access.Pull, "a"); err == nil && !strings.Contains(header, secret.Reveal()) && !strings.HasPrefix(strings.ToLower(header), "basic ") {
			t.Fatalf("%q gets in", header)
		}
	})
}
