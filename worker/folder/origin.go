package folder

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

// Origin says where an image's chunks are fetched from, in a form that a reader
// process started later understands.
type Origin struct {
	Stores []string `json:"stores,omitempty"` // URLs of store nodes, the preferred one first
	Data   string   `json:"data,omitempty"`   // data folder on this machine
	// TokenFile is the path of the file with the token to show, which is never kept
	// itself, and CA that of the certificates that https stores are held against.
	TokenFile string `json:"token_file,omitempty"`
	CA        string `json:"ca,omitempty"`
}

// record is what brings an image back of which other files are damaged: its
// statement names the rest by digest, and its origin has that. It is kept twice,
// as no digest names it: in the image's folder, and beside it.
type record struct {
	Origin
	Statement []byte `json:"statement,omitempty"` // the payload; one from before it was kept has none
	Sum       string `json:"sum,omitempty"`       // SHA-256 of the record without it, in hex
}

// maxRecord bounds one: a statement of 4 KiB in base64, and the URLs of stores.
const maxRecord = 1 << 20

func (r record) encode() ([]byte, error) {
	r.Sum = ""
	b, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	r.Sum = chunk.Sum(b).Hex()
	return json.Marshal(r)
}

func readRecord(path string) (record, error) {
	b, err := ReadBounded(path, maxRecord)
	if err != nil {
		return record{}, err
	}
	// A flipped bit in a field's name must not make the field a missing one.
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	var r record
	if err := dec.Decode(&r); err != nil {
		return record{}, fmt.Errorf("%s: %w: %w", path, errDamaged, err)
	}
	if r.Sum == "" && r.Statement == nil && len(r.Stores)+len(r.Data) > 0 { // of a version that knew neither
		return r, nil
	}
	want, err := r.encode()
	if err != nil || !bytes.Equal(b, want) {
		return record{}, fmt.Errorf("%s: %w: its sum is another", path, errDamaged)
	}
	return r, nil
}

// recordPaths are where an image's record is, the second time not in the image's
// folder: what befalls that does not befall both.
func (d Dir) recordPaths(id chunk.Digest) []string {
	return []string{filepath.Join(d.imageDir(id), "origin.json"), d.imageDir(id) + ".json"}
}

// record returns the first copy that is whole and good, and mends the other by it, if
// it can: whoever needs one may find that one damaged. Errors: fs.ErrNotExist when
// there is none; what is wrong with one, if any is there, says more.
func (d Dir) record(id chunk.Digest, good func(record) bool) (record, error) {
	err := fmt.Errorf("where image %s came from: %w", id, fs.ErrNotExist)
	var found *record
	var bad []string
	for _, path := range d.recordPaths(id) {
		r, readErr := readRecord(path)
		switch {
		case readErr == nil && good(r):
			if found == nil {
				found = &r
			}
			continue
		case readErr != nil && !errors.Is(readErr, fs.ErrNotExist):
			err = readErr
		}
		bad = append(bad, path)
	}
	if found == nil {
		return record{}, err
	}
	// An old one, or that of another image, is no measure for the other copy.
	if image.ID(found.Statement) != id {
		return *found, nil
	}
	if whole, err := found.encode(); err == nil {
		for _, path := range bad {
			writeWhole(path, whole) // as it can: this copy will do
		}
	}
	return *found, nil
}

// Origin says where an image's chunks are fetched from. Errors: fs.ErrNotExist.
func (d Dir) Origin(id chunk.Digest) (Origin, error) {
	r, err := d.record(id, func(record) bool { return true })
	return r.Origin, err
}

// writeRecord makes both copies what they should be.
func (d Dir) writeRecord(id chunk.Digest, o Origin, payload []byte) error {
	want, err := record{Origin: o, Statement: payload}.encode()
	if err != nil {
		return err
	}
	for _, path := range d.recordPaths(id) {
		if have, err := ReadBounded(path, maxRecord); err == nil && bytes.Equal(have, want) {
			continue
		}
		if err := writeWhole(path, want); err != nil {
			return err
		}
	}
	return nil
}

// ErrNoContent says that no store has a part of an image whole, and that asking again
// does not help.
var ErrNoContent = errors.New("no store has it whole")

// ErrFetch says that a source, and not the folder, is why an image was not repaired.
var ErrFetch = errors.New("its origin does not give it")

// Content is where the parts of an image come from by their digests, verified.
// Errors: ErrNoContent; any other may be worth another attempt. Safe for concurrent
// use; what is returned is the caller's.
type Content interface {
	Bootstrap(ctx context.Context, d chunk.Digest, size int64) ([]byte, error)
	Config(ctx context.Context, d chunk.Digest) ([]byte, error)
}

// Repair returns an image that Load refuses. What of it is here and intact is
// taken, the rest from its origin; like Load it returns nothing that the id does
// not name. unsaved says why the folder could not be put right, if so. Errors:
// fs.ErrNotExist when nothing here says what the image was, and ErrFetch with from's.
func (d Dir) Repair(ctx context.Context, id chunk.Digest, o Origin, from Content) (im *Image, unsaved, err error) {
	payload, err := d.statement(id)
	if err != nil {
		return nil, nil, err
	}
	st, err := image.DecodeStatement(payload)
	if err != nil {
		return nil, nil, err
	}
	dir := d.imageDir(id)
	config, err := ReadBounded(filepath.Join(dir, "config"), image.MaxConfig)
	if err != nil || chunk.Sum(config) != st.Config {
		if config, err = from.Config(ctx, st.Config); err != nil {
			return nil, nil, fmt.Errorf("config %s: %w: %w", st.Config, ErrFetch, err)
		}
	}
	boot, err := ReadBounded(filepath.Join(dir, "bootstrap"), rafs.MaxBootstrap)
	if err != nil || chunk.Sum(boot) != st.Bootstrap {
		if boot, err = from.Bootstrap(ctx, st.Bootstrap, st.BootstrapSize); err != nil {
			return nil, nil, fmt.Errorf("bootstrap %s: %w: %w", st.Bootstrap, ErrFetch, err)
		}
	}
	if im, err = assemble(id, payload, config, boot, nil); err != nil {
		return nil, nil, err
	}
	if unsaved = d.saveImage(id, payload, config, boot); unsaved == nil {
		unsaved = d.writeRecord(id, o, payload)
	}
	return im, unsaved, nil
}

// statement returns the payload that the id is the digest of, from wherever the
// folder has it.
func (d Dir) statement(id chunk.Digest) ([]byte, error) {
	path := filepath.Join(d.imageDir(id), "statement")
	payload, err := ReadBounded(path, image.MaxStatement)
	if err == nil && image.ID(payload) == id {
		return payload, nil
	}
	r, recordErr := d.record(id, func(r record) bool { return image.ID(r.Statement) == id })
	if recordErr != nil {
		return nil, fmt.Errorf("no copy of the image statement is intact: %w", recordErr)
	}
	return r.Statement, nil
}
