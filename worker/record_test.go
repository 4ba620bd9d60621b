package worker_test

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/internal/need"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/reader"
	"quarry/worker/timeline"
)

var update = flag.Bool("update", false, "write the golden files anew")

// openDir returns a worker folder of its own; short enough for sockets.
func openDir(t *testing.T) folder.Dir {
	t.Helper()
	base := need.ShortDir(t)
	d, err := folder.Open(filepath.Join(base, "w"))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func sampleRecord(began time.Time) worker.Record {
	d := chunk.Sum([]byte("chunk"))
	return worker.Record{
		Version: worker.RecordVersion, Began: began, Image: "t/ok", ImageID: chunk.Sum([]byte("image")),
		DurationMillis: 12.5, FirstOutputMillis: 9, Started: true, ExitStatus: 3,
		Stats: reader.Stats{
			Opening: "1-1", Opened: began, Requests: 4, WireBytes: 500, BucketBytes: 400,
			Tiers:       []reader.Tier{{Tier: reader.TierStore, Reads: 1, ReadBytes: 5, Fetched: reader.Count{Chunks: 2, Bytes: 3}}},
			Hedged:      reader.Hedged{Asked: reader.Count{Chunks: 2, Bytes: 3}, Twice: reader.Count{Chunks: 1, Bytes: 2}, Requests: 4, Won: 1, Again: 5},
			Failed:      map[store.Outcome]int64{store.Corrupt: 1},
			FailedReads: 1,
			Errors:      []reader.ReadError{{Path: "/bin/\x1b[31m", Chunk: d, Outcome: store.Corrupt, Err: "bad", When: began}},
			Slowest:     []reader.SlowRead{{Path: "/a", Chunk: d, Number: 7, Tier: reader.TierStore, Wait: 1.5, When: began}},
		},
		Steps: []timeline.Step{{Name: "sweep", Took: 1}},
	}
}

func TestARecordIsReadAsItWasSaved(t *testing.T) {
	d := openDir(t)
	want := sampleRecord(time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC))
	name, err := worker.SaveRecord(d, want)
	if err != nil {
		t.Fatal(err)
	}
	if !worker.IsRecordName(name) || !strings.HasPrefix(name, "20260102T030405.006Z-") {
		t.Errorf("record is called %q", name)
	}
	got, err := worker.ReadRecord(d, name)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestTheFolderRemembersTheLastRuns(t *testing.T) {
	d := openDir(t)
	began := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var names []string
	for i := range 70 {
		name, err := worker.SaveRecord(d, sampleRecord(began.Add(time.Duration(i)*time.Second)))
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, name)
	}
	got, err := worker.Records(d)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(names[70-64:], got); diff != "" {
		t.Error(diff)
	}
	if _, err := worker.ReadRecord(d, names[0]); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the first of 70 runs: %v, want not there", err)
	}
}

func TestAFolderWithoutRunsHasNoRecords(t *testing.T) {
	if got, err := worker.Records(openDir(t)); len(got) != 0 || err != nil {
		t.Errorf("records %v, error %v", got, err)
	}
}

func TestWhatIsNoRecordIsRefused(t *testing.T) {
	d := openDir(t)
	good, err := json.Marshal(sampleRecord(time.Now()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := worker.ReadRecord(d, "../serials"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a name with a path: %v, want not there", err)
	}
	for name, content := range map[string]string{
		"empty":           "",
		"cut off":         string(good[:len(good)-1]),
		"the old version": `{"version":1}`,
		"a newer version": fmt.Sprintf(`{"version":%d}`, worker.RecordVersion+1),
		"unknown field":   `{"version":2,"x":1}`,
		"two documents":   string(good) + string(good),
		"huge":            strings.Repeat(" ", 9<<20),
	} {
		path := filepath.Join(d.Path(), "r.json")
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := worker.ReadRecordFile(path); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// What explain and others read does not change without a version.
func TestTheFormOfARecordIsPinned(t *testing.T) {
	got, err := json.MarshalIndent(sampleRecord(time.Date(2026, 1, 2, 3, 4, 5, 6e6, time.UTC)).WithLists(), "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	got = append(got, '\n')
	path := filepath.Join("testdata", "record.golden")
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(string(want), string(got)); d != "" {
		t.Error(d)
	}
}

// What is accepted is written and read again as the same.
func FuzzDecodeRecord(f *testing.F) {
	seed, err := os.ReadFile(filepath.Join("testdata", "record.golden"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(seed)
	f.Add([]byte(`{"version":2}`))
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, err := worker.DecodeRecord(raw)
		if err != nil {
			return
		}
		once, err := json.Marshal(r)
		if err != nil {
			return // a time that can be read and not written
		}
		again, err := worker.DecodeRecord(once)
		if err != nil {
			t.Fatalf("%v: %s", err, once)
		}
		twice, err := json.Marshal(again)
		if err != nil || string(twice) != string(once) {
			t.Errorf("read again it is %s, error %v, was %s", twice, err, once)
		}
	})
}
