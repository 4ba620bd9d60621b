package folder

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"quarry/store/chunk"
	"quarry/store/image"
)

// serials are the highest serials seen, which keep a store from going back to an old
// image: nobody else knows them. They are kept twice, so that a damaged file stops
// nothing, and with a sum, so that a flipped bit is no other serial.
type serials struct {
	Seen map[string]image.Seen `json:"seen"` // by repository:tag
	Sum  string                `json:"sum"`  // SHA-256 of the JSON of the former, in hex
}

func encodeSerials(seen map[string]image.Seen) ([]byte, error) {
	b, err := json.Marshal(seen)
	if err != nil {
		return nil, err
	}
	return json.Marshal(serials{seen, chunk.Sum(b).Hex()})
}

func (d Dir) serialsPath() string     { return filepath.Join(d.path, "serials.json") }
func (d Dir) serialsCopyPath() string { return filepath.Join(d.path, "serials.copy.json") }

// readSerials returns what was seen, from the copy when serials.json is damaged, and
// mends the one that is. Without serials.json it is nothing: somebody has removed it,
// who accepts what the store has. The caller holds serials.lock.
func (d Dir) readSerials() (map[string]image.Seen, error) {
	raw, err := ReadBounded(d.serialsPath(), MaxJSON)
	if errors.Is(err, fs.ErrNotExist) {
		return map[string]image.Seen{}, nil
	}
	var seen map[string]image.Seen
	if err == nil {
		seen, err = decodeSerials(raw)
	}
	second, copyErr := ReadBounded(d.serialsCopyPath(), MaxJSON)
	if err == nil {
		if copyErr != nil || !bytes.Equal(raw, second) {
			writeWhole(d.serialsCopyPath(), raw) // as it can: the first will do
		}
		return seen, nil
	}
	if copyErr == nil {
		seen, copyErr = decodeSerials(second)
	}
	if copyErr != nil {
		return nil, fmt.Errorf("%s: %w: %w", d.serialsPath(), errDamaged, err)
	}
	writeDurable(d.serialsPath(), second) // as it can: the copy will do
	return seen, nil
}

// writeSerials makes what was seen durable. The copy is first: it never says less than
// serials.json.
func (d Dir) writeSerials(seen map[string]image.Seen) error {
	b, err := encodeSerials(seen)
	if err != nil {
		return err
	}
	if err := writeWhole(d.serialsCopyPath(), b); err != nil {
		return err
	}
	return writeDurable(d.serialsPath(), b)
}

// errSerials says that a file of serials is not what was written.
var errSerials = errors.New("its sum is another")

func decodeSerials(raw []byte) (map[string]image.Seen, error) {
	var s serials
	if err := decodeStrictly(raw, &s); err == nil && s.Sum != "" {
		want, err := encodeSerials(s.Seen)
		if err != nil || s.Seen == nil || !bytes.Equal(raw, want) {
			return nil, errSerials
		}
		return s.Seen, nil
	}
	// Of a version that kept no sum.
	var old map[string]image.Seen
	if err := decodeStrictly(raw, &old); err != nil {
		return nil, err
	}
	if old == nil { // it said null
		return nil, errSerials
	}
	for name := range old {
		if !strings.Contains(name, ":") {
			return nil, errSerials
		}
	}
	return old, nil
}

// decodeStrictly takes no field for a missing one because a bit of its name is flipped.
func decodeStrictly(raw []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if dec.More() {
		return errSerials
	}
	return nil
}
