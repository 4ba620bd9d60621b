package worker

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"quarry/store/chunk"
	"quarry/worker/folder"
	"quarry/worker/reader"
	"quarry/worker/timeline"
)

// RecordVersion is the version of a Record. 2 has steps, tiers, outcomes,
// prefetch, bucket bytes and slowest reads beside what 1 had, and counts the
// times from the command's begin, with its sweep of the worker folder.
const RecordVersion = 2

// Record is what one run cost: where its time went, and its bytes. It is the
// --stats file, and stays in the worker folder for a while. Sizes are in bytes,
// times in milliseconds since Began; wire bytes and requests count everything
// between this worker and its stores.
type Record struct {
	Version           int          `json:"version"`
	Began             time.Time    `json:"began"`
	Image             string       `json:"image"`
	ImageID           chunk.Digest `json:"image_id,omitzero"` // not there when the image was not had
	ImageSizeBytes    int64        `json:"image_size_bytes"`  // file content, each hard link once
	BootstrapBytes    int64        `json:"bootstrap_bytes"`
	FirstOutputMillis float64      `json:"first_output_ms"` // 0: the command wrote nothing
	DurationMillis    float64      `json:"duration_ms"`     // to the command's end, or to what kept it from running
	Started           bool         `json:"started"`         // the command ran
	ExitStatus        int          `json:"exit_status"`     // of quarry run, as the shell has it
	Error             string       `json:"error,omitempty"`
	// Unknown says why the figures of the reader are not those of the whole run.
	Unknown string `json:"reader_figures_unknown,omitempty"`
	// ReaderRestarts is how often the mount had to find another reader.
	ReaderRestarts int64 `json:"reader_restarts"`
	reader.Stats
	Steps []timeline.Step `json:"steps"`
}

// WithLists returns the record with empty lists in the place of those that are
// not there: in JSON a list is a list.
func (r Record) WithLists() Record {
	r.Stats = r.Stats.WithLists()
	if r.Steps == nil {
		r.Steps = []timeline.Step{}
	}
	return r
}

const (
	// maxRecords is how many runs the folder remembers, the last ones.
	maxRecords = 64
	// maxRecord bounds one record: 64 failed reads with a path of 4096 bytes and an
	// error of as many, and 32 slow reads, each byte of which may take six in JSON,
	// are 3.9 MB.
	maxRecord = 8 << 20
	// recordTime is the time in a record's name, in UTC; names sort by it.
	recordTime = "20060102T150405.000Z"
	recordExt  = ".json"
)

// recordName matches the name of a record, without its ending.
var recordName = regexp.MustCompile(`^[0-9]{8}T[0-9]{6}\.[0-9]{3}Z-[a-z2-7]{8}$`)

// IsRecordName reports whether name is one that a record can have.
func IsRecordName(name string) bool { return recordName.MatchString(name) }

func recordPath(d folder.Dir, name string) string {
	return filepath.Join(d.Runs(), name+recordExt)
}

// SaveRecord keeps a record in the folder, as the last one, and removes those
// that are too old. It returns its name.
func SaveRecord(d folder.Dir, r Record) (name string, err error) {
	b, err := json.Marshal(r)
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(d.Runs(), 0o700); err != nil {
		return "", err
	}
	name = r.Began.UTC().Format(recordTime) + "-" + strings.ToLower(rand.Text()[:8])
	path := recordPath(d, name)
	// It need not survive a power cut, so nothing waits for the disk.
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return "", err
	}
	if err := os.Rename(tmp, path); err != nil {
		return "", err
	}
	return name, trimRecords(d)
}

// trimRecords removes all but the last records, and what is left of one that was
// being written.
func trimRecords(d folder.Dir) error {
	entries, err := os.ReadDir(d.Runs())
	if err != nil {
		return err
	}
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	var errs []error
	for _, name := range names[:max(0, len(names)-maxRecords)] {
		if err := os.Remove(filepath.Join(d.Runs(), name)); !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Records names the runs the folder remembers, the last one at the end.
func Records(d folder.Dir) ([]string, error) {
	entries, err := os.ReadDir(d.Runs())
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var names []string
	for _, e := range entries {
		if name, ok := strings.CutSuffix(e.Name(), recordExt); ok && IsRecordName(name) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names, nil
}

// ReadRecord reads the record of a run by its name. Errors: fs.ErrNotExist.
func ReadRecord(d folder.Dir, name string) (Record, error) {
	if !IsRecordName(name) {
		return Record{}, fmt.Errorf("%q names no run: %w", name, fs.ErrNotExist)
	}
	return ReadRecordFile(recordPath(d, name))
}

// ReadRecordFile reads a record from a --stats file.
func ReadRecordFile(path string) (Record, error) {
	raw, err := folder.ReadBounded(path, maxRecord)
	if err != nil {
		return Record{}, err
	}
	r, err := DecodeRecord(raw)
	if err != nil {
		return Record{}, fmt.Errorf("record of a run %s: %w", path, err)
	}
	return r, nil
}

// DecodeRecord reads the JSON of a record, strictly.
func DecodeRecord(raw []byte) (Record, error) {
	var v struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(raw, &v); err != nil { // of more than one document, too
		return Record{}, err
	}
	if v.Version != RecordVersion {
		return Record{}, fmt.Errorf("version %d, this program knows %d", v.Version, RecordVersion)
	}
	var r Record
	d := json.NewDecoder(bytes.NewReader(raw))
	d.DisallowUnknownFields()
	err := d.Decode(&r)
	return r, err
}
