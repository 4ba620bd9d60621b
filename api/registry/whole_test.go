package registry_test

import (
	"fmt"
	"io"
	"net/http"
	"testing"

	"github.com/opencontainers/go-digest"

	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/registry"
)

// Clients push nothing of a manifest that HEAD says is there.
func TestHeadOfAManifestIsOfAllThatItNames(t *testing.T) {
	s := newSite(t, mem.New(), nil)
	const indexType = "application/vnd.oci.image.index.v1+json"
	child := s.image("r", "layer")
	index := fmt.Sprintf(`{"schemaVersion":2,"manifests":[{"mediaType":%q,"digest":%q,"size":%d}]}`, manifestType, digest.FromString(child), len(child))
	push := func() {
		t.Helper()
		s.image("r", "layer")
		s.want(http.StatusCreated, "", "PUT", "/v2/r/manifests/"+digest.FromString(child).String(), child, "Content-Type", manifestType)
		s.want(http.StatusCreated, "", "PUT", "/v2/r/manifests/one", child, "Content-Type", manifestType)
		s.want(http.StatusCreated, "", "PUT", "/v2/r/manifests/index", index, "Content-Type", indexType)
		for _, tag := range []string{"one", "index"} {
			s.want(http.StatusOK, "", "HEAD", "/v2/r/manifests/"+tag, "")
		}
	}
	push()
	layer, config := digest.FromString("layer"), digest.FromString("{}")
	remove := func(key string) { must(t, s.bucket.Delete(t.Context(), key)) }
	flip := func(key string) { buckettest.Corrupt(t, s.bucket, key, 1) }
	empty := func(key string) { buckettest.Put(t, s.bucket, key, nil) }
	for _, c := range []struct {
		what   string
		damage func(key string)
		key    string
		found  bool // when the blob is pulled
	}{
		{"manifest missing", remove, registry.ContentKey(digest.FromString(child)), false},
		{"manifest flipped", flip, registry.ContentKey(digest.FromString(child)), false},
		{"manifest empty", empty, registry.ContentKey(digest.FromString(child)), false},
		{"its record missing", remove, registry.ManifestKey("r", digest.FromString(child)), false},
		{"its record flipped", flip, registry.ManifestKey("r", digest.FromString(child)), false},
		{"layer missing", remove, registry.ContentKey(layer), false},
		{"layer empty", empty, registry.ContentKey(layer), false},
		{"layer flipped", flip, registry.ContentKey(layer), true},
		{"layer's record missing", remove, registry.BlobKey("r", layer), false},
		{"config missing", remove, registry.ContentKey(config), false},
	} {
		c.damage(c.key)
		if c.found {
			resp, err := http.Get(s.url + "/v2/r/blobs/" + layer.String())
			must(t, err)
			_, err = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if err == nil && resp.StatusCode == http.StatusOK {
				t.Error("all of a damaged layer was served")
			}
		}
		for _, tag := range []string{"one", "index"} {
			if resp, _ := s.do("HEAD", "/v2/r/manifests/"+tag, ""); resp.StatusCode != http.StatusNotFound {
				t.Errorf("%s: HEAD of %s is %s", c.what, tag, resp.Status)
			}
		}
		push()
	}
	s.want(http.StatusAccepted, "", "DELETE", "/v2/r/blobs/"+layer.String(), "")
	s.want(http.StatusOK, "", "GET", "/v2/r/manifests/one", "")
	s.want(http.StatusNotFound, "", "HEAD", "/v2/r/manifests/one", "")
}
