package registry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"syscall"
	"testing"

	"github.com/opencontainers/go-digest"

	"quarry/api/access"
	front "quarry/api/registry"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/registry"
)

// site is a registry that is served.
type site struct {
	t      *testing.T
	url    string
	bucket bucket.Bucket
}

func newSite(t *testing.T, b bucket.Bucket, change func(*front.Config)) *site {
	t.Helper()
	c, err := catalog.Open(t.Context(), catalog.Config{Journal: mem.New()})
	must(t, err)
	s, err := registry.Open(registry.Config{Bucket: b, Names: c, Dir: t.TempDir(), UploadSpace: 4 << 20})
	must(t, err)
	t.Cleanup(func() { s.Close() })
	cfg := front.Config{Store: s}
	if change != nil {
		change(&cfg)
	}
	srv := httptest.NewServer(front.New(cfg))
	t.Cleanup(srv.Close)
	return &site{t: t, url: srv.URL, bucket: b}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// do sends a request and returns the answer with its body read.
func (s *site) do(method, path, body string, headers ...string) (*http.Response, string) {
	s.t.Helper()
	return s.send(method, path, strings.NewReader(body), headers...)
}

func (s *site) send(method, path string, body io.Reader, headers ...string) (*http.Response, string) {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, body)
	must(s.t, err)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	resp, err := http.DefaultClient.Do(r)
	must(s.t, err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	must(s.t, err)
	return resp, string(b)
}

// want sends a request and checks status and, of an error, the code.
func (s *site) want(status int, code, method, path, body string, headers ...string) *http.Response {
	s.t.Helper()
	resp, got := s.do(method, path, body, headers...)
	if resp.StatusCode != status {
		s.t.Errorf("%s %s: got %s %.300s, want %d", method, path, resp.Status, got, status)
	}
	if code == "" {
		return resp
	}
	var doc struct {
		Errors []struct{ Code, Message string }
	}
	if err := json.Unmarshal([]byte(got), &doc); err != nil || len(doc.Errors) != 1 || doc.Errors[0].Code != code || doc.Errors[0].Message == "" {
		s.t.Errorf("%s %s: got %.300s, want code %s", method, path, got, code)
	}
	return resp
}

func (s *site) push(repo, content string) digest.Digest {
	s.t.Helper()
	d := digest.FromString(content)
	s.want(http.StatusCreated, "", "POST", "/v2/"+repo+"/blobs/uploads/?digest="+d.String(), content)
	return d
}

const manifestType = "application/vnd.oci.image.manifest.v1+json"

func (s *site) image(repo, layer string) string {
	config, l := s.push(repo, "{}"), s.push(repo, layer)
	return fmt.Sprintf(`{"schemaVersion":2,"config":{"mediaType":"application/vnd.oci.empty.v1+json","digest":%q,"size":2},"layers":[{"mediaType":"application/vnd.oci.image.layer.v1.tar","digest":%q,"size":%d}]}`,
		config, l, len(layer))
}

// Bug 53: Range is where the upload goes on, in every answer.
func TestAnUploadInParts(t *testing.T) {
	s := newSite(t, mem.New(), nil)
	resp := s.want(http.StatusAccepted, "", "POST", "/v2/a/blobs/uploads/", "")
	loc := resp.Header.Get("Location")
	at := func(resp *http.Response, want string) {
		t.Helper()
		if got := resp.Header.Get("Range"); got != want || resp.Header.Get("Location") != loc {
			t.Errorf("Range %q at %q, want %q at %q", got, resp.Header.Get("Location"), want, loc)
		}
	}
	at(resp, "0-0")
	at(s.want(http.StatusAccepted, "", "PATCH", loc, ""), "0-0")
	at(s.want(http.StatusAccepted, "", "PATCH", loc, "0123456789", "Content-Range", "0-9"), "0-9")
	resp, _ = s.send("PATCH", loc, io.MultiReader(strings.NewReader("01234"), strings.NewReader("56789"))) // no length
	at(resp, "0-19")
	at(s.want(http.StatusRequestedRangeNotSatisfiable, "BLOB_UPLOAD_INVALID", "PATCH", loc, "0123456789", "Content-Range", "0-9"), "0-19")
	at(s.want(http.StatusBadRequest, "SIZE_INVALID", "PATCH", loc, "0123456789", "Content-Range", "20-20"), "0-19")
	s.want(http.StatusBadRequest, "BLOB_UPLOAD_INVALID", "PATCH", loc, "0", "Content-Range", "20")
	at(s.want(http.StatusTooManyRequests, "TOOMANYREQUESTS", "PATCH", loc, strings.Repeat("x", 4<<20)), "0-19")
	at(s.want(http.StatusNoContent, "", "GET", loc, ""), "0-19")
	s.want(http.StatusNotFound, "BLOB_UPLOAD_UNKNOWN", "GET", strings.Replace(loc, "/a/", "/b/", 1), "")

	content := "01234567890123456789xyz"
	d := digest.SHA512.FromString(content)
	resp = s.want(http.StatusCreated, "", "PUT", loc+"?digest="+d.String(), "xyz", "Content-Range", "20-22")
	if _, got := s.do("GET", resp.Header.Get("Location"), ""); got != content || resp.Header.Get("Docker-Content-Digest") != d.String() {
		t.Errorf("got %q at %s", got, resp.Header.Get("Location"))
	}
	s.want(http.StatusNotFound, "BLOB_UPLOAD_UNKNOWN", "PATCH", loc, "")

	s.want(http.StatusBadRequest, "DIGEST_INVALID", "POST", "/v2/a/blobs/uploads/?digest="+d.String(), "lie")
	resp = s.want(http.StatusAccepted, "", "POST", "/v2/a/blobs/uploads/", "")
	s.want(http.StatusNoContent, "", "DELETE", resp.Header.Get("Location"), "")
	s.want(http.StatusNotFound, "BLOB_UPLOAD_UNKNOWN", "DELETE", resp.Header.Get("Location"), "")
}

func TestBlobsAndRanges(t *testing.T) {
	s := newSite(t, mem.New(), nil)
	d := s.push("a", "0123456789")
	path := "/v2/a/blobs/" + d.String()
	resp, body := s.do("GET", path, "", "Range", "bytes=2-4")
	if resp.StatusCode != http.StatusPartialContent || body != "234" || resp.Header.Get("Content-Range") != "bytes 2-4/10" {
		t.Errorf("range: got %s %q %q", resp.Status, body, resp.Header.Get("Content-Range"))
	}
	if resp := s.want(http.StatusOK, "", "HEAD", path, ""); resp.ContentLength != 10 {
		t.Errorf("HEAD: length %d, want 10", resp.ContentLength)
	}
	resp = s.want(http.StatusRequestedRangeNotSatisfiable, "RANGE_INVALID", "GET", path, "", "Range", "bytes=10-")
	if got := resp.Header.Get("Content-Range"); got != "bytes */10" {
		t.Errorf("Content-Range of a refused range: %q", got)
	}
	empty := s.push("a", "")
	if resp := s.want(http.StatusOK, "", "HEAD", "/v2/a/blobs/"+empty.String(), ""); resp.ContentLength != 0 {
		t.Errorf("HEAD of nothing: length %d", resp.ContentLength)
	}
	s.want(http.StatusNotFound, "BLOB_UNKNOWN", "GET", "/v2/b/blobs/"+d.String(), "")
	s.want(http.StatusAccepted, "", "DELETE", path, "")
	s.want(http.StatusNotFound, "BLOB_UNKNOWN", "DELETE", path, "")
}

// A blob whose bytes are wrong by now is cut off, so that no client takes it.
func TestADamagedBlobIsCutOff(t *testing.T) {
	s := newSite(t, mem.New(), nil)
	content := strings.Repeat("x", 3<<20)
	d := s.push("a", content)
	bad := []byte("y" + content[1:])
	must(t, s.bucket.Put(t.Context(), registry.ContentKey(d), bytes.NewReader(bad), int64(len(bad))))
	resp, err := http.Get(s.url + "/v2/a/blobs/" + d.String())
	must(t, err)
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("got %d bytes and no error", len(got))
	}
}

