package jobs_test

import (
	"bytes"
	"errors"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/jobs"
)

var update = flag.Bool("update", false, "write the golden files anew")

var created = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)

func aSource(s string) chunk.Digest { return chunk.Sum([]byte(s)) }

func aFailed() jobs.Record {
	ended := created.Add(time.Minute)
	return jobs.Record{
		Source: aSource("source"), Platform: "linux/amd64", Names: []jobs.Name{{Repo: "team/img", Tag: "v1"}, {Repo: "img"}},
		State: jobs.Failed, Created: created, Ended: &ended, Attempts: 2, Interrupted: 1, Doubted: true,
		Reason: &jobs.Reason{Layer: aSource("layer").String(), Entry: `a<b`, Message: `read layer: entry "a<b": why`, Blame: jobs.BlameInput},
	}
}

func aDone() jobs.Record {
	r := aFailed()
	r.State, r.Reason, r.Doubted, r.Platform = jobs.Done, nil, false, ""
	r.Result = &jobs.Result{Image: aSource("image"), Platform: "linux/arm/v7", Signed: true, Layers: 3, LayersKnown: 1, NewPlainBytes: 10, NewStoredBytes: 5}
	return r
}

func aQueued() jobs.Record {
	return jobs.Record{Source: aSource("source"), Names: []jobs.Name{{Repo: "img", Tag: "v1"}}, State: jobs.Queued, Created: created}
}

func encode(t testing.TB, r jobs.Record) []byte {
	t.Helper()
	b, err := jobs.Encode(r)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// A difference here is a change of the format: it needs a new version and a line
// in FORMAT.md.
func TestGolden(t *testing.T) {
	for file, r := range map[string]jobs.Record{"failed.golden": aFailed(), "done.golden": aDone(), "queued.golden": aQueued()} {
		got, path := encode(t, r), filepath.Join("testdata", file)
		if *update {
			if err := os.WriteFile(path, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%s differs; got:\n%s", file, got)
		}
	}
}

func TestARecordIsReadAsItWasWritten(t *testing.T) {
	for _, r := range []jobs.Record{aFailed(), aDone(), aQueued()} {
		b := encode(t, r)
		got, err := jobs.Decode(b)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(got, r); diff != "" {
			t.Errorf("got %s", diff)
		}
		if _, err := jobs.Decode(append(b, '\n')); !errors.Is(err, jobs.ErrMalformed) {
			t.Errorf("with a newline: %v", err)
		}
		if _, err := jobs.Decode(bytes.Replace(b, []byte(`"version":1`), []byte(`"version":2`), 1)); !errors.Is(err, jobs.ErrVersion) {
			t.Errorf("of version 2: %v", err)
		}
		if err := bucket.ValidKey(jobs.Key(r.ID())); err != nil {
			t.Error(err)
		}
	}
}

func TestARecordOfOddFieldsIsRefused(t *testing.T) {
	for name, change := range map[string]func(*jobs.Record){
		"no source":             func(r *jobs.Record) { r.Source = chunk.Digest{} },
		"no names":              func(r *jobs.Record) { r.Names = nil },
		"a name twice":          func(r *jobs.Record) { r.Names = []jobs.Name{{Repo: "a"}, {Repo: "a"}} },
		"a name that is none":   func(r *jobs.Record) { r.Names = []jobs.Name{{Repo: "A"}} },
		"too many names":        func(r *jobs.Record) { r.Names = manyNames(jobs.MaxNames + 1) },
		"a platform spelt else": func(r *jobs.Record) { r.Platform = "linux/x86_64" },
		"an unknown state":      func(r *jobs.Record) { r.State = "odd" },
		"no end":                func(r *jobs.Record) { r.Ended = nil },
		"no reason":             func(r *jobs.Record) { r.Reason = nil },
		"an empty reason":       func(r *jobs.Record) { r.Reason = &jobs.Reason{Blame: jobs.BlameInput} },
		"an unknown blame":      func(r *jobs.Record) { r.Reason = &jobs.Reason{Message: "m", Blame: "you"} },
		"a layer that is none":  func(r *jobs.Record) { r.Reason = &jobs.Reason{Message: "m", Blame: "input", Layer: "sha256:1"} },
		"a result that failed":  func(r *jobs.Record) { r.Result = aDone().Result },
		"attempts below zero":   func(r *jobs.Record) { r.Attempts = -1 },
		"no time":               func(r *jobs.Record) { r.Created = time.Time{} },
		"done without a result": func(r *jobs.Record) { r.State, r.Reason = jobs.Done, nil },
	} {
		r := aFailed()
		change(&r)
		if b, err := jobs.Encode(r); !errors.Is(err, jobs.ErrMalformed) {
			t.Errorf("%s: encoded as %s (%v)", name, b, err)
		}
	}
}

func manyNames(n int) []jobs.Name {
	var names []jobs.Name
	for i := range n {
		names = append(names, jobs.Name{Repo: strings.Repeat("a", 255), Tag: strings.Repeat("t", 120) + string(rune('a'+i/26)) + string(rune('a'+i%26))})
	}
	return names
}

// The largest record must be one that can be read again.
func TestTheLargestRecordFits(t *testing.T) {
	for _, text := range []string{strings.Repeat("\x00", 1<<20), strings.Repeat("é", 1<<20), strings.Repeat("\xff<", 1<<20)} {
		r := aFailed()
		r.Names = manyNames(jobs.MaxNames)
		r.Reason.Entry, r.Reason.Message = text, "begin "+text+" end"
		got, err := jobs.Decode(encode(t, r))
		if err != nil {
			t.Fatal(err)
		}
		if m := got.Reason.Message; !strings.HasPrefix(m, "begin ") || !strings.HasSuffix(m, " end") {
			t.Errorf("message %.20q…", m)
		}
	}
}

func FuzzDecode(f *testing.F) {
	for _, r := range []jobs.Record{aFailed(), aDone(), aQueued()} {
		f.Add(encode(f, r))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := jobs.Decode(b)
		if err != nil {
			return
		}
		if again, err := jobs.Encode(r); err != nil || !bytes.Equal(again, b) {
			t.Errorf("decoded and encoded again: %s, %v", again, err)
		}
	})
}
