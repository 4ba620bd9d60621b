package oci_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	"quarry/converter/layer"
	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/chunk"
	"quarry/store/image"
)

// server is a registry in this process with faults before it.
type server struct {
	*httptest.Server
	host string

	mu     sync.Mutex // guards the fields below
	fault  func(w http.ResponseWriter, r *http.Request) (handled bool)
	seen   []string // METHOD PATH RANGE of every request
	auths  []string // their Authorization headers
	tokens map[string]bool
	issued int
	auth   string // "", "basic" or "bearer"
}

const (
	theUser = "robot"
	thePass = "s3cret-pass"
)

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{tokens: map[string]bool{}}
	real := ggcr.New(ggcr.Logger(slog.NewLogLogger(slog.DiscardHandler, 0)))
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.seen = append(s.seen, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+r.Header.Get("Range")))
		s.auths = append(s.auths, r.Header.Get("Authorization"))
		fault := s.fault
		token := strings.HasSuffix(r.URL.Path, "/token")
		ok := token || s.authorized(w, r)
		s.mu.Unlock()
		if !ok || fault != nil && fault(w, r) {
			return
		}
		if token {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.authorized(w, r)
			return
		}
		real.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	s.host = strings.TrimPrefix(s.URL, "http://")
	return s
}

// authorized answers for the token service and for those who may not enter.
func (s *server) authorized(w http.ResponseWriter, r *http.Request) bool {
	user, pass, basic := r.BasicAuth()
	known := basic && user == theUser && pass == thePass
	if r.URL.Path == "/token" {
		if r.Method == http.MethodPost {
			known = r.FormValue("grant_type") == "refresh_token" && r.FormValue("refresh_token") == thePass
		}
		if !known || !strings.Contains(r.FormValue("scope"), "repository:p/x:pull") {
			w.WriteHeader(http.StatusUnauthorized)
			return false
		}
		s.issued++
		token := fmt.Sprintf("token-%d", s.issued)
		s.tokens[token] = true
		json.NewEncoder(w).Encode(map[string]string{"token": token})
		return false
	}
	switch s.auth {
	case "basic":
		if !known {
			w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
			w.WriteHeader(http.StatusUnauthorized)
		}
		return known
	case "bearer":
		token, ok := strings.CutPrefix(r.Header.Get("Authorization"), "Bearer ")
		if !ok || !s.tokens[token] {
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="%s/token",service="x",scope="repository:p/x:pull"`, s.URL))
			w.WriteHeader(http.StatusUnauthorized)
			return false
		}
	}
	return true
}

// authorize says how the server knows who asks.
func (s *server) authorize(how string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.auth = how
}

func (s *server) set(f func(w http.ResponseWriter, r *http.Request) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// count counts the requests that contain all words.
func (s *server) count(words ...string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
next:
	for _, line := range s.seen {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue next
			}
		}
		n++
	}
	return n
}

// push uploads every blob of a layout and gives its documents tags.
func (s *server) push(t *testing.T, l *testimage.Layout, tags map[string]testimage.Descriptor) {
	t.Helper()
	files, err := os.ReadDir(l.Dir + "/blobs/sha256")
	if err != nil {
		t.Fatal(err)
	}
	// Images before indexes: a registry refuses one whose images it lacks.
	slices.SortStableFunc(files, func(a, b os.DirEntry) int { return isIndex(t, l, a.Name()) - isIndex(t, l, b.Name()) })
	for _, f := range files {
		digest := "sha256:" + f.Name()
		p, err := os.ReadFile(l.BlobPath(digest))
		if err != nil {
			t.Fatal(err)
		}
		s.upload(t, http.MethodPost, "blobs/uploads/?digest="+digest, "application/octet-stream", p)
		var doc struct{ MediaType string }
		if json.Unmarshal(p, &doc) == nil && doc.MediaType != "" {
			s.upload(t, http.MethodPut, "manifests/"+digest, doc.MediaType, p)
		}
	}
	for tag, d := range tags {
		p, err := os.ReadFile(l.BlobPath(d.Digest))
		if err != nil {
			t.Fatal(err)
		}
		s.upload(t, http.MethodPut, "manifests/"+tag, d.MediaType, p)
	}
}

func isIndex(t *testing.T, l *testimage.Layout, hex string) int {
	p, err := os.ReadFile(l.BlobPath("sha256:" + hex))
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Count(p[:min(len(p), 100)], []byte(testimage.MediaIndex))
}

func (s *server) upload(t *testing.T, method, path, mediaType string, p []byte) {
	t.Helper()
	req, err := http.NewRequest(method, s.URL+"/v2/p/x/"+path, bytes.NewReader(p))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", mediaType)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusCreated {
		b, _ := io.ReadAll(resp.Body)
		t.Fatalf("%s %s: %s: %s", method, path, resp.Status, b)
	}
}

// ref is a source in the server.
func (s *server) ref(suffix string) string { return "registry://" + s.host + "/p/x" + suffix }

// quick is a configuration that does not wait long before it tries again.
func quick() oci.Config { return oci.Config{RetryWait: time.Millisecond} }

func withPassword(pass string) oci.Config {
	cfg := quick()
	cfg.Credentials = oci.Credentials{Username: theUser, Password: oci.Secret(pass)}
	return cfg
}

// bigLayer has content that does not compress, of a few connections' buffers.
func bigLayer() testimage.Layer {
	b := make([]byte, 6<<20)
	for i, d := 0, chunk.Sum(nil); i < len(b); i += len(d) {
		copy(b[i:], d[:])
		d = chunk.Sum(d[:])
	}
	return testimage.Layer{Entries: []testimage.Entry{testimage.File("big", string(b))}, Codec: "none"}
}

// standard is a server with one image of two layers, tagged v1.
func standard(t *testing.T) (*server, *testimage.Layout, testimage.Descriptor) {
	t.Helper()
	s, l := newServer(t), testimage.New(t)
	d := l.Image(testimage.Image{Layers: []testimage.Layer{layerA, bigLayer()}})
	s.push(t, l, map[string]testimage.Descriptor{"v1": d})
	return s, l, d
}

// readAll opens a source and reads and verifies its layers as conversion does.
func readAll(ctx context.Context, src string, cfg oci.Config) error {
	im, err := oci.Open(ctx, src, cfg)
	if err != nil {
		return err
	}
	defer im.Close()
	for i, l := range im.Layers {
		r, err := im.LayerReader(ctx, i)
		if err != nil {
			return err
		}
		_, err = layer.Read(ctx, r, layer.Descriptor{Digest: l.Digest, Size: l.Size}, hashed{}, layer.Config{ChunkSize: chunk.MinSize})
		r.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

func wantErr(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("no error, want one with %q", words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
}

func TestAnImageIsReadFromARegistry(t *testing.T) {
	s, l, d := standard(t)
	l.Tag("v1", d)
	want := open(t, l.Source(":v1"), image.Platform{})
	for _, suffix := range []string{":v1", "@" + d.Digest, ":anything@" + d.Digest} {
		im := open(t, s.ref(suffix), image.Platform{})
		if im.Source != want.Source || im.ConfigDigest != want.ConfigDigest || im.Platform != amd64 {
			t.Errorf("%s: source %s, config %s", suffix, im.Source, im.ConfigDigest)
		}
		if err := readAll(t.Context(), s.ref(suffix), quick()); err != nil {
			t.Error(err)
		}
	}
}

func TestAPlatformIsChosenFromARegistrysIndex(t *testing.T) {
	s, l := newServer(t), testimage.New(t)
	amd, arm := marked(l, "linux/amd64", "x"), marked(l, "linux/arm64/v8", "y")
	index := l.Index(attestation(l, amd), arm, amd)
	s.push(t, l, map[string]testimage.Descriptor{"latest": index})
	for p, want := range map[string]testimage.Descriptor{"linux/amd64": amd, "linux/arm64": arm} {
		im := open(t, s.ref(""), parse(t, p))
		if im.Source.String() != index.Digest || im.ConfigDigest.String() != configOf(t, l, want) {
			t.Errorf("%s: source %s, config %s", p, im.Source, im.ConfigDigest)
		}
	}
	openError(t, s.ref(""), parse(t, "linux/s390x"), "linux/amd64, linux/arm64")
}

// A source may be printed, logged and kept in a failure record: one with a
// password is refused without it, before any host is asked.
func TestASourceWithAPasswordIsRefusedAndNotRepeated(t *testing.T) {
	for _, src := range []string{
		"registry://robot:s3cret@127.0.0.1:1/p/x", "registry://robot:s3cret@127.0.0.1:1/p/x:1", "registry://s3cret@registry.example.com/x",
		"registry://robot:s3cret@127.0.0.1:1/p/x@sha256:" + strings.Repeat("0", 64), "registry://robot:pa/s3cret@127.0.0.1:1/p/x",
		"registry://robot:p@s3cret@127.0.0.1:1/x", "registry:///robot:s3cret@127.0.0.1:1/p/x", "registry:robot:s3cret@127.0.0.1/x",
		"docker://robot:s3cret@127.0.0.1:1/p/x", "https://robot:s3cret@127.0.0.1:1/p/x", "oci://robot:s3cret@127.0.0.1:1/p/x", "robot:s3cret@127.0.0.1/p/x",
	} {
		_, err := oci.Open(t.Context(), src, quick())
		wantErr(t, err, "user or password", "docker login")
		if err := fmt.Sprint(err, oci.CheckSource(src)); strings.Contains(err, "s3cret") || strings.Contains(err, "robot") {
			t.Errorf("error %q shows it", err)
		}
	}
	for _, src := range []string{
		"registry://127.0.0.1:1/p/x", "registry://127.0.0.1:1/p/x:1@sha256:" + strings.Repeat("0", 64), "registry://127.0.0.1:1/p/x@sha1",
		"oci:/a@b/c:1", "oci:/a@b/c@d/e", "oci-archive:a@b.tar", "docker-archive:a.tar:host/robot@x", "oci:x@sha256:" + strings.Repeat("0", 64), "oci://d/x@sha256:0",
	} {
		if err := oci.CheckSource(src); err != nil {
			t.Errorf("%s: %v", src, err)
		}
	}
	for _, src := range []string{"ftp:x", "", "oci", "oci:", "/x", "x", "registry:x", "registry:"} {
		wantErr(t, oci.CheckSource(src), "want one of oci:DIR")
	}
}

func TestReferencesOfARegistryAreChecked(t *testing.T) {
	for src, words := range map[string][]string{
		"registry:debian":                 {"registry://HOST"},
		"registry://debian":               {"registry://HOST"},
		"registry:///p/x":                 {"is no host"},
		"registry://debian/x:1":           {"is no host", "registry://docker.io/debian/x:1"},
		"registry://127.0.0.1:1/P/x":      {"not a reference"},
		"registry://127.0.0.1:1/p/x@sha1": {"not a reference"},
		"registry://127.0.0.1:1/p/x@sha256:" + strings.Repeat("0", 63): {"not a reference"},
	} {
		openError(t, src, image.Platform{}, append(words, src)...)
	}
}

func TestCredentialsAreShownAsTheRegistryWants(t *testing.T) {
	s, _, _ := standard(t)
	token := quick()
	token.Credentials = oci.Credentials{Username: "<token>", IdentityToken: thePass}
	bearer := quick()
	bearer.Credentials = oci.Credentials{RegistryToken: "ready-made"}
	s.tokens["ready-made"] = true
	tests := []struct {
		auth string
		cfg  oci.Config
		err  []string
	}{
		{"basic", withPassword(thePass), nil},
		{"basic", withPassword("wr0ng-pass"), []string{s.host, "refuses the credentials"}},
		{"basic", quick(), []string{s.host, "wants credentials", "docker login"}},
		{"bearer", withPassword(thePass), nil},
		{"bearer", token, nil},
		{"bearer", bearer, nil},
		{"bearer", withPassword("wr0ng-pass"), []string{"refuses the credentials"}},
		{"bearer", quick(), []string{"wants credentials"}},
	}
	for _, tt := range tests {
		s.authorize(tt.auth)
		err := readAll(t.Context(), s.ref(":v1"), tt.cfg)
		if tt.err == nil && err != nil {
			t.Errorf("%s: %v", tt.auth, err)
		}
		if tt.err != nil {
			wantErr(t, err, tt.err...)
			if strings.Contains(err.Error(), thePass) || strings.Contains(err.Error(), "wr0ng-pass") {
				t.Errorf("error %q shows a password", err)
			}
		}
	}
}

func TestATokenThatExpiresIsRenewed(t *testing.T) {
	s, _, _ := standard(t)
	s.authorize("bearer")
	s.set(func(_ http.ResponseWriter, r *http.Request) bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		if strings.Contains(r.URL.Path, "/blobs/") {
			clear(s.tokens) // each is good for one blob
		}
		return false
	})
	if err := readAll(t.Context(), s.ref(":v1"), withPassword(thePass)); err != nil {
		t.Fatal(err)
	}
	if s.issued < 3 {
		t.Errorf("%d tokens issued", s.issued)
	}
}

func TestCredentialsAreNotSentWhereARegistryRedirects(t *testing.T) {
	s, l, _ := standard(t)
	s.authorize("basic")
	var mu sync.Mutex
	var got []string
	store := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		got = append(got, r.Header.Get("Authorization")+r.Header.Get("Cookie"))
		mu.Unlock()
		http.ServeFile(w, r, l.BlobPath("sha256:"+r.URL.Query().Get("d")))
	}))
	defer store.Close()
	s.set(func(w http.ResponseWriter, r *http.Request) bool {
		_, digest, ok := strings.Cut(r.URL.Path, "/blobs/sha256:")
		if ok {
			http.Redirect(w, r, store.URL+"/?sig=hidden&d="+digest, http.StatusTemporaryRedirect)
		}
		return ok
	})
	if err := readAll(t.Context(), s.ref(":v1"), withPassword(thePass)); err != nil {
		t.Fatal(err)
	}
	if len(got) != 3 || strings.Join(got, "") != "" {
		t.Errorf("requests with the headers %q, want 3 with none", got)
	}

	// Where no encryption is and no loopback, nothing is sent at all; and what a
	// redirect says is no business of a message's reader.
	s.set(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/blobs/") {
			http.Redirect(w, r, "http://192.0.2.1/?sig=hidden", http.StatusTemporaryRedirect)
			return true
		}
		return false
	})
	err := readAll(t.Context(), s.ref(":v1"), withPassword(thePass))
	wantErr(t, err, "plain http is for registries on this machine", "192.0.2.1")
	if strings.Contains(err.Error(), "hidden") {
		t.Errorf("error %q shows the address's signature", err)
	}
}