// Bug 56.
func TestMounts(t *testing.T) {
	s := newSite(t, mem.New(), func(c *front.Config) {
		c.Authorize = func(_ *http.Request, need access.Scope, repo string) error {
			if repo == "secret" && need == access.Pull {
				return &access.Refusal{Kind: access.ErrForbidden}
			}
			return nil
		}
	})
	d := s.push("a", "layer")
	s.push("secret", "hidden")
	for name, test := range map[string]struct {
		query  string
		status int
	}{
		"it is there":                 {"mount=" + d.String() + "&from=a", http.StatusCreated},
		"in another repository":       {"mount=" + d.String() + "&from=c", http.StatusAccepted},
		"no repository is named":      {"mount=" + d.String(), http.StatusAccepted},
		"in one that must not pulled": {"mount=" + digest.FromString("hidden").String() + "&from=secret", http.StatusAccepted},
		"nowhere":                     {"mount=" + digest.FromString("x").String() + "&from=a", http.StatusAccepted},
		"no digest":                   {"mount=x&from=a", http.StatusBadRequest},
	} {
		resp := s.want(test.status, "", "POST", "/v2/b/blobs/uploads/?"+test.query, "")
		switch loc := resp.Header.Get("Location"); test.status {
		case http.StatusCreated:
			if _, got := s.do("GET", loc, ""); got != "layer" {
				t.Errorf("%s: %s has %q", name, loc, got)
			}
		case http.StatusAccepted:
			s.want(http.StatusCreated, "", "PUT", loc+"?digest="+digest.FromString("new").String(), "new")
		}
	}
}

