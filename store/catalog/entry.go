package catalog

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"quarry/store/bucket"
	"quarry/store/chunk"
)

// entryVersion is the newest version of the entry format; FORMAT.md says what a new
// one needs. A type keeps the version it came with.
const entryVersion = 3

const (
	// MaxRepo and MaxTag bound the parts of a name in bytes, as the OCI
	// distribution specification does.
	MaxRepo = 255
	MaxTag  = 128
)

// Entry is one change of the catalog: a Pack, CondemnedChunk or Name that is
// added, a PackRetired or NameDeleted, or the Epoch that a writer begins.
type Entry interface {
	kind() string
	// validate says whether the fields can stand in an entry at all.
	validate() error
	// follows says whether the entry can be the next one.
	follows(s *state) error
	// apply changes the state; follows has returned nil.
	apply(s *state)
}

// Pack is a pack of the store. Its entry for a pack that is already in the
// catalog says that the object was stored anew, whole, or that copies in it were
// found good again: its chunks are no longer condemned.
type Pack struct {
	ID   chunk.Digest `json:"pack"`
	Size int64        `json:"size"`
}

// PackRetired says that a pack is no longer part of the store.
type PackRetired struct {
	ID chunk.Digest `json:"pack"`
}

// CondemnedChunk is one stored copy of a chunk that must not be used.
type CondemnedChunk struct {
	Digest chunk.Digest `json:"digest"`
	Pack   chunk.Digest `json:"pack"`
	Off    int64        `json:"off"`
}

// Name binds repo:tag to a source digest.
type Name struct {
	Repo   string       `json:"repo"`
	Tag    string       `json:"tag"`
	Source chunk.Digest `json:"source"`
	Serial uint64       `json:"serial"`
	// Statement is the signed name statement, a DSSE envelope as JSON, or nil.
	// The catalog keeps it compact, else as it is, and knows nothing of its
	// content. It must not be changed.
	Statement json.RawMessage `json:"statement"`
}

// NameDeleted says that a name is gone. Its serial stays used.
type NameDeleted struct {
	Repo   string `json:"repo"`
	Tag    string `json:"tag"`
	Serial uint64 `json:"serial"`
}

func (Pack) kind() string           { return "pack_added" }
func (PackRetired) kind() string    { return "pack_retired" }
func (CondemnedChunk) kind() string { return "chunk_condemned" }
func (Name) kind() string           { return "name" }
func (NameDeleted) kind() string    { return "name_deleted" }
func (Epoch) kind() string          { return "epoch" }

// versionOf is the version that an entry type came with.
func versionOf(kind string) int {
	switch kind {
	case Epoch{}.kind():
		return 2
	case Clock{}.kind(), PackCondemned{}.kind(), PackDeleted{}.kind(), ImageDeleted{}.kind(), Pinned{}.kind(), Unpinned{}.kind():
		return 3
	}
	return 1
}

// prefix is how an entry starts.
func prefix(kind string) string { return fmt.Sprintf(`{"v":%d,"type":%q,`, versionOf(kind), kind) }

// EncodeEntry returns the bytes of a journal entry.
func EncodeEntry(e Entry) ([]byte, error) {
	if err := e.validate(); err != nil {
		return nil, fmt.Errorf("%s: %w", e.kind(), err)
	}
	fields, err := compact(e)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", e.kind(), err)
	}
	b := append([]byte(prefix(e.kind())), fields[1:]...) // fields without its brace
	if len(b) > bucket.MaxEntry {
		return nil, fmt.Errorf("%s: entry has %d bytes, at most %d are allowed", e.kind(), len(b), bucket.MaxEntry)
	}
	return b, nil
}

// compact is json.Marshal that leaves <, > and & as they are, so that the bytes
// of a statement do not change.
func compact(v any) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), nil
}

