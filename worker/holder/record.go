package holder

import (
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
	"slices"
	"strings"

	"quarry/internal/strictjson"
	"quarry/worker/sandbox"
)

// Formats of the records in a sandbox's folder, see FORMAT.md.
const (
	runFormat   = "quarry-holder/1"
	execFormat  = "quarry-exec/1"
	endedFormat = "quarry-ended/1"
	maxRecord   = 64 << 10 // a record is a KiB
	maxText     = 4 << 10  // of a message in it
)

// runRecord says what a holder runs.
type runRecord struct {
	Format string `json:"format"`
	ID     string `json:"id"`
	State  State  `json:"state"`
}

// execRecord is one exec. It is written before the exec starts and when it has
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
func plain(s string) string { return strings.ToValidUTF8(s[:min(len(s), maxText)], "?") }

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

// ReadExecs reads the records of a sandbox's execs from its folder, in order of
// their start. One that had not ended when its holder was lost is ExecUnknown. A
// record that cannot be read is passed over and makes an error beside the others.
func ReadExecs(dir string) ([]sandbox.ExecState, error) {
	entries, err := os.ReadDir(filepath.Join(dir, "exec"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var records []execRecord
	var bad error
	for _, e := range entries {
		r, err := readRecord[execRecord](filepath.Join(dir, "exec", e.Name(), "exec.json"))
		if err != nil {
			bad = errors.Join(bad, err)
			continue
		}
		if r.State.State == sandbox.ExecStarting || r.State.State == sandbox.ExecRunning {
			lose(&r.State, "the holder of the sandbox was lost")
			r.State.Stdout.Kept, r.State.Stderr.Kept = sizeOf(dir, r.State.ID, "stdout"), sizeOf(dir, r.State.ID, "stderr")
			r.State.Stdout.Closed, r.State.Stderr.Closed = true, true
		}
		records = append(records, r)
	}
	slices.SortFunc(records, func(a, b execRecord) int { return int(a.Number - b.Number) })
	states := make([]sandbox.ExecState, 0, len(records))
	for _, r := range records {
		states = append(states, r.State)
	}
	return states, bad
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
