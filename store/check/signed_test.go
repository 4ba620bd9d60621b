package check_test

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"

	"quarry/converter"
	"quarry/internal/testimage"
	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/check"
	"quarry/store/image"
)

// An image that waits for its signature is whole: it is no damage in any case.
func TestMissingSignaturesAreNotedWhereTheyAreAMust(t *testing.T) {
	for _, must := range []bool{false, true} {
		w := newWorld(t)
		w.Signed = must
		if found, _ := w.run(t); len(found) > 0 {
			t.Errorf("signed: found %+v", found)
		}
		for _, key := range w.sigs(t) {
			if err := w.bucket.Delete(t.Context(), key); err != nil {
				t.Fatal(err)
			}
		}
		found, _ := w.run(t)
		if got := kinds(found); must != slices.Equal(got, []string{"note unsigned"}) || !must && len(got) > 0 {
			t.Errorf("signatures a must: %t: found %+v", must, found)
		}
		w.convert(t)
		if found, _ := w.run(t); len(found) > 0 {
			t.Errorf("converted again: found %+v", found)
		}
		w.conv.SigningKey = nil
		unsigned := converter.Request{Source: testimage.Build(t, testimage.Layer{}).Source(""), Name: image.Ref{Repo: "team/other", Tag: "v1"}}
		if _, err := converter.Convert(t.Context(), w.conv, unsigned); err != nil {
			t.Fatal(err)
		}
		found, _ = w.run(t)
		if got := kinds(found); must != slices.Equal(got, []string{"note unsigned", "note unsigned"}) || !must && len(got) > 0 {
			t.Errorf("signatures a must: %t: found %+v", must, found)
		}
	}
}

func TestAMalformedSignatureIsNamed(t *testing.T) {
	w := newWorld(t)
	good := w.sigs(t)[0]
	other := good[:len(good)-1] + map[bool]string{true: "1", false: "0"}[good[len(good)-1] == '0']
	for _, key := range []string{other, good} {
		buckettest.Put(t, w.bucket, key, []byte("{}"))
		found, _ := w.run(t)
		if !slices.ContainsFunc(found, func(p check.Problem) bool { return p.Object == key && slices.Contains(p.Images, "team/task:v1") }) {
			t.Errorf("found %+v, want %s", found, key)
		}
	}
}

// A link in one folder of the bucket is told; all else is checked as ever.
func TestWhatIsNoObjectIsToldAndPassedOver(t *testing.T) {
	w := newWorld(t)
	key := buckettest.Keys(t, w.bucket, "configs/")[0]
	buckettest.Corrupt(t, w.bucket, key, 3)
	w.Bucket = foreign{w.bucket, []string{image.ImagesPrefix, image.LayersPrefix}}
	found, _ := w.run(t)
	var got []string
	for _, p := range found {
		got = append(got, p.Kind+" "+p.Object)
	}
	want := []string{"object " + image.ImagesPrefix, "object " + key, "object " + image.LayersPrefix}
	if !slices.Equal(got, want) {
		t.Errorf("found %v, want %v", got, want)
	}
}

// foreign is a bucket with something else than an object below some prefixes.
type foreign struct {
	bucket.Bucket
	prefixes []string
}

func (f foreign) List(ctx context.Context, prefix string) iter.Seq2[bucket.Object, error] {
	if !slices.Contains(f.prefixes, prefix) {
		return f.Bucket.List(ctx, prefix)
	}
	return func(yield func(bucket.Object, error) bool) {
		yield(bucket.Object{}, fmt.Errorf("%slink: %w", prefix, bucket.ErrDamaged))
	}
}

func (w *world) sigs(t *testing.T) []string {
	t.Helper()
	keys := slices.DeleteFunc(buckettest.Keys(t, w.bucket, image.ImagesPrefix), func(k string) bool { return !strings.Contains(k, "/sigs/") })
	if len(keys) == 0 {
		t.Fatal("no signatures: this tests nothing")
	}
	return keys
}

func kinds(ps []check.Problem) []string {
	var ks []string
	for _, p := range ps {
		kind := p.Kind
		if p.Note {
			kind = "note " + kind
		}
		ks = append(ks, kind)
	}
	return ks
}