// DecodeEntry reads a journal entry. It takes only the bytes that EncodeEntry
// returns: an unknown version, type or field, a missing or repeated field, other
// spacing or order is an error.
func DecodeEntry(b []byte) (Entry, error) {
	if len(b) > bucket.MaxEntry {
		return nil, fmt.Errorf("entry has %d bytes, at most %d are allowed", len(b), bucket.MaxEntry)
	}
	var head struct {
		V    int    `json:"v"`
		Type string `json:"type"`
	}
	if err := json.Unmarshal(b, &head); err != nil {
		return nil, fmt.Errorf("entry is no JSON object: %w", err)
	}
	if head.V < 1 || head.V > entryVersion {
		return nil, fmt.Errorf("entry has version %d, this quarry knows 1 to %d: %w", head.V, entryVersion, ErrNewer)
	}
	e, err := decodeFields(head.Type, b)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", head.Type, err)
	}
	again, err := EncodeEntry(e)
	if err != nil {
		return nil, err
	}
	if !bytes.Equal(again, b) {
		return nil, fmt.Errorf("%s: %w", head.Type, errForm)
	}
	return e, nil
}

// ErrNewer says that the entry may be good for another quarry.
var ErrNewer = errors.New("use the quarry that wrote it")

var errForm = errors.New("entry is not in the one form that its fields have")

func decodeFields(kind string, b []byte) (Entry, error) {
	fields, ok := bytes.CutPrefix(b, []byte(prefix(kind)))
	if !ok {
		return nil, errForm
	}
	switch kind {
	case Pack{}.kind():
		return decode[Pack](fields)
	case PackRetired{}.kind():
		return decode[PackRetired](fields)
	case CondemnedChunk{}.kind():
		return decode[CondemnedChunk](fields)
	case Name{}.kind():
		n, err := decode[Name](fields)
		if string(n.Statement) == "null" {
			n.Statement = nil
		}
		return n, err
	case NameDeleted{}.kind():
		return decode[NameDeleted](fields)
	case Epoch{}.kind():
		return decode[Epoch](fields)
	}
	return decodeCollect(kind, fields)
}

// decode reads an object without its brace.
func decode[E Entry](fields []byte) (E, error) {
	var e E
	dec := json.NewDecoder(io.MultiReader(strings.NewReader("{"), bytes.NewReader(fields)))
	dec.DisallowUnknownFields()
	err := dec.Decode(&e)
	return e, err
}

func (e Pack) validate() error {
	if e.Size <= 0 {
		return fmt.Errorf("size %d of pack %s is not positive", e.Size, e.ID)
	}
	return validDigest("pack", e.ID)
}

func (e PackRetired) validate() error { return validDigest("pack", e.ID) }

func (e CondemnedChunk) validate() error {
	if e.Off < 0 {
		return fmt.Errorf("offset %d is negative", e.Off)
	}
	if err := validDigest("chunk", e.Digest); err != nil {
		return err
	}
	return validDigest("pack", e.Pack)
}

func (e Name) validate() error {
	if err := validName(e.Repo, e.Tag, e.Serial); err != nil {
		return err
	}
	if e.Statement != nil && (len(e.Statement) == 0 || e.Statement[0] != '{') {
		return fmt.Errorf("statement of %s:%s is no JSON object", e.Repo, e.Tag)
	}
	return validDigest("source", e.Source)
}

func (e NameDeleted) validate() error { return validName(e.Repo, e.Tag, e.Serial) }

func validDigest(what string, d chunk.Digest) error {
	if d.IsZero() {
		return fmt.Errorf("%s digest is missing", what)
	}
	return nil
}

// validName checks only what the journal needs; store/image says what a name is.
func validName(repo, tag string, serial uint64) error {
	switch {
	case repo == "" || len(repo) > MaxRepo || !utf8.ValidString(repo):
		return fmt.Errorf("repository %.32q: want 1 to %d bytes of UTF-8", repo, MaxRepo)
	case tag == "" || len(tag) > MaxTag || !utf8.ValidString(tag):
		return fmt.Errorf("tag %.32q: want 1 to %d bytes of UTF-8", tag, MaxTag)
	case serial == 0:
		return fmt.Errorf("serial of %s:%s is 0, serials start at 1", repo, tag)
	}
	return nil
}
