package main

import (
	"bytes"
	"strings"
	"testing"

	"quarry/internal/testimage"
	"quarry/store/bucket/buckettest"
	"quarry/store/jobs"
)

// objects are what a bucket has for workers and for who pulls.
func (w *pushWorld) objects(t *testing.T) map[string][]byte {
	t.Helper()
	all := map[string][]byte{}
	for _, prefix := range []string{"images/", "bootstraps/", "configs/", "blobs/", "oci/"} {
		for o, err := range w.bucket.List(t.Context(), prefix) {
			if err != nil {
				t.Fatal(err)
			}
			all[o.Key] = buckettest.Bytes(t, w.bucket, o.Key)
		}
	}
	return all
}

// A push of what the tag names already makes whatever of it is missing or damaged anew.
func TestAPushMadeAgainHeals(t *testing.T) {
	w := newPushWorld(t, false)
	l := testimage.New(t)
	l.Tag("one", l.Image(testimage.Image{Layers: []testimage.Layer{layerOf("1")}}))
	l.Tag("two", l.Index(l.Image(testimage.Image{Layers: []testimage.Layer{layerOf("2")}})))
	push := func() {
		t.Helper()
		w.push(t, l, "one", "v1")
		w.push(t, l, "two", "v2")
		w.convertAll(t)
	}
	push()
	want := w.objects(t)
	damages := map[string]func(key string){
		"missing": func(key string) {
			if err := w.bucket.Delete(t.Context(), key); err != nil {
				t.Fatal(err)
			}
		},
		"empty":   func(key string) { buckettest.Put(t, w.bucket, key, nil) },
		"flipped": func(key string) { buckettest.Corrupt(t, w.bucket, key, int64(len(want[key])/2)) },
	}
	for what, damage := range damages {
		for key := range want {
			if what == "flipped" && strings.HasPrefix(key, "oci/blobs/") {
				continue // it is found when it is read
			}
			damage(key)
			push()
			if got := w.objects(t); !bytes.Equal(got[key], want[key]) || len(got) != len(want) {
				t.Errorf("%s was %s: %q after the push, of %d objects %d", key, what, got[key], len(want), len(got))
				buckettest.Put(t, w.bucket, key, want[key])
			}
		}
	}
}

// A job that failed is done again by a push of the same image.
func TestAPushMadeAgainRepeatsAFailedJob(t *testing.T) {
	w := newPushWorld(t, false)
	l := testimage.New(t)
	l.Tag("one", l.Image(testimage.Image{Layers: []testimage.Layer{{Entries: []testimage.Entry{testimage.File("etc/.wh.", "")}}}}))
	source := w.push(t, l, "one", "v1")
	w.convertAll(t)
	first := w.jobs.Of(source)
	if len(first) != 1 || first[0].State != jobs.Failed {
		t.Fatalf("the bad image: %+v", first)
	}
	w.push(t, l, "one", "v1")
	if again := w.jobs.Of(source); len(again) != 1 || again[0].State != jobs.Queued {
		t.Errorf("pushed again: %+v", again)
	}
	w.convertAll(t)
	if again := w.jobs.Of(source); again[0].State != jobs.Failed || !again[0].Created.After(first[0].Created) {
		t.Errorf("after the push: %+v, before %+v", again, first)
	}
}
