package check_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"

	"quarry/store/bucket/buckettest"
	"quarry/store/check"
	"quarry/store/registry"
)

// What was pushed to /v2/ and waits for its image is no damage; its content is
// checked like all else.
func TestWhatWasPushedIsChecked(t *testing.T) {
	w := newWorld(t)
	reg, err := registry.Open(registry.Config{Bucket: w.bucket, Names: w.Catalog, Key: w.conv.SigningKey, Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Close()
	const body = `{"schemaVersion":2,"mediaType":"application/vnd.oci.image.index.v1+json","manifests":[]}`
	put := registry.PutRequest{Repo: "r", Body: []byte(body), Tags: []string{"pushed"}}
	if _, err := reg.PutManifest(t.Context(), put); err != nil {
		t.Fatal(err)
	}
	damage := func() []check.Problem {
		found, _ := w.run(t)
		return slices.DeleteFunc(found, func(p check.Problem) bool { return p.Note })
	}
	if found := damage(); len(found) > 0 {
		t.Errorf("found %+v", found)
	}
	key := registry.ContentKey(digest.FromString(body))
	buckettest.Corrupt(t, w.bucket, key, 70)
	found := damage()
	if len(found) != 1 || found[0].Kind != "blob" || found[0].Object != key || !strings.Contains(found[0].Message, "push it again") {
		t.Errorf("a flipped bit: found %+v", found)
	}
	w.Quick = true
	if found := damage(); len(found) > 0 {
		t.Errorf("quick: found %+v", found)
	}
	w.Quick = false
	if err := w.bucket.Delete(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	if found := damage(); len(found) != 1 || found[0].Kind != "name" {
		t.Errorf("a pushed manifest that is gone: found %+v, want its name", found)
	}
	if _, err := reg.PutManifest(t.Context(), put); err != nil {
		t.Fatal(err)
	}
	if found := damage(); len(found) > 0 {
		t.Errorf("pushed again: found %+v", found)
	}
}
