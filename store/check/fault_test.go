package check_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/converter"
	"quarry/internal/testimage"
	"quarry/signer"
	"quarry/store/bucket/buckettest"
	"quarry/store/catalog"
	"quarry/store/check"
	"quarry/store/chunk"
	"quarry/store/image"
)

// before lets the check see the bucket through fault.
func (w *world) before(fault func(buckettest.Op) error) {
	w.Bucket = &buckettest.Faulty{Bucket: w.bucket, Journal: w.bucket, Before: fault}
}

func (w *world) objects(t *testing.T) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, key := range buckettest.Keys(t, w.bucket, "") {
		all[key] = string(buckettest.Bytes(t, w.bucket, key))
	}
	return all
}

// A bucket that fails says nothing of what it holds: the check ends with the
// bucket's error, blames nothing and removes nothing.
func TestABucketThatCannotBeReachedIsNoDamage(t *testing.T) {
	w := newWorld(t)
	want := w.objects(t)
	faults := []buckettest.Op{{Method: "List", Key: image.ImagesPrefix}, {Method: "List", Key: image.LayersPrefix}}
	for key := range want {
		if strings.HasPrefix(key, "packs/") {
			continue // read by the store
		}
		faults = append(faults, buckettest.Op{Method: "Stat", Key: key}, buckettest.Op{Method: "ReadAt", Key: key})
		if sigs, _, ok := strings.Cut(key, "/sigs/"); ok {
			faults = append(faults, buckettest.Op{Method: "List", Key: sigs + "/sigs/"})
		}
	}
	for _, fault := range faults {
		w.before(func(op buckettest.Op) error {
			if op == fault {
				return buckettest.ErrInjected
			}
			return nil
		})
		var found []check.Problem
		_, err := check.Run(t.Context(), w.Config, func(p check.Problem) { found = append(found, p) })
		if !errors.Is(err, buckettest.ErrInjected) || len(found) > 0 {
			t.Errorf("%s of %s fails: error %v, problems %+v", fault.Method, fault.Key, err, found)
		}
		if diff := cmp.Diff(w.objects(t), want); diff != "" {
			t.Fatalf("%s of %s fails: objects (-got +want):\n%s", fault.Method, fault.Key, diff)
		}
	}
}

func TestAMACKeyThatIsNoneRemovesNothing(t *testing.T) {
	w := newWorld(t)
	want := w.objects(t)
	w.MACKey = nil
	if _, err := check.Run(t.Context(), w.Config, func(p check.Problem) { t.Errorf("found %+v", p) }); err == nil {
		t.Error("no error")
	}
	if diff := cmp.Diff(w.objects(t), want); diff != "" {
		t.Errorf("objects (-got +want):\n%s", diff)
	}
}

func TestARecordOfAnotherLayerIsRemoved(t *testing.T) {
	w := newWorld(t)
	key := buckettest.Keys(t, w.bucket, image.LayersPrefix)[0]
	other := image.LayerKey(chunk.Sum([]byte("other")))
	buckettest.Put(t, w.bucket, other, buckettest.Bytes(t, w.bucket, key))
	found, _ := w.run(t)
	if len(found) != 1 || found[0].Object != other {
		t.Errorf("found %+v, want %s", found, other)
	}
	if keys := buckettest.Keys(t, w.bucket, image.LayersPrefix); !slices.Equal(keys, []string{key}) {
		t.Errorf("records %v, want %s", keys, key)
	}
}

// convertMany converts images that share the content of the first and returns
// their names, sorted.
func (w *world) convertMany(t *testing.T, n int) []string {
	t.Helper()
	names := []string{"team/task:v1"}
	for i := range n {
		name := image.Ref{Repo: "team/task", Tag: fmt.Sprintf("w%02d", i)}
		l := testimage.Build(t, w.layer, testimage.Layer{Entries: []testimage.Entry{testimage.File("own", name.Tag)}})
		if _, err := converter.Convert(t.Context(), w.conv, converter.Request{Source: l.Source(""), Name: name}); err != nil {
			t.Fatal(err)
		}
		names = append(names, name.Repo+":"+name.Tag)
	}
	return names
}

func TestTheImagesOfAProblemAreBounded(t *testing.T) {
	const more = 10
	want := func(names []string) []string {
		return append(slices.Clone(names[:check.MaxImages]), fmt.Sprintf("and %d more", more))
	}
	t.Run("many images with one chunk", func(t *testing.T) {
		w := newWorld(t)
		pack := buckettest.Keys(t, w.bucket, "packs/")[0]
		names := w.convertMany(t, check.MaxImages+more-1)
		buckettest.Corrupt(t, w.bucket, pack, 200)
		found, _ := w.run(t)
		if len(found) != 1 || found[0].Kind != "chunk-damaged" {
			t.Fatalf("found %+v, want one damaged chunk", found)
		}
		if diff := cmp.Diff(found[0].Images, want(names)); diff != "" {
			t.Errorf("images (-got +want):\n%s", diff)
		}
	})
	t.Run("many names of one image", func(t *testing.T) {
		w := newWorld(t)
		n, _ := w.Catalog.Name("team/task", "v1")
		names := []string{"team/task:v1"}
		for i := range check.MaxImages + more - 1 {
			other := catalog.Name{Repo: "team/task", Tag: fmt.Sprintf("w%02d", i), Source: n.Source, Serial: 1}
			if err := w.Catalog.SetName(t.Context(), other); err != nil {
				t.Fatal(err)
			}
			names = append(names, other.Repo+":"+other.Tag)
		}
		if err := w.bucket.Delete(t.Context(), buckettest.Keys(t, w.bucket, "configs/")[0]); err != nil {
			t.Fatal(err)
		}
		found, _ := w.run(t)
		if len(found) != 1 {
			t.Fatalf("found %+v, want the config", found)
		}
		if diff := cmp.Diff(found[0].Images, want(names)); diff != "" {
			t.Errorf("images (-got +want):\n%s", diff)
		}
	})
}

