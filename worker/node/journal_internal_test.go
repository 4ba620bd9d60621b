package node

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/worker"
	"quarry/worker/sandbox"
)

const testID = "abcdefghijklmnopqrst"

func sampleJournal() journal {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	return journal{
		Version: journalVersion, ID: testID, Boot: "boot", Phase: phaseEnding, Key: "k", Asked: sandbox.Spec{Image: "app:1", Labels: map[string]string{"b": "<2>", "a": "1"}},
		Created: at, Expires: &at, Timings: map[string]int64{"total": 3}, Cause: &cause{Reason: sandbox.ReasonTTL, At: at},
	}
}

func sampleRecord() record {
	end := sandbox.End{Reason: sandbox.ReasonTTL, Blame: sandbox.BlameUser, At: time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)}
	return record{Version: recordVersion, Key: "k", Sandbox: sandbox.Sandbox{ID: testID, State: sandbox.StateEnded, End: &end}}
}

func encode(t testing.TB, v any) []byte {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

func TestAJournalIsReadAsItWasWritten(t *testing.T) {
	dir := filepath.Join(t.TempDir(), testID)
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	want := sampleJournal()
	if err := want.write(dir); err != nil {
		t.Fatal(err)
	}
	got, err := readJournal(dir)
	if err != nil || !bytes.Equal(encode(t, got), encode(t, want)) {
		t.Errorf("got %+v, %v", got, err)
	}
	other := filepath.Join(filepath.Dir(dir), strings.Repeat("z", idLength))
	if err := os.Rename(dir, other); err != nil {
		t.Fatal(err)
	}
	if _, err := readJournal(other); err == nil {
		t.Error("the journal of another sandbox was taken")
	}
}

func TestWhatIsNoJournalIsRefused(t *testing.T) {
	for name, change := range map[string]func(*journal){
		"version":             func(j *journal) { j.Version++ },
		"id":                  func(j *journal) { j.ID = "../../x" },
		"phase":               func(j *journal) { j.Phase = "done" },
		"ending for no cause": func(j *journal) { j.Cause = nil },
		"cause and no end":    func(j *journal) { j.Phase = phaseRunning },
		"reads of version 1":  func(j *journal) { j.Version, j.FailedReads = 1, 1 },
		"less than no reads":  func(j *journal) { j.FailedReads = -1 },
	} {
		j := sampleJournal()
		change(&j)
		if _, err := decodeJournal(encode(t, j)); err == nil {
			t.Errorf("%s: it was taken", name)
		}
	}
	if _, err := decodeJournal(append(encode(t, sampleJournal()), '\n')); err == nil {
		t.Error("a byte after it was taken")
	}
}

func TestWhatIsNoRecordIsRefusedAndLeftAlone(t *testing.T) {
	r := records{t.TempDir()}
	good := sampleRecord()
	if err := r.save(good); err != nil {
		t.Fatal(err)
	}
	bad := strings.Repeat("z", idLength)
	if err := os.WriteFile(r.path(bad), encode(t, good), 0o600); err != nil { // of another id
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(r.dir, ".x.json.tmp1"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	list, damaged, err := r.load()
	if err != nil || len(list) != 1 || len(damaged) != 1 || list[0].Sandbox.ID != testID {
		t.Errorf("got %+v, %v, %v", list, damaged, err)
	}
	if _, err := os.Stat(r.path(bad)); err != nil {
		t.Error("it was removed")
	}
	if _, err := os.Stat(filepath.Join(r.dir, ".x.json.tmp1")); err == nil {
		t.Error("what was half written stays")
	}
	for name, change := range map[string]func(*record){
		"version": func(r *record) { r.Version++ },
		"running": func(r *record) { r.Sandbox.State = sandbox.StateRunning },
		"no end":  func(r *record) { r.Sandbox.End = nil },
		"a token": func(r *record) { r.Sandbox.Token = "secret" },
	} {
		rec := sampleRecord()
		change(&rec)
		if _, err := decodeRecord(encode(t, rec)); err == nil {
			t.Errorf("%s: it was taken", name)
		}
	}
}

// What an earlier version has written is read, and written as this one's.
func TestAJournalOfAnEarlierVersion(t *testing.T) {
	raw, err := os.ReadFile("testdata/journal-1.golden")
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), testID)
	j, err := decodeJournal(raw)
	if err == nil {
		err = os.Mkdir(dir, 0o700)
	}
	if err == nil {
		err = j.write(dir)
	}
	if err != nil {
		t.Fatal(err)
	}
	if j, err = readJournal(dir); err != nil || j.Version != journalVersion {
		t.Errorf("got %+v, %v", j, err)
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(encode(f, sampleJournal()))
	f.Add(encode(f, sampleRecord()))
	f.Add(encode(f, identity{Version: identityVersion, Secret: strings.Repeat("ab", secretBytes), Epoch: 3}))
	f.Fuzz(func(t *testing.T, raw []byte) {
		if j, err := decodeJournal(raw); err == nil && !bytes.Equal(encode(t, j), raw) {
			t.Errorf("another text is the same journal: %q", raw)
		}
		if r, err := decodeRecord(raw); err == nil && !bytes.Equal(encode(t, r), raw) {
			t.Errorf("another text is the same record: %q", raw)
		}
		if i, err := decodeIdentity(raw); err == nil && !bytes.Equal(encode(t, i), raw) {
			t.Errorf("another text is the same identity: %q", raw)
		}
	})
}

var update = flag.Bool("update", false, "write the goldens anew")

// TestGolden pins the texts that another version would have to read.
func TestGolden(t *testing.T) {
	j := sampleJournal()
	j.Served = worker.Served{PID: 7, Start: 8, FailedReads: 9}
	before := j
	before.Version, j.FailedReads = 1, 10
	for name, v := range map[string]any{"journal": j, "journal-1": before, "record": sampleRecord(), "identity": identity{Version: identityVersion, Secret: strings.Repeat("ab", secretBytes), Epoch: 3}} {
		path := filepath.Join("testdata", name+".golden")
		got := encode(t, v)
		if *update {
			if err := os.MkdirAll("testdata", 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, got, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(path)
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%s: got %s, %v", name, got, err)
		}
	}
}
