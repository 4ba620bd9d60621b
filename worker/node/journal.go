package node

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"quarry/internal/durable"
	"quarry/internal/strictjson"
	"quarry/store/chunk"
	"quarry/worker"
	"quarry/worker/sandbox"
)

// What a node writes down, see FORMAT.md. A journal says how far a sandbox has come,
// for the next node; a record says how it ended, for those who ask later.

const (
	journalVersion = 2 // 1 has no FailedReads
	recordVersion  = 1
	// maxJournal bounds one journal or record: a spec is at most maxSpec, and six
	// bytes of JSON may stand for one of it.
	maxJournal = 8 << 20

	journalFile = "sandbox.json"
	recordExt   = ".json"
)

// Phases of a journal.
const (
	phaseCreating = "creating" // something of it may be there
	phaseRunning  = "running"  // its create has succeeded
	phaseEnding   = "ending"   // Cause says why
)

// journal is sandbox.json in a sandbox's folder.
type journal struct {
	Version int          `json:"version"`
	ID      string       `json:"id"`
	Boot    string       `json:"boot"` // the machine's boot that it runs in
	Phase   string       `json:"phase"`
	Key     string       `json:"key"`  // the idempotency key, "" for none
	Body    chunk.Digest `json:"body"` // of the spec as it was asked for
	// Asked is the spec with the node's defaults filled in.
	Asked       sandbox.Spec     `json:"asked"`
	Created     time.Time        `json:"created"`
	Expires     *time.Time       `json:"expires"`
	ImageDigest chunk.Digest     `json:"image_digest,omitzero"`
	ImageID     chunk.Digest     `json:"image_id,omitzero"`
	Ref         string           `json:"ref"` // to the image's mount
	Served      worker.Served    `json:"served"`
	FailedReads int64            `json:"failed_reads,omitzero"` // under Served, when it was hibernated
	Policy      sandbox.Policy   `json:"policy"`
	Generation  int64            `json:"generation"`
	Timings     map[string]int64 `json:"timings"`
	Restarts    int64            `json:"restarts"`
	Cause       *cause           `json:"cause"`
}

// record is ID.json in the folder of records.
type record struct {
	Version int             `json:"version"`
	Key     string          `json:"key"`
	Body    chunk.Digest    `json:"body"`
	Failed  bool            `json:"failed"` // its create failed, which frees its key
	Sandbox sandbox.Sandbox `json:"sandbox"`
}

// idLength is how many characters of base32 an id has: 100 bits.
const idLength = 20

var idPattern = regexp.MustCompile(`^[a-z2-7]{20}$`)

// decodeJournal reads a journal, strictly.
func decodeJournal(raw []byte) (journal, error) {
	j, err := strictjson.Decode[journal](raw, maxJournal)
	switch {
	case err != nil:
		return journal{}, err
	case j.Version < 1 || j.Version > journalVersion:
		return journal{}, fmt.Errorf("version %d, this program knows 1 to %d", j.Version, journalVersion)
	case j.FailedReads < 0 || j.Version == 1 && j.FailedReads != 0:
		return journal{}, fmt.Errorf("version %d, and %d failed reads", j.Version, j.FailedReads)
	case !idPattern.MatchString(j.ID):
		return journal{}, fmt.Errorf("%q is no id", j.ID)
	case j.Phase != phaseCreating && j.Phase != phaseRunning && j.Phase != phaseEnding:
		return journal{}, fmt.Errorf("unknown phase %q", j.Phase)
	case (j.Phase == phaseEnding) != (j.Cause != nil):
		return journal{}, fmt.Errorf("phase %q and its cause do not go together", j.Phase)
	}
	return j, nil
}

// decodeRecord reads a record, strictly.
func decodeRecord(raw []byte) (record, error) {
	r, err := strictjson.Decode[record](raw, maxJournal)
	switch {
	case err != nil:
		return record{}, err
	case r.Version != recordVersion:
		return record{}, fmt.Errorf("version %d, this program knows %d", r.Version, recordVersion)
	case !idPattern.MatchString(r.Sandbox.ID):
		return record{}, fmt.Errorf("%q is no id", r.Sandbox.ID)
	case r.Sandbox.End == nil || r.Sandbox.State != sandbox.StateEnded || r.Sandbox.Token != "":
		return record{}, errors.New("it is not of a sandbox that has ended")
	}
	return r, nil
}

func readJournal(dir string) (journal, error) {
	raw, err := readBounded(filepath.Join(dir, journalFile))
	if err != nil {
		return journal{}, err
	}
	j, err := decodeJournal(raw)
	if err == nil && j.ID != filepath.Base(dir) {
		err = fmt.Errorf("it is of sandbox %s", j.ID)
	}
	if err != nil {
		return journal{}, fmt.Errorf("%s: %w", filepath.Join(dir, journalFile), err)
	}
	return j, nil
}

// write puts the journal into a sandbox's folder. Nothing waits for the disk: what a
// power cut loses, it also ends.
func (j journal) write(dir string) error {
	j.Version = journalVersion // it may have been read of an earlier one
	raw, err := json.Marshal(j)
	if err != nil {
		return err
	}
	return durable.ReplaceFile(filepath.Join(dir, journalFile), raw, 0o600)
}

// records is the folder of records. The node alone writes it.
type records struct{ dir string }

func (r records) path(id string) string { return filepath.Join(r.dir, id+recordExt) }

// save writes a record, which is on the disk when it returns. On a full disk it has what
// was reserved for that.
func (r records) save(rec record) error {
	raw, err := json.Marshal(rec)
	if err != nil {
		return err
	}
	err = durable.WriteFile(r.path(rec.Sandbox.ID), raw, 0o600)
	if isFull(err) && os.Remove(r.reserve()) == nil { // made again when there is room
		err = durable.WriteFile(r.path(rec.Sandbox.ID), raw, 0o600)
	}
	return err
}

func (r records) remove(id string) error {
	err := os.Remove(r.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// load reads all records. What cannot be read is named in damaged and left alone.
func (r records) load() (out []record, damaged []error, err error) {
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return nil, nil, err
	}
	for _, e := range entries {
		id, ok := strings.CutSuffix(e.Name(), recordExt)
		if !ok || !idPattern.MatchString(id) {
			if strings.HasPrefix(e.Name(), ".") { // of a node that died while it wrote
				os.Remove(filepath.Join(r.dir, e.Name()))
			}
			continue
		}
		raw, err := readBounded(r.path(id))
		if err == nil {
			var rec record
			if rec, err = decodeRecord(raw); err == nil && rec.Sandbox.ID != id {
				err = fmt.Errorf("it is of sandbox %s", rec.Sandbox.ID)
			}
			if err == nil {
				out = append(out, rec)
				continue
			}
		}
		damaged = append(damaged, fmt.Errorf("record %s: %w", r.path(id), err))
	}
	return out, damaged, nil
}

func readBounded(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxJournal+1))
	if err == nil && len(raw) > maxJournal {
		err = fmt.Errorf("%s has more than %d bytes", path, maxJournal)
	}
	return raw, err
}

// bootID names this boot of the machine: nothing of another one still runs.
func bootID() (string, error) {
	raw, err := readBounded("/proc/sys/kernel/random/boot_id")
	return strings.TrimSpace(string(raw)), err
}
