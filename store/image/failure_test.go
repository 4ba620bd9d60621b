package image_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
)

func aFailure() image.Failure {
	d := chunk.Sum([]byte("source"))
	return image.Failure{
		Repo: "team/img", Tag: "latest", State: image.FailureFailed, Source: "oci:/x", Platform: "linux/arm/v7", Digest: &d,
		Converter: "quarry-converter/2", Time: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC),
		Reason: `layer 2 of 3: entry "a<b": "why"`, Blame: image.BlameInput,
	}
}

func TestAFailureIsReadAsItWasWritten(t *testing.T) {
	unfinished := aFailure()
	unfinished.State, unfinished.Reason, unfinished.Blame, unfinished.Digest = image.FailureUnfinished, "", "", nil
	for _, f := range []image.Failure{aFailure(), unfinished} {
		b, err := image.EncodeFailure(f)
		if err != nil {
			t.Fatal(err)
		}
		got, err := image.DecodeFailure(b)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(got, f); diff != "" {
			t.Errorf("got %s", diff)
		}
		if _, err := image.DecodeFailure(append(b, '\n')); !errors.Is(err, image.ErrMalformed) {
			t.Errorf("with a newline: %v", err)
		}
		if _, err := image.DecodeFailure(bytes.Replace(b, []byte(`"version":1`), []byte(`"version":2`), 1)); !errors.Is(err, image.ErrVersion) {
			t.Errorf("of version 2: %v", err)
		}
	}
}

func TestAFailureOfOddFieldsIsRefused(t *testing.T) {
	for name, change := range map[string]func(*image.Failure){
		"no reason":               func(f *image.Failure) { f.Reason = "" },
		"no blame":                func(f *image.Failure) { f.Blame = "" },
		"an unknown blame":        func(f *image.Failure) { f.Blame = "you" },
		"an unknown state":        func(f *image.Failure) { f.State = "odd" },
		"unfinished and a reason": func(f *image.Failure) { f.State = image.FailureUnfinished },
		"no time":                 func(f *image.Failure) { f.Time = time.Time{} },
		"no repository":           func(f *image.Failure) { f.Repo = "" },
		"a zero digest":           func(f *image.Failure) { f.Digest = &chunk.Digest{} },
		"no converter":            func(f *image.Failure) { f.Converter = "" },
	} {
		f := aFailure()
		change(&f)
		if b, err := image.EncodeFailure(f); !errors.Is(err, image.ErrMalformed) {
			t.Errorf("%s: encoded as %s (%v)", name, b, err)
		}
	}
}

// What a hostile source puts into a name must not make a record that cannot be
// read, or a large one.
func TestLongTextsAreCut(t *testing.T) {
	for _, text := range []string{strings.Repeat("\x00", 1<<20), strings.Repeat("é", 1<<20), strings.Repeat("\xff<", 1<<20)} {
		f := aFailure()
		f.Source, f.Reason = text, "begin "+text+" end"
		b, err := image.EncodeFailure(f)
		if err != nil {
			t.Fatal(err)
		}
		got, err := image.DecodeFailure(b)
		if err != nil || len(b) > image.MaxFailure {
			t.Fatalf("%d bytes: %v", len(b), err)
		}
		if !strings.HasPrefix(got.Reason, "begin ") || !strings.HasSuffix(got.Reason, " end") {
			t.Errorf("reason %.20q…", got.Reason)
		}
	}
}

func TestFailureKeysAreKeysAndDiffer(t *testing.T) {
	seen := map[string]bool{}
	for _, n := range [][2]string{{"a", "b"}, {"a/b", "c"}, {"a", "b-c"}, {strings.Repeat("a/", 127) + "a", strings.Repeat("t", 128)}} {
		key := image.FailureKey(n[0], n[1])
		if err := bucket.ValidKey(key); err != nil || seen[key] {
			t.Errorf("key %s: %v", key, err)
		}
		seen[key] = true
	}
}

func FuzzDecodeFailure(f *testing.F) {
	b, err := image.EncodeFailure(aFailure())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := image.DecodeFailure(b)
		if err != nil {
			return
		}
		again, err := image.EncodeFailure(v)
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("decoded and encoded again: %s, %v", again, err)
		}
	})
}
