package check_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"quarry/chunkindex"
	"quarry/converter"
	"quarry/internal/testimage"
	"quarry/signer"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/check"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/packed"
)

// world is a store with one image, team/task:v1, made by a real conversion.
type world struct {
	check.Config
	bucket *mem.Bucket
	layer  testimage.Layer
	source string
	conv   converter.Config
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{bucket: mem.New()}
	index, err := chunkindex.Open(chunkindex.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { index.Close() })
	names, err := catalog.Open(t.Context(), catalog.Config{Journal: w.bucket})
	if err != nil {
		t.Fatal(err)
	}
	chunks, err := packed.Open(t.Context(), packed.Config{Bucket: w.bucket, Catalog: names, Index: index, ChunkSize: chunk.MinSize, TmpDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	key, err := signer.Generate()
	if err != nil {
		t.Fatal(err)
	}
	mac := bytes.Repeat([]byte{1}, image.MACKeySize)
	w.Config = check.Config{Store: chunks, Bucket: w.bucket, Catalog: names, Trust: signer.NewTrust(key.Public()), MACKey: mac}
	w.conv = converter.Config{Store: chunks, Bucket: w.bucket, Catalog: names, ChunkSize: chunk.MinSize, MACKey: mac, SigningKey: key}
	content := make([]byte, 6*chunk.MinSize)
	rand.NewChaCha8([32]byte{1}).Read(content)
	w.layer = testimage.Layer{Entries: []testimage.Entry{testimage.File("a", string(content)), testimage.File("b", "small")}}
	w.source = testimage.Build(t, w.layer).Source("")
	w.convert(t)
	return w
}

func (w *world) convert(t *testing.T) {
	t.Helper()
	req := converter.Request{Source: w.source, Name: image.Ref{Repo: "team/task", Tag: "v1"}}
	if _, err := converter.Convert(t.Context(), w.conv, req); err != nil {
		t.Fatal(err)
	}
}

func (w *world) run(t *testing.T) ([]check.Problem, check.Summary) {
	t.Helper()
	var found []check.Problem
	sum, err := check.Run(t.Context(), w.Config, func(p check.Problem) { found = append(found, p) })
	if err != nil {
		t.Fatal(err)
	}
	told := 0
	for _, p := range found {
		if !p.Note {
			told++
		}
	}
	if sum.Problems != int64(told) {
		t.Errorf("the summary counts %d problems, %d were told", sum.Problems, told)
	}
	return found, sum
}

func TestAWholeStoreHasNoProblem(t *testing.T) {
	w := newWorld(t)
	found, sum := w.run(t)
	if len(found) > 0 {
		t.Errorf("found %+v", found)
	}
	if sum.Packs != 1 || sum.Images != 1 || sum.Chunks != 7 {
		t.Errorf("got %+v, want 1 pack, 1 image, 7 chunks", sum)
	}
}

// Every kind of object is damaged in turn: check names it and the image, and
// converting the image again heals the store.
func TestDamageIsNamedAndHealed(t *testing.T) {
	for prefix, names := range map[string]bool{ // the image is named
		"packs/": true, "bootstraps/": true, "configs/": true, "blobs/": true, "images/": true, "layers/": false,
	} {
		for _, kind := range []string{"flipped", "deleted"} {
			if prefix == "layers/" && kind == "deleted" {
				continue // a layer record is only a memory
			}
			t.Run(prefix+kind, func(t *testing.T) {
				w := newWorld(t)
				keys := slices.DeleteFunc(buckettest.Keys(t, w.bucket, prefix), func(k string) bool { return strings.Contains(k, "/sigs/") })
				if len(keys) != 1 {
					t.Fatalf("%d objects below %s, want 1", len(keys), prefix)
				}
				if kind == "flipped" {
					buckettest.Corrupt(t, w.bucket, keys[0], 70)
				} else if err := w.bucket.Delete(t.Context(), keys[0]); err != nil {
					t.Fatal(err)
				}
				found, _ := w.run(t)
				if len(found) == 0 {
					t.Fatal("nothing was found")
				}
				named := slices.ContainsFunc(found, func(p check.Problem) bool { return slices.Contains(p.Images, "team/task:v1") })
				if named != names {
					t.Errorf("image named: %t, want %t: %+v", named, names, found)
				}
				w.convert(t)
				if found, _ := w.run(t); len(found) > 0 {
					t.Errorf("after converting again: %+v", found)
				}
			})
		}
	}
}

func TestASignatureOfAnotherKeyIsAProblem(t *testing.T) {
	w := newWorld(t)
	other, err := signer.Generate()
	if err != nil {
		t.Fatal(err)
	}
	w.Trust = signer.NewTrust(other.Public())
	found, _ := w.run(t)
	kinds := map[string]bool{}
	for _, p := range found {
		kinds[p.Kind] = true
	}
	entry := ""
	for e, err := range w.bucket.Read(t.Context(), 1) {
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(e.Data, []byte(`"tag":"v1"`)) {
			entry = fmt.Sprintf("log/%020d", e.N)
		}
	}
	for _, p := range found {
		if p.Kind == "name" && p.Object != entry {
			t.Errorf("the name's entry is said to be %s, want %s", p.Object, entry)
		}
	}
	if !kinds["statement"] || !kinds["name"] {
		t.Errorf("found %+v, want the image and the name statement", found)
	}
}