// Names without an image come in the order of the catalog, and finding them
// takes no listing of their own.
func TestNamesThatLeadNowhereAreToldInOrder(t *testing.T) {
	w := newWorld(t)
	var want []string
	for i := range 10 {
		n := catalog.Name{Repo: "team/gone", Tag: fmt.Sprintf("v%d", i), Source: chunk.Sum([]byte{byte(i)}), Serial: 1}
		if err := w.Catalog.SetName(t.Context(), n); err != nil {
			t.Fatal(err)
		}
		want = append(want, n.Repo+":"+n.Tag)
	}
	lists := 0
	w.before(func(op buckettest.Op) error {
		if op.Method == "List" {
			lists++
		}
		return nil
	})
	found, _ := w.run(t)
	var got []string
	for _, p := range found {
		got = append(got, p.Images...)
	}
	if diff := cmp.Diff(got, want); diff != "" {
		t.Errorf("names (-got +want):\n%s", diff)
	}
	if lists != 7 {
		t.Errorf("%d listings, want images, signatures of the one image, layers, failures, jobs, traces, pushed blobs", lists)
	}
}

func TestAMappingMustLeadToABootstrapWithItsBlob(t *testing.T) {
	renamed := func(t *testing.T, w *world) string { // the same chunks under other names
		entries := slices.Clone(w.layer.Entries)
		entries[0].Name = "aa"
		return w.bootstrapOf(t, testimage.Layer{Entries: entries})
	}
	for name, tc := range map[string]struct {
		mapping func(t *testing.T, w *world) string
		says    string // empty: it is good
	}{
		"to another with the blob": {renamed, ""},
		"to another without it": {func(t *testing.T, w *world) string {
			return w.bootstrapOf(t, testimage.Layer{Entries: []testimage.Entry{testimage.File("x", "other")}})
		}, "another virtual blob"},
		"to one without data": {func(t *testing.T, w *world) string {
			return w.bootstrapOf(t, testimage.Layer{Entries: []testimage.Entry{testimage.Dir("x")}})
		}, "another virtual blob"},
		"to none":     {func(*testing.T, *world) string { return chunk.Sum(nil).String() }, "not found"},
		"no digest":   {func(*testing.T, *world) string { return "sha256:x" }, "digest"},
		"much longer": {func(*testing.T, *world) string { return strings.Repeat("x", 1000) }, "too large"},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			key := buckettest.Keys(t, w.bucket, "blobs/")[0]
			text := tc.mapping(t, w)
			buckettest.Put(t, w.bucket, key, []byte(text))
			found, _ := w.run(t)
			found = slices.DeleteFunc(found, func(p check.Problem) bool {
				return !slices.Contains(p.Images, "team/task:v1") // of the second image with the blob
			})
			if tc.says == "" {
				if len(found) > 0 {
					t.Errorf("found %+v", found)
				}
				return
			}
			if len(found) != 1 || found[0].Object != key || !strings.Contains(found[0].Message, tc.says) {
				t.Errorf("found %+v, want %s that says %q", found, key, tc.says)
			}
			w.convert(t)
			if found, _ := w.run(t); len(found) > 0 {
				t.Errorf("after converting again: %+v", found)
			}
		})
	}
}

// bootstrapOf converts an image and returns its bootstrap's digest.
func (w *world) bootstrapOf(t *testing.T, l testimage.Layer) string {
	t.Helper()
	r, err := converter.Convert(t.Context(), w.conv, converter.Request{Source: testimage.Build(t, l).Source("")})
	if err != nil {
		t.Fatal(err)
	}
	return r.Statement.Bootstrap.String()
}

// A conversion replaces the statement after the check has read it and before it
// reads the signatures.
func TestAStatementThatIsReplacedMeanwhileIsNoDamage(t *testing.T) {
	w := newWorld(t)
	key := slices.DeleteFunc(buckettest.Keys(t, w.bucket, image.ImagesPrefix), func(k string) bool { return strings.Contains(k, "/sigs/") })[0]
	s, err := image.DecodeStatement(buckettest.Bytes(t, w.bucket, key))
	if err != nil {
		t.Fatal(err)
	}
	s.Converter = "quarry-converter/next"
	payload, err := image.EncodeStatement(s)
	if err != nil {
		t.Fatal(err)
	}
	sig := signer.Sign(w.conv.SigningKey, image.StatementType, payload)
	raw, err := sig.Encode()
	if err != nil {
		t.Fatal(err)
	}
	w.before(func(op buckettest.Op) error {
		if op.Method == "List" && op.Key == image.SigPrefix(s.Source, s.Platform) {
			buckettest.Put(t, w.bucket, key, payload)
			buckettest.Put(t, w.bucket, image.SigKey(s.Source, s.Platform, sig.KeyID), raw)
		}
		return nil
	})
	if found, _ := w.run(t); len(found) > 0 {
		t.Errorf("found %+v", found)
	}
}

func TestAStatementUnderAKeyThatIsNoneIsAProblem(t *testing.T) {
	w := newWorld(t)
	key := image.ImagesPrefix + "abc/linux-amd64/statement"
	buckettest.Put(t, w.bucket, key, []byte("{}"))
	if found, _ := w.run(t); len(found) != 1 || found[0].Object != key {
		t.Errorf("found %+v, want %s", found, key)
	}
}