func TestManifestsTagsAndReferrers(t *testing.T) {
	s := newSite(t, mem.New(), nil)
	body := s.image("a", "layer")
	d := digest.FromString(body)
	s.want(http.StatusNotFound, "NAME_UNKNOWN", "GET", "/v2/none/tags/list", "")
	s.want(http.StatusBadRequest, "MANIFEST_INVALID", "PUT", "/v2/a/manifests/v1", "{}", "Content-Type", manifestType)
	s.want(http.StatusBadRequest, "MANIFEST_BLOB_UNKNOWN", "PUT", "/v2/b/manifests/v1", body, "Content-Type", manifestType)
	s.want(http.StatusBadRequest, "DIGEST_INVALID", "PUT", "/v2/a/manifests/"+digest.FromString("x").String(), body, "Content-Type", manifestType)
	s.want(http.StatusRequestEntityTooLarge, "SIZE_INVALID", "PUT", "/v2/a/manifests/v1", body+strings.Repeat(" ", registry.MaxManifest), "Content-Type", manifestType)
	for _, tag := range []string{"v1", "v2", "v3"} {
		resp := s.want(http.StatusCreated, "", "PUT", "/v2/a/manifests/"+tag, body, "Content-Type", manifestType+"; charset=utf-8")
		if got := resp.Header.Get("Docker-Content-Digest"); got != d.String() || resp.Header.Get("OCI-Tag") != tag {
			t.Errorf("%s: digest %s, tag %q", tag, got, resp.Header.Get("OCI-Tag"))
		}
	}
	resp, got := s.do("GET", "/v2/a/manifests/v2", "", "Accept", "application/vnd.oci.image.index.v1+json")
	if got != body || resp.Header.Get("Content-Type") != manifestType || resp.Header.Get("Docker-Content-Digest") != d.String() {
		t.Errorf("manifest: got %q, %v", got, resp.Header)
	}
	if resp := s.want(http.StatusOK, "", "HEAD", "/v2/a/manifests/"+d.String(), ""); resp.ContentLength != int64(len(body)) {
		t.Errorf("HEAD: length %d, want %d", resp.ContentLength, len(body))
	}
	resp, got = s.do("GET", "/v2/a/tags/list?n=2", "")
	if want := `{"name":"a","tags":["v1","v2"]}`; got != want || resp.Header.Get("Link") != `</v2/a/tags/list?last=v2&n=2>; rel="next"` {
		t.Errorf("tags: got %s, link %s", got, resp.Header.Get("Link"))
	}
	subject := strings.Replace(body, `{"schema`, `{"subject":{"mediaType":"`+manifestType+`","digest":"`+d.String()+`","size":1},"schema`, 1)
	resp = s.want(http.StatusCreated, "", "PUT", "/v2/a/manifests/"+digest.FromString(subject).String(), subject, "Content-Type", manifestType)
	if got := resp.Header.Get("OCI-Subject"); got != d.String() {
		t.Errorf("OCI-Subject: got %q", got)
	}
	for artifactType, want := range map[string]int{"": 1, "application/vnd.oci.empty.v1+json": 1, "other": 0} {
		resp, got := s.do("GET", "/v2/a/referrers/"+d.String()+"?artifactType="+url.QueryEscape(artifactType), "")
		if n := strings.Count(got, digest.FromString(subject).String()); n != want || (artifactType != "") != (resp.Header.Get("OCI-Filters-Applied") == "artifactType") {
			t.Errorf("referrers of type %q: got %s, %v", artifactType, got, resp.Header)
		}
	}
	s.want(http.StatusAccepted, "", "DELETE", "/v2/a/manifests/v3", "")
	s.want(http.StatusNotFound, "MANIFEST_UNKNOWN", "DELETE", "/v2/a/manifests/v3", "")
	s.want(http.StatusNotFound, "MANIFEST_UNKNOWN", "DELETE", "/v2/a/manifests/"+digest.FromString("layer").String(), "")
	s.want(http.StatusAccepted, "", "DELETE", "/v2/a/manifests/"+d.String(), "")
	s.want(http.StatusNotFound, "MANIFEST_UNKNOWN", "GET", "/v2/a/manifests/v1", "")
	if _, got := s.do("GET", "/v2/a/tags/list", ""); got != `{"name":"a","tags":[]}` {
		t.Errorf("tags after the delete: %s", got)
	}
}

