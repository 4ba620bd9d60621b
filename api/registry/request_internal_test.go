package registry

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"

	"quarry/store/image"
	"quarry/store/registry"
)

const (
	hexD = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
	d256 = "sha256:" + hexD
)

func TestParse(t *testing.T) {
	d := digest.Digest(d256)
	for _, test := range []struct {
		method, path, query string
		want                request
	}{
		{"GET", "/v2/", "", request{op: opPing}},
		{"HEAD", "/v2", "", request{op: opPing, head: true}},
		{"GET", "/v2/a/blobs/" + d256, "ns=docker.io", request{op: opBlob, repo: "a", digest: d}},
		{"HEAD", "/v2/a/b/blobs/sha256%3A" + hexD, "", request{op: opBlob, head: true, repo: "a/b", digest: d}},
		{"DELETE", "/v2/a/blobs/" + d256, "", request{op: opBlobDelete, repo: "a", digest: d}},
		{"POST", "/v2/a/blobs/uploads/", "", request{op: opUploadStart, repo: "a"}},
		{"POST", "/v2/a/blobs/uploads", "digest=" + d256, request{op: opUploadStart, repo: "a", digest: d}},
		{"POST", "/v2/a/blobs/uploads/", "mount=" + d256 + "&from=b%2Fc", request{op: opUploadStart, repo: "a", mount: d256, from: "b/c"}},
		{"POST", "/v2/a/blobs/uploads/", "mount=" + d256, request{op: opUploadStart, repo: "a", mount: d256}},
		{"GET", "/v2/a/blobs/uploads/X1", "", request{op: opUploadOffset, repo: "a", id: "X1"}},
		{"PATCH", "/v2/a/blobs/uploads/X1", "_state=x", request{op: opUploadAppend, repo: "a", id: "X1"}},
		{"PUT", "/v2/a/blobs/uploads/X1", "digest=sha256%3A" + hexD, request{op: opUploadFinish, repo: "a", id: "X1", digest: d}},
		{"DELETE", "/v2/a/blobs/uploads/X1", "", request{op: opUploadCancel, repo: "a", id: "X1"}},
		{"GET", "/v2/a/manifests/v1", "", request{op: opManifest, repo: "a", tag: "v1"}},
		{"GET", "/v2/blobs/uploads/manifests/blobs", "", request{op: opManifest, repo: "blobs/uploads", tag: "blobs"}},
		{"PUT", "/v2/a/manifests/v1", "tag=v2", request{op: opManifestPut, repo: "a", tag: "v1", tags: []string{"v1", "v2"}}},
		{"PUT", "/v2/a/manifests/" + d256, "tag=x&tag=b&tag=x", request{op: opManifestPut, repo: "a", digest: d, tags: []string{"b", "x"}}},
		{"DELETE", "/v2/a/manifests/" + d256, "", request{op: opManifestDelete, repo: "a", digest: d}},
		{"GET", "/v2/a/tags/list", "n=5&last=x", request{op: opTags, repo: "a", n: 5, last: "x"}},
		{"GET", "/v2/tags/list/tags/list", "n=5000", request{op: opTags, repo: "tags/list", n: registry.MaxPage}},
		{"GET", "/v2/_catalog", "n=2&last=a/b", request{op: opCatalog, n: 2, last: "a/b"}},
		{"GET", "/v2/a/referrers/" + d256, "artifactType=a%2Fb", request{op: opReferrers, repo: "a", digest: d, artifactType: "a/b"}},
	} {
		if test.want.n == 0 {
			test.want.n = registry.MaxPage
		}
		got, err := parse(test.method, test.path, test.query)
		if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(request{})); err != nil || diff != "" {
			t.Errorf("%s %s?%s: %v (-want +got):\n%s", test.method, test.path, test.query, err, diff)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	long := strings.Repeat("a", 300)
	for _, test := range []struct {
		method, path, query string
		want                error
	}{
		{"GET", "/v1/a", "", errNoRoute},
		{"GET", "/v2/a", "", errNoRoute},
		{"GET", "/v2/_catalog/x", "", errNoRoute},
		{"POST", "/v2/_catalog", "", errMethod},
		{"GET", "/v2/" + strings.Repeat("a/", 1200) + "tags/list", "", errNoRoute},
		{"POST", "/v2/a/manifests/v1", "", errMethod},
		{"GET", "/v2/a/blobs/uploads/", "", errMethod},
		{"get", "/v2/", "", errMethod},
		{"GET", "/v2/../v1/blobs/" + d256, "", registry.ErrNameInvalid},
		{"GET", "/v2/a/../b/manifests/v1", "", registry.ErrNameInvalid},
		{"GET", "/v2/a/./manifests/v1", "", registry.ErrNameInvalid},
		{"GET", "/v2/a//manifests/v1", "", registry.ErrNameInvalid},
		{"GET", "/v2//manifests/v1", "", registry.ErrNameInvalid},
		{"GET", "/v2/a%2fb/manifests/v1", "", registry.ErrNameInvalid},
		{"GET", "/v2/%2e%2e/manifests/v1", "", registry.ErrNameInvalid},
		{"GET", "/v2/_manifests/manifests/v1", "", registry.ErrNameInvalid},
		{"GET", "/v2/a/_blobs/manifests/v1", "", registry.ErrNameInvalid},
		{"GET", "/v2/A/manifests/v1", "", registry.ErrNameInvalid},
		{"GET", "/v2/" + long + "/manifests/v1", "", registry.ErrNameInvalid},
		{"GET", "/v2/manifests/v1", "", registry.ErrNameInvalid},
		{"GET", "/v2/a/manifests/-x", "", errTagInvalid},
		{"GET", "/v2/a/manifests/" + long, "", errTagInvalid},
		{"GET", "/v2/a/manifests/sha256:x", "", registry.ErrDigestInvalid},
		{"GET", "/v2/a/blobs/x", "", registry.ErrDigestInvalid},
		{"GET", "/v2/a/blobs/sha384:" + strings.Repeat("0", 96), "", registry.ErrDigestInvalid},
		{"GET", "/v2/a/blobs/sha256:" + strings.ToUpper(hexD), "", registry.ErrDigestInvalid},
		{"GET", "/v2/a/referrers/v1", "", registry.ErrDigestInvalid},
		{"PUT", "/v2/a/blobs/uploads/X1", "", registry.ErrDigestInvalid},
		{"PUT", "/v2/a/blobs/uploads/X1", "digest=x", registry.ErrDigestInvalid},
		{"PUT", "/v2/a/blobs/uploads/" + long, "digest=" + d256, registry.ErrUploadUnknown},
		{"POST", "/v2/a/blobs/uploads/", "mount=x&from=b", registry.ErrDigestInvalid},
		{"POST", "/v2/a/blobs/uploads/", "mount=" + d256 + "&from=../b", registry.ErrNameInvalid},
		{"POST", "/v2/a/blobs/uploads/", "digest=" + d256 + "&digest=" + d256, errQuery},
		{"PUT", "/v2/a/manifests/" + d256, "tag=-", errTagInvalid},
		{"PUT", "/v2/a/manifests/" + d256, strings.Repeat("tag=a&", maxTags+1), errQuery},
		{"GET", "/v2/a/tags/list", "n=-1", errQuery},
		{"GET", "/v2/a/tags/list", "n=x", errQuery},
		{"GET", "/v2/a/tags/list", "n=%zz", errQuery},
		{"GET", "/v2/a/tags/list", "last=" + strings.Repeat("a", maxQuery), errQuery},
	} {
		if got, err := parse(test.method, test.path, test.query); !errors.Is(err, test.want) {
			t.Errorf("%s %.100s?%.100s: got %+v, %v, want %v", test.method, test.path, test.query, got, err, test.want)
		}
	}
}

// FuzzParse: whatever the request line says, what is taken names a repository, a tag
// and a digest that are valid, and so are the keys of objects made of them.
func FuzzParse(f *testing.F) {
	f.Add("GET", "/v2/a/b/blobs/"+d256, "")
	f.Add("PUT", "/v2/a/manifests/v1", "tag=v2")
	f.Add("POST", "/v2/a/blobs/uploads/", "mount="+d256+"&from=b")
	f.Add("GET", "/v2/a/tags/list", "n=1&last=b")
	f.Fuzz(func(t *testing.T, method, path, query string) {
		r, err := parse(method, path, query)
		if err != nil {
			if row := lookup(err); row.status >= 500 {
				t.Fatalf("%s %q?%q: %v is answered with %d", method, path, query, err, row.status)
			}
			return
		}
		if r.op == opNone || r.op != opPing && image.ValidateRepo(r.repo) != nil || r.from != "" && image.ValidateRepo(r.from) != nil {
			t.Fatalf("%s %q?%q: %+v", method, path, query, r)
		}
		if r.tag != "" && image.ValidateTag(r.tag) != nil || r.n < 0 || r.n > registry.MaxPage || len(r.tags) > maxTags+1 {
			t.Fatalf("%s %q?%q: %+v", method, path, query, r)
		}
		if r.digest != "" && r.digest.Validate() != nil {
			t.Fatalf("%s %q?%q: digest %q", method, path, query, r.digest)
		}
	})
}

func TestParseRange(t *testing.T) {
	for _, test := range []struct {
		header    string
		off, size int64
		part      bool
		fails     bool
	}{
		{"", 0, 100, false, false},
		{"bytes=0-0", 0, 1, true, false},
		{"bytes=10-19", 10, 10, true, false},
		{"bytes=10-", 10, 90, true, false},
		{"bytes=-10", 90, 10, true, false},
		{"bytes=-1000", 0, 100, true, false},
		{"bytes=90-9223372036854775807", 90, 10, true, false},
		{"bytes=100-", 0, 0, false, true},
		{"bytes=-0", 0, 0, false, true},
		{"bytes=5-4", 0, 0, false, true},
		{"bytes=0-1,3-4", 0, 100, false, false},
		{"bytes=x-y", 0, 100, false, false},
		{"bytes=-", 0, 100, false, false},
		{"lines=1-2", 0, 100, false, false},
		{"bytes=9223372036854775808-", 0, 100, false, false},
	} {
		off, size, part, err := parseRange(test.header, 100)
		if off != test.off || size != test.size || part != test.part || (err != nil) != test.fails {
			t.Errorf("%q: got %d, %d, %t, %v", test.header, off, size, part, err)
		}
	}
	if _, _, _, err := parseRange("bytes=0-", 0); err == nil {
		t.Error("a range of an empty blob was found")
	}
}
