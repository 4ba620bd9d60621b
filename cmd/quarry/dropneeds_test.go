package main

import (
	"bytes"
	"encoding/json"
	"os"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"quarry/internal/testimage"
	"quarry/store/chunk"
	"quarry/store/jobs"
	"quarry/store/registry"
)

// pushByDigest pushes an image without a tag, as the manifests of an index are.
func (w *pushWorld) pushByDigest(t *testing.T, l *testimage.Layout, d testimage.Descriptor) digest.Digest {
	t.Helper()
	blob := func(digest string) []byte {
		t.Helper()
		raw, err := os.ReadFile(l.BlobPath(digest))
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	raw := blob(d.Digest)
	var m testimage.Manifest
	if err := json.Unmarshal(raw, &m); err != nil {
		t.Fatal(err)
	}
	for _, b := range append(m.Layers, m.Config) {
		id, err := w.registry.StartUpload("t/y", "")
		if err == nil {
			err = w.registry.FinishUpload(t.Context(), "t/y", id, registry.Part{Body: bytes.NewReader(blob(b.Digest)), At: -1, Size: b.Size}, digest.Digest(b.Digest))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.registry.PutManifest(t.Context(), registry.PutRequest{Repo: "t/y", Body: raw, MediaType: d.MediaType}); err != nil {
		t.Fatal(err)
	}
	return digest.Digest(d.Digest)
}

func layerOf(body string) testimage.Layer {
	return testimage.Layer{Entries: []testimage.Entry{testimage.File("f", body)}}
}

func TestWhatAManifestWithoutATagNeedsStays(t *testing.T) {
	w := newPushWorld(t, false)
	w.retain = retention{drop: true}
	l := testimage.New(t)
	shared, own := layerOf("shared"), layerOf("own")
	sharedLayer, _ := l.Layer(shared)
	ownLayer, _ := l.Layer(own)
	l.Tag("one", l.Image(testimage.Image{Layers: []testimage.Layer{shared, own}}))
	w.push(t, l, "one", "one")
	untagged := w.pushByDigest(t, l, l.Image(testimage.Image{Layers: []testimage.Layer{shared, layerOf("other")}}))
	w.convertAll(t)
	if w.drop(t, time.Hour); w.has(t, ownLayer.Digest) || !w.has(t, sharedLayer.Digest) {
		t.Errorf("its own layer is there: %t, what the manifest without a tag needs: %t", w.has(t, ownLayer.Digest), w.has(t, sharedLayer.Digest))
	}
	if err := w.registry.DeleteManifest(t.Context(), "t/y", untagged); err != nil {
		t.Fatal(err)
	}
	if w.drop(t, time.Hour); w.has(t, sharedLayer.Digest) {
		t.Error("the shared layer stays when nothing else names it")
	}
}

// A layer that is held goes on being held by the same: nothing is read again until
// something is pushed, signed, removed or due, or the hold was for a time.
func TestManifestsAreNotReadAgainForALayerThatIsHeld(t *testing.T) {
	w := newPushWorld(t, false)
	w.retain = retention{drop: true}
	l := testimage.New(t)
	shared := layerOf("shared")
	sharedLayer, _ := l.Layer(shared)
	ownLayer, _ := l.Layer(layerOf("own"))
	l.Tag("one", l.Image(testimage.Image{Layers: []testimage.Layer{shared, layerOf("own")}}))
	w.push(t, l, "one", "one")
	untagged := w.pushByDigest(t, l, l.Image(testimage.Image{Layers: []testimage.Layer{shared, layerOf("other")}}))
	w.convertAll(t)
	r := &retainer{owner: w.owner}
	round := func(wantOwn, wantShared bool) {
		t.Helper()
		if err := r.dropLayers(t.Context(), time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		if own, shared := w.has(t, ownLayer.Digest), w.has(t, sharedLayer.Digest); own != wantOwn || shared != wantShared {
			t.Errorf("its own layer is there: %t, want %t; the shared one: %t, want %t", own, wantOwn, shared, wantShared)
		}
	}
	w.retainGrace = time.Hour
	round(true, true) // a client was told of them just now
	w.retainGrace = 0
	round(false, true)
	// Who read the manifests again would find that nothing needs the layer.
	if err := w.bucket.Delete(t.Context(), registry.ContentKey(untagged)); err != nil {
		t.Fatal(err)
	}
	round(false, true)
	l.Tag("two", l.Image(testimage.Image{Layers: []testimage.Layer{layerOf("2")}}))
	w.push(t, l, "two", "two")
	round(false, false)
}

// Two builds of one image may have a layer in common and another compressed otherwise.
func TestWhatAnotherManifestOfTheConfigNeedsStays(t *testing.T) {
	w := newPushWorld(t, false)
	w.retain = retention{drop: true}
	l := testimage.New(t)
	shared, own := layerOf("shared"), layerOf("own")
	sharedLayer, _ := l.Layer(shared)
	ownLayer, _ := l.Layer(own)
	zstd := own
	zstd.Codec = "zstd"
	zstdLayer, _ := l.Layer(zstd)
	l.Tag("gzip", l.Image(testimage.Image{Layers: []testimage.Layer{shared, own}}))
	w.push(t, l, "gzip", "gzip")
	other := l.Image(testimage.Image{Layers: []testimage.Layer{shared, zstd}})
	w.pushByDigest(t, l, other)
	w.convertAll(t)
	if w.drop(t, time.Hour); w.has(t, ownLayer.Digest) || !w.has(t, sharedLayer.Digest) || !w.has(t, zstdLayer.Digest) {
		t.Errorf("its own layer is there: %t; what the manifest of the same config needs: %t, %t", w.has(t, ownLayer.Digest), w.has(t, sharedLayer.Digest), w.has(t, zstdLayer.Digest))
	}
	// Converted, it is as gone as the first.
	l.Tag("zstd", other)
	w.push(t, l, "zstd", "zstd")
	w.convertAll(t)
	if w.drop(t, time.Hour); w.has(t, sharedLayer.Digest) || w.has(t, zstdLayer.Digest) {
		t.Error("a layer stays when both are converted")
	}
}

// The manifests of an image index were pushed by digest: the one that was converted is
// no other image, the one for another platform is.
func TestLayersOfAnIndexGo(t *testing.T) {
	w := newPushWorld(t, false)
	w.retain = retention{drop: true}
	l := testimage.New(t)
	here, elsewhere := layerOf("amd64"), layerOf("riscv64")
	hereLayer, _ := l.Layer(here)
	elsewhereLayer, _ := l.Layer(elsewhere)
	l.Tag("index", l.Index(l.Image(testimage.Image{Layers: []testimage.Layer{here}}), l.Image(testimage.Image{Platform: "linux/riscv64", Layers: []testimage.Layer{elsewhere}})))
	w.push(t, l, "index", "v1")
	w.convertAll(t)
	if w.drop(t, time.Hour); w.has(t, hereLayer.Digest) || !w.has(t, elsewhereLayer.Digest) {
		t.Errorf("the layer of the converted platform is there: %t, that of the other one: %t", w.has(t, hereLayer.Digest), w.has(t, elsewhereLayer.Digest))
	}
}

// convertedOne is a world with a converted image of one layer, which goes after an hour.
func convertedOne(t *testing.T) (w *pushWorld, source chunk.Digest, layer testimage.Descriptor) {
	w = newPushWorld(t, false)
	w.retain = retention{drop: true, after: time.Hour}
	l := testimage.New(t)
	layer, _ = l.Layer(layerOf("1"))
	l.Tag("one", l.Image(testimage.Image{Layers: []testimage.Layer{layerOf("1")}}))
	source = w.push(t, l, "one", "one")
	w.convertAll(t)
	return w, source, layer
}

// A store with more images than jobs are remembered of drops the layers of all.
func TestLayersOfAForgottenJobGo(t *testing.T) {
	w, source, layer := convertedOne(t)
	if err := w.bucket.Delete(t.Context(), jobs.Key(jobs.ID(source, ""))); err != nil {
		t.Fatal(err)
	}
	if err := w.openJobs(t.Context(), ownerConfig{jobs: w.jobOptions}); err != nil { // a queue that has forgotten it
		t.Fatal(err)
	}
	if w.drop(t, 0); !w.has(t, layer.Digest) {
		t.Fatal("the layer went before its time")
	}
	if w.drop(t, 3*time.Hour); w.has(t, layer.Digest) {
		t.Error("the layer stays")
	}
}

// An image whose name has moved on is timed by who looks.
func TestLayersOfAnImageWithoutANameGo(t *testing.T) {
	w, source, layer := convertedOne(t)
	if err := w.registry.DeleteTag(t.Context(), "t/x", "one"); err != nil {
		t.Fatal(err)
	}
	if err := w.bucket.Delete(t.Context(), jobs.Key(jobs.ID(source, ""))); err != nil {
		t.Fatal(err)
	}
	if err := w.openJobs(t.Context(), ownerConfig{jobs: w.jobOptions}); err != nil {
		t.Fatal(err)
	}
	r, now := &retainer{owner: w.owner}, time.Now()
	for i, want := range []bool{true, true, false} {
		if err := r.dropLayers(t.Context(), now.Add(time.Duration(i)*40*time.Minute)); err != nil {
			t.Fatal(err)
		}
		if got := w.has(t, layer.Digest); got != want {
			t.Errorf("round %d: the layer is there: %t", i, got)
		}
	}
}

// One platform of an index is converted, the other one cannot be: its layers stay, to be
// seen to.
func TestLayersOfAPlatformThatFailedStay(t *testing.T) {
	w := newPushWorld(t, false)
	w.retain = retention{drop: true}
	if p, err := platformFlag("linux/arm64"); err != nil {
		t.Fatal(err)
	} else {
		w.platforms = append(w.platforms, p)
	}
	l := testimage.New(t)
	good, bad := layerOf("good"), testimage.Layer{Entries: []testimage.Entry{testimage.File("etc/.wh.", "")}}
	goodLayer, _ := l.Layer(good)
	badLayer, _ := l.Layer(bad)
	l.Tag("index", l.Index(l.Image(testimage.Image{Layers: []testimage.Layer{good}}), l.Image(testimage.Image{Platform: "linux/arm64", Layers: []testimage.Layer{bad}})))
	w.push(t, l, "index", "v1")
	w.convertAll(t)
	if w.drop(t, time.Hour); w.has(t, goodLayer.Digest) || !w.has(t, badLayer.Digest) {
		t.Errorf("the converted platform's layer is there: %t, that of the one that failed: %t", w.has(t, goodLayer.Digest), w.has(t, badLayer.Digest))
	}
}
