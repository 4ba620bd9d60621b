// Package image describes a converted image: what an image statement and a name
// statement say, how references and platforms are written, what a layer record
// remembers of a layer, and under which keys all this lies in the bucket. It
// does no I/O, so the converter that writes these things and the worker that
// trusts none of its sources agree on every byte. The formats are in FORMAT.md.
package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"quarry/internal/strictjson"
	"quarry/rafs"
	"quarry/store/chunk"
)

// Payload types of the two statements in their envelopes.
const (
	StatementType     = "application/vnd.quarry.image.v1+json"
	NameStatementType = "application/vnd.quarry.name.v1+json"
)

const (
	// StatementVersion is the version of both statements.
	StatementVersion = 1
	// MaxStatement bounds a statement's text: the largest has about 700 bytes.
	MaxStatement = 4 << 10
	// MaxConfig bounds a raw OCI config, which a statement names. Real ones are
	// below 100 KiB.
	MaxConfig = 8 << 20
	// MaxSerial bounds a serial to what every JSON reader keeps exactly, 2^53-1.
	MaxSerial = 1<<53 - 1
	// maxConverter bounds the converter version text.
	maxConverter = 128
)

var (
	// ErrMalformed says that bytes are not what this package writes.
	ErrMalformed = errors.New("malformed")
	// ErrVersion says that bytes have a format version this program does not know.
	ErrVersion = errors.New("unknown format version")
)

// Statement says what a source image became. It holds no name and no time, so
// whoever converts the same source gets the same bytes.
type Statement struct {
	Source        chunk.Digest  `json:"source"` // manifest or image index that was named
	Platform      Platform      `json:"platform"`
	Config        chunk.Digest  `json:"config"`         // raw OCI config
	Bootstrap     chunk.Digest  `json:"bootstrap"`      // RAFS v6 metadata
	BootstrapSize int64         `json:"bootstrap_size"` // in bytes
	Blob          *chunk.Digest `json:"blob,omitempty"` // virtual blob id V; nil when the image has no file data
	Tree          chunk.Digest  `json:"tree"`           // tree digest
	ChunkSize     uint32        `json:"chunk_size"`     // S, in bytes
	Converter     string        `json:"converter"`      // version of the converter, printable ASCII
}

// NameStatement binds a repository's tag to a source digest.
type NameStatement struct {
	Repo    string       `json:"repo"`
	Tag     string       `json:"tag"`
	Source  chunk.Digest `json:"source"`
	Serial  uint64       `json:"serial"` // 1 to MaxSerial, grows with every move of the tag
	Issued  time.Time    `json:"issued"`
	Expires *time.Time   `json:"expires,omitempty"` // nil: never
}

// The wire forms put the version first.
type (
	wireStatement struct {
		Version int `json:"version"`
		Statement
	}
	wireNameStatement struct {
		Version int `json:"version"`
		NameStatement
	}
)

// ID returns the image id: the digest of an image statement's payload.
func ID(payload []byte) chunk.Digest { return chunk.Sum(payload) }

// EncodeStatement returns the payload of an image statement, canonical JSON. It
// fails with ErrMalformed on a value that DecodeStatement would refuse.
func EncodeStatement(s Statement) ([]byte, error) {
	if err := s.validate(); err != nil {
		return nil, fmt.Errorf("image statement: %w", err)
	}
	return json.Marshal(wireStatement{StatementVersion, s})
}

// DecodeStatement reads exactly what EncodeStatement writes. Errors:
// ErrMalformed, ErrVersion.
func DecodeStatement(payload []byte) (Statement, error) {
	w, err := DecodeRecord[wireStatement](payload, StatementVersion, MaxStatement)
	if err == nil {
		err = w.Statement.validate()
	}
	if err != nil {
		return Statement{}, fmt.Errorf("image statement: %w", err)
	}
	return w.Statement, nil
}

// EncodeNameStatement returns the payload of a name statement, canonical JSON
// with its times in UTC. It fails with ErrMalformed on a value that
// DecodeNameStatement would refuse.
func EncodeNameStatement(n NameStatement) ([]byte, error) {
	n.Issued = n.Issued.UTC()
	if n.Expires != nil {
		utc := n.Expires.UTC()
		n.Expires = &utc
	}
	if err := n.validate(); err != nil {
		return nil, fmt.Errorf("name statement: %w", err)
	}
	return json.Marshal(wireNameStatement{StatementVersion, n})
}

