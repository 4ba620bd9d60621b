package converter_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/converter"
	"quarry/internal/testimage"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
)

// checkNothingDangles reads everything that is there, from every name and
// statement down to every chunk.
func (s *store) checkNothingDangles(t *testing.T) {
	t.Helper()
	for _, n := range s.Catalog.Names() {
		s.verified(t, image.Ref{Repo: n.Repo, Tag: n.Tag})
	}
	for _, key := range buckettest.Keys(t, s.mem, image.ImagesPrefix) {
		if strings.HasSuffix(key, "/statement") {
			st, err := image.DecodeStatement(buckettest.Bytes(t, s.mem, key))
			if err != nil {
				t.Fatal(err)
			}
			s.files(t, st)
		}
	}
	for _, key := range buckettest.Keys(t, s.mem, "layers/") {
		rec, err := image.DecodeLayer(buckettest.Bytes(t, s.mem, key), macKey)
		if err != nil {
			t.Fatal(err)
		}
		for _, e := range rec.Entries {
			for _, d := range e.Chunks {
				if _, err := s.Store.Get(t.Context(), d, nil); err != nil {
					t.Errorf("%s names a chunk that is not there: %v", key, err)
				}
			}
		}
	}
}

// TestEveryOperationMayFail lets the k-th operation on the bucket fail, with and
// without effect, for every k that a conversion over an older image has. The
// conversion reports it or succeeds; a store opened anew, without its index,
// refers to nothing that is missing and arrives at the bytes of a run without
// faults.
func TestEveryOperationMayFail(t *testing.T) {
	older, newer := testimage.Build(t, base).Source(""), testimage.Build(t, base, top).Source("")
	clean := newStore(t)
	clean.convert(t, older)
	start := clean.mem.Clone()
	clean.convert(t, newer)
	want := clean.objects(t)

	for _, applied := range []bool{false, true} {
		for k := int64(1); ; k++ {
			failed := false
			ok := t.Run(fmt.Sprintf("operation %d, applied %t", k, applied), func(t *testing.T) {
				failed = failOne(t, start.Clone(), newer, k, applied, want)
			})
			if !ok || !failed {
				break
			}
			if k > 200 {
				t.Fatal("a conversion has too many operations for this test")
			}
		}
	}
}

// failOne reports whether there was a k-th operation to fail.
func failOne(t *testing.T, b *mem.Bucket, src string, k int64, applied bool, want map[string]string) bool {
	faulty := &buckettest.Faulty{}
	s := openStore(t, b, faulty)
	hit := false
	nth := buckettest.FailNth(k)
	fault := func(op buckettest.Op) error {
		err := nth(op)
		hit = hit || err != nil
		return err
	}
	if applied {
		faulty.After = fault
	} else {
		faulty.Before = fault
	}
	_, err := converter.Convert(t.Context(), s.Config, request(src))
	faulty.Before, faulty.After = nil, nil
	if err == nil {
		s.verified(t, latest)
	}
	s.checkNothingDangles(t)

	again := openStore(t, b, nil)
	again.checkNothingDangles(t)
	again.convert(t, src)
	if diff := cmp.Diff(again.objects(t), want); diff != "" {
		t.Errorf("objects after a second run (-got +want):\n%s", diff)
	}
	again.verified(t, latest)
	return hit
}

// TestACrashBetweenAnyTwoWritesLeavesNoDanglingReference copies the bucket before
// every write and opens a store on the copy, as after a crash at that moment.
func TestACrashBetweenAnyTwoWritesLeavesNoDanglingReference(t *testing.T) {
	older, newer := testimage.Build(t, base).Source(""), testimage.Build(t, base, top).Source("")
	b := mem.New()
	openStore(t, b, nil).convert(t, older)
	var copies []*mem.Bucket
	var order []string
	faulty := &buckettest.Faulty{Before: func(op buckettest.Op) error {
		switch op.Method {
		case "Put", "Append", "Delete":
			copies = append(copies, b.Clone())
			kind, _, _ := strings.Cut(op.Key, "/")
			order = append(order, kind)
		}
		return nil
	}}
	s := openStore(t, b, faulty)
	r := s.convert(t, newer)
	// The record that one is under way, pack, journal, layer record, bootstrap,
	// config, blob, statement, signature, name; the record goes.
	want := []string{"failures", "packs", "", "layers", "bootstraps", "configs", "blobs", "images", "images", "", "failures"}
	if diff := cmp.Diff(order, want); diff != "" {
		t.Errorf("order of writes (-got +want):\n%s", diff)
	}
	for i, c := range copies {
		crashed := openStore(t, c, nil)
		crashed.checkNothingDangles(t)
		if n, _ := crashed.Catalog.Name("img", "latest"); n.Serial != 1 && i < len(copies)-1 {
			t.Errorf("before write %d the name has serial %d", i, n.Serial)
		}
		if got := crashed.convert(t, newer); got.ImageID != r.ImageID {
			t.Errorf("after a crash before write %d the image id is %s, want %s", i, got.ImageID, r.ImageID)
		}
	}
}

// TestATagThatMovesMeanwhileIsSetAgain lets another conversion take the serial
// between the moment it was looked up and SetName.
func TestATagThatMovesMeanwhileIsSetAgain(t *testing.T) {
	s := newStore(t)
	calls := 0
	s.Now = func() time.Time { // asked for every name statement
		if calls++; calls == 1 {
			other := catalog.Name{Repo: "img", Tag: "latest", Source: chunk.Sum(nil), Serial: 1}
			if err := s.Catalog.SetName(t.Context(), other); err != nil {
				t.Error(err)
			}
		}
		return now
	}
	s.convert(t, testimage.Build(t, base).Source(""))
	if v, _ := s.verified(t, latest); v.Name.Serial != 2 {
		t.Errorf("serial %d, want 2", v.Name.Serial)
	}
}
