package holder

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"

	"quarry/internal/strictjson"
	"quarry/worker/sandbox"
)

// Formats of the records in a sandbox's folder, see FORMAT.md.
const (
	runFormat   = "quarry-holder/1"
	execFormat  = "quarry-exec/1"
	endedFormat = "quarry-ended/1"
	maxRecord   = 64 << 10 // a record is a KiB
)

// runRecord says what a holder runs.
type runRecord struct {
	Format string `json:"format"`
	ID     string `json:"id"`
	State  State  `json:"state"`
}

// execRecord is one exec: a line of the journal, before it starts and when it has
// ended.
type execRecord struct {
	Format string            `json:"format"`
	Number int64             `json:"number"` // of its start, from 1
	Spec   string            `json:"spec"`   // SHA-256 of the spec, which may hold secrets
	State  sandbox.ExecState `json:"state"`
}

type endedRecord struct {
	Format string `json:"format"`
	Ended  Ended  `json:"ended"`
}

func (r runRecord) format() (got, want string)   { return r.Format, runFormat }
func (r execRecord) format() (got, want string)  { return r.Format, execFormat }
func (r endedRecord) format() (got, want string) { return r.Format, endedFormat }

// decodeRecord takes exactly what writeRecord writes.
func decodeRecord[T interface {
	format() (got, want string)
}](b []byte) (T, error) {
	var zero T
	v, err := strictjson.Decode[T](b, maxRecord)
	if err != nil {
		return zero, err
	}
	if got, want := v.format(); got != want {
		return zero, fmt.Errorf("format %q, this program reads %q", got[:min(len(got), 64)], want)
	}
	return v, nil
}

func readRecord[T interface {
	format() (got, want string)
}](path string) (T, error) {
	var zero T
	b, err := readBounded(path)
	if err != nil {
		return zero, err
	}
	v, err := decodeRecord[T](b)
	if err != nil {
		return zero, fmt.Errorf("%s: %w", path, err)
	}
	return v, nil
}

// readBounded reads a file of at most maxRecord bytes.
func readBounded(path string) ([]byte, error) { return readAtMost(path, maxRecord) }

func readAtMost(path string, most int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(b)) > most {
		err = fmt.Errorf("%s: more than %d bytes", path, most)
	}
	return b, err
}

// readTail reads the last maxRecord bytes of a file that others write.
func readTail(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.NewSectionReader(f, max(0, st.Size()-maxRecord), maxRecord))
}

// writeRecord replaces a record. It is not synced: with the machine the sandbox
// ends too, and what its execs were is no longer asked.
func writeRecord(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	next := path + ".next"
	if err := os.WriteFile(next, b, 0o600); err != nil {
		return errors.Join(err, os.Remove(next))
	}
	return os.Rename(next, path)
}

// plain makes text that JSON and a record have room for.
func plain(s string) string { return sandbox.Short(strings.ToValidUTF8(s, "?")) }

// specSum names a spec.
func specSum(s sandbox.ExecSpec) string {
	sum := sha256.Sum256(marshal(s))
	return hex.EncodeToString(sum[:])
}

// decodeStrict takes one JSON value with no field that is not known.
func decodeStrict(b []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("more follows the value")
	}
	return nil
}

func endedPath(dir string) string { return filepath.Join(dir, "ended.json") }

// ReadEnded reads how a sandbox ended from its folder. It is ErrLost when nothing
// was written: the holder was killed, or still runs.
func ReadEnded(dir string) (Ended, error) {
	r, err := readRecord[endedRecord](endedPath(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return Ended{}, fmt.Errorf("%w: there is no record of the end", ErrLost)
	}
	return r.Ended, err
}

// journal is the file of the execs' records, a line each. An exec costs two
// writes: folders and renames take milliseconds on a busy disk. It is not synced, as
// other records are not.
type journal struct {
	mu   sync.Mutex // guards what follows
	f    *os.File
	left int64 // what more it may have
	torn bool  // the last line is not whole
}

// errJournalFull says that an exec has no line because there were so many.
var errJournalFull = errors.New("the journal of execs has all that it may have")

func journalPath(dir string) string { return filepath.Join(dir, "execs") }

func openJournal(dir string, most int64) (*journal, error) {
	f, err := os.OpenFile(journalPath(dir), os.O_WRONLY|os.O_CREATE|os.O_TRUNC|os.O_APPEND, 0o600)
	return &journal{f: f, left: most}, err
}

func (j *journal) add(r execRecord) error {
	line := append(marshal(r), '\n')
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.torn {
		line = append([]byte("\n"), line...)
	}
	if int64(len(line)) > j.left {
		return errJournalFull
	}
	n, err := j.f.Write(line)
	j.left -= int64(max(n, 0))
	if n > 0 {
		j.torn = n < len(line)
	}
	return err
}

// ReadExecs reads the records of a sandbox's execs from its folder, in order of
// their start. One that had not ended when its holder was lost is ExecUnknown.
// Lines that cannot be read are passed over and make an error beside the others.
func ReadExecs(dir string) ([]sandbox.ExecState, error) {
	f, err := os.Open(journalPath(dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	states, err := readJournal(f)
	for i := range states {
		st := &states[i]
		if st.State == sandbox.ExecStarting || st.State == sandbox.ExecRunning {
			lose(st, "the holder of the sandbox was lost")
			st.Stdout = sandbox.Output{Kept: sizeOf(dir, st.ID, "stdout"), Closed: true}
			st.Stderr = sandbox.Output{Kept: sizeOf(dir, st.ID, "stderr"), Closed: true}
		}
	}
	return states, err
}

// readJournal reads the last record of each exec.
func readJournal(r io.Reader) (states []sandbox.ExecState, bad error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxRecord)
	at := map[int64]int{} // by number
	for lines.Scan() {
		line := lines.Bytes()
		if len(line) == 0 {
			continue // after one that was torn
		}
		rec, err := decodeRecord[execRecord](line)
		i, known := at[rec.Number]
		switch {
		case err != nil:
			bad = fmt.Errorf("a record of an exec: %w", err)
		case known && states[i].ID == rec.State.ID:
			states[i] = rec.State
		case !known && rec.Number >= 1 && len(states) < MaxExecs && ValidExecID(rec.State.ID):
			at[rec.Number] = len(states)
			states = append(states, rec.State)
		default:
			bad = fmt.Errorf("a record of exec %d, which is none", rec.Number)
		}
	}
	return states, errors.Join(bad, lines.Err())
}

// sizeOf is what is kept of a stream of an exec whose holder did not say.
func sizeOf(dir, exec, stream string) int64 {
	st, err := os.Stat(OutputPath(dir, exec, stream))
	if err != nil {
		return 0
	}
	return st.Size()
}

// lose makes a state that of an exec whose end nobody saw.
func lose(s *sandbox.ExecState, why string) {
	s.State, s.Reason, s.Message = sandbox.ExecUnknown, sandbox.ExecReasonLost, why
}