// DecodeNameStatement reads exactly what EncodeNameStatement writes. Errors:
// ErrMalformed, ErrVersion.
func DecodeNameStatement(payload []byte) (NameStatement, error) {
	w, err := DecodeRecord[wireNameStatement](payload, StatementVersion, MaxStatement)
	if err == nil {
		err = w.NameStatement.validate()
	}
	if err != nil {
		return NameStatement{}, fmt.Errorf("name statement: %w", err)
	}
	return w.NameStatement, nil
}

// DecodeRecord reads exactly what json.Marshal writes of a T whose first field is its
// version: the form of statements, and of records that are kept beside them. It looks at
// the version before all else, as the next version has fields that this one does not
// know. Errors: ErrMalformed, ErrVersion.
func DecodeRecord[T any](b []byte, version, limit int) (T, error) {
	var zero T
	if len(b) > limit {
		return zero, fmt.Errorf("%w: %d bytes, at most %d", ErrMalformed, len(b), limit)
	}
	var head struct {
		Version int `json:"version"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return zero, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if head.Version < 1 {
		return zero, fmt.Errorf("%w: it has no version", ErrMalformed)
	}
	if head.Version != version {
		return zero, fmt.Errorf("%w: version %d, this program knows %d: use the quarry that wrote it, or a newer one",
			ErrVersion, head.Version, version)
	}
	w, err := strictjson.Decode[T](b, limit)
	if err != nil {
		return zero, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return w, nil
}

func (s Statement) validate() error {
	for _, d := range []struct {
		name   string
		digest *chunk.Digest
	}{{"source", &s.Source}, {"config", &s.Config}, {"bootstrap", &s.Bootstrap}, {"blob", s.Blob}, {"tree", &s.Tree}} {
		if d.digest != nil && d.digest.IsZero() {
			return fmt.Errorf("%w: %s digest is zero", ErrMalformed, d.name)
		}
	}
	if p, err := NewPlatform(s.Platform.OS, s.Platform.Arch, s.Platform.Variant); err != nil || p != s.Platform {
		return fmt.Errorf("%w: platform %q is not a normalised one", ErrMalformed, s.Platform)
	}
	if s.BootstrapSize < 1 || s.BootstrapSize > rafs.MaxBootstrap {
		return fmt.Errorf("%w: bootstrap of %d bytes, want 1 to %d", ErrMalformed, s.BootstrapSize, rafs.MaxBootstrap)
	}
	if !chunk.ValidSize(int64(s.ChunkSize)) {
		return fmt.Errorf("%w: chunk size %d is not a power of two from %d to %d", ErrMalformed, s.ChunkSize, chunk.MinSize, chunk.MaxSize)
	}
	if len(s.Converter) < 1 || len(s.Converter) > maxConverter {
		return fmt.Errorf("%w: converter version of %d bytes, want 1 to %d", ErrMalformed, len(s.Converter), maxConverter)
	}
	for _, c := range []byte(s.Converter) {
		if c < ' ' || c > '~' {
			return fmt.Errorf("%w: converter version %q is not printable ASCII", ErrMalformed, s.Converter)
		}
	}
	return nil
}

func (n NameStatement) validate() error {
	if err := errors.Join(ValidateRepo(n.Repo), ValidateTag(n.Tag)); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if n.Source.IsZero() {
		return fmt.Errorf("%w: source digest is zero", ErrMalformed)
	}
	if n.Serial < 1 || n.Serial > MaxSerial {
		return fmt.Errorf("%w: serial %d, want 1 to %d", ErrMalformed, n.Serial, uint64(MaxSerial))
	}
	if err := validateTime("issued", n.Issued); err != nil {
		return err
	}
	if n.Expires == nil {
		return nil
	}
	if err := validateTime("expires", *n.Expires); err != nil {
		return err
	}
	if !n.Expires.After(n.Issued) {
		return fmt.Errorf("%w: expires %s, which is not after issued %s", ErrMalformed, n.Expires.Format(time.RFC3339Nano), n.Issued.Format(time.RFC3339Nano))
	}
	return nil
}

// validateTime wants UTC, so that one moment has one text, and years with four
// digits, as RFC 3339 has no others. 1970 catches a time nobody set.
func validateTime(field string, t time.Time) error {
	if _, offset := t.Zone(); offset != 0 || t.Year() < 1970 || t.Year() > 9999 {
		return fmt.Errorf("%w: %s %s: want a time in UTC of the years 1970 to 9999", ErrMalformed, field, t.Format(time.RFC3339Nano))
	}
	return nil
}