func TestEachWriteIsAskedFor(t *testing.T) {
	var asked []string
	s := newSite(t, mem.New(), func(c *front.Config) {
		c.Authorize = func(_ *http.Request, need access.Scope, repo string) error {
			asked = append(asked, fmt.Sprintf("%s %s", repo, need))
			return &access.Refusal{Kind: access.ErrUnauthenticated, Challenges: []string{"Bearer x", "Basic y"}}
		}
	})
	d := digest.FromString("x").String()
	for _, test := range []struct{ method, path, want string }{
		{"GET", "/v2/", " "},
		{"GET", "/v2/a/blobs/" + d, "a pull"},
		{"DELETE", "/v2/a/blobs/" + d, "a push"},
		{"POST", "/v2/a/blobs/uploads/", "a push"},
		{"GET", "/v2/a/blobs/uploads/X", "a push"},
		{"PATCH", "/v2/a/blobs/uploads/X", "a push"},
		{"PUT", "/v2/a/blobs/uploads/X?digest=" + d, "a push"},
		{"DELETE", "/v2/a/blobs/uploads/X", "a push"},
		{"GET", "/v2/a/manifests/v1", "a pull"},
		{"PUT", "/v2/a/manifests/v1", "a push"},
		{"DELETE", "/v2/a/manifests/v1", "a push"},
		{"GET", "/v2/a/tags/list", "a pull"},
		{"GET", "/v2/a/referrers/" + d, "a pull"},
	} {
		asked = nil
		resp := s.want(http.StatusUnauthorized, "UNAUTHORIZED", test.method, test.path, "")
		if got := resp.Header.Values("WWW-Authenticate"); len(got) != 2 {
			t.Errorf("%s %s: challenges %q", test.method, test.path, got)
		}
		if fmt.Sprint(asked) != "["+test.want+"]" {
			t.Errorf("%s %s: asked for %q, want %s", test.method, test.path, asked, test.want)
		}
	}
}

// A full disk is said so, and the upload goes on when there is room.
func TestAFullDisk(t *testing.T) {
	full := true
	b := &buckettest.Faulty{Bucket: mem.New(), Before: func(op buckettest.Op) error {
		if full && op.Method == "Put" {
			return fmt.Errorf("write: %w", syscall.ENOSPC)
		}
		return context.Cause(t.Context())
	}}
	s := newSite(t, b, nil)
	resp := s.want(http.StatusAccepted, "", "POST", "/v2/a/blobs/uploads/", "")
	loc, d := resp.Header.Get("Location"), digest.FromString("layer")
	resp = s.want(http.StatusInsufficientStorage, "DISK_FULL", "PUT", loc+"?digest="+d.String(), "layer")
	if got := resp.Header.Get("Range"); got != "0-4" {
		t.Errorf("Range %q, want 0-4", got)
	}
	full = false
	s.want(http.StatusCreated, "", "PUT", loc+"?digest="+d.String(), "")
}

// A node that only reads refuses every push before it takes a byte, and names who takes it.
func TestANodeThatOnlyReadsTakesNoPushes(t *testing.T) {
	b := mem.New()
	s := newSite(t, b, func(c *front.Config) {
		c.ReadOnly = func(context.Context) error { return fmt.Errorf("%w: its writer is pid 7", store.ErrReadOnly) }
	})
	d := digest.FromString("x").String()
	for _, r := range [][2]string{
		{"POST", "/v2/a/blobs/uploads/"}, {"POST", "/v2/a/blobs/uploads/?digest=" + d},
		{"PUT", "/v2/a/manifests/v1"}, {"DELETE", "/v2/a/manifests/v1"}, {"DELETE", "/v2/a/blobs/" + d},
	} {
		res, body := s.do(r[0], r[1], "x")
		if res.StatusCode != http.StatusMisdirectedRequest || !strings.Contains(body, "its writer is pid 7") {
			t.Errorf("%v: got %d %s, want 421 that names the writer", r, res.StatusCode, body)
		}
	}
	for obj, err := range b.List(t.Context(), "") {
		t.Errorf("the bucket has %v, %v", obj, err)
	}
	if res, body := s.do("GET", "/v2/", ""); res.StatusCode != http.StatusOK {
		t.Errorf("GET /v2/: got %d %s", res.StatusCode, body)
	}
	if res, _ := s.do("HEAD", "/v2/a/blobs/"+d, ""); res.StatusCode != http.StatusNotFound {
		t.Errorf("HEAD of a blob: got %d, want 404", res.StatusCode)
	}
}

// The list of repositories has those that the token covers, page by page.
func TestCatalogIsOfWhatTheTokenCovers(t *testing.T) {
	s := newSite(t, mem.New(), func(c *front.Config) {
		c.Covered = func(_ *http.Request, need access.Scope) (func(string) bool, error) {
			return func(repo string) bool { return need == access.Pull && strings.HasPrefix(repo, "mine/") }, nil
		}
	})
	for _, repo := range []string{"mine/b", "mine/a", "other/c"} {
		s.want(http.StatusCreated, "", "PUT", "/v2/"+repo+"/manifests/v1", s.image(repo, repo), "Content-Type", manifestType)
	}
	resp, body := s.do("GET", "/v2/_catalog?n=1", "")
	if link := resp.Header.Get("Link"); body != `{"repositories":["mine/a"]}` || link != `</v2/_catalog?last=mine%2Fa&n=1>; rel="next"` {
		t.Errorf("first page: %s, Link %s", body, link)
	}
	resp, body = s.do("GET", "/v2/_catalog?n=5&last=mine%2Fa", "")
	if body != `{"repositories":["mine/b"]}` || resp.Header.Get("Link") != "" {
		t.Errorf("last page: %s, Link %s", body, resp.Header.Get("Link"))
	}
}

// uncomparable is an error that is no key of a map.
type uncomparable []string

func (e uncomparable) Error() string { return "what nobody foresaw" }

func TestAnyErrorIsAnswered(t *testing.T) {
	s := newSite(t, mem.New(), func(c *front.Config) {
		c.Authorize = func(*http.Request, access.Scope, string) error { return uncomparable{} }
	})
	s.want(http.StatusInternalServerError, "UNKNOWN", "GET", "/v2/", "")
}
