package jobs

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"quarry/store/chunk"
	"quarry/store/image"
)

const (
	// Version is the version of job records.
	Version = 1
	// Prefix starts the keys of all job records.
	Prefix = "jobs/"
	// MaxNames bounds the names that a record has, the newest; further ones still
	// get the image, since a name leads to the source.
	MaxNames = 32
	// maxText bounds entry and message in bytes each; what is longer is cut in the
	// middle.
	maxText = 4 << 10
	// MaxRecord bounds a record: JSON makes at most 6 bytes of one, so the two
	// texts take 48 KiB at most, 32 names of 255 and 128 bytes 13 KiB, and the
	// rest less than 2.
	MaxRecord = 64 << 10
)

var (
	// ErrMalformed says that bytes are no job record.
	ErrMalformed = image.ErrMalformed
	// ErrVersion says that a record has a version that this program does not know.
	ErrVersion = image.ErrVersion
)

// State is where a job stands.
type State string

// The states of a job. A job that is Queued or Running is active; one that is
// Done or Failed has ended.
const (
	Queued  State = "queued"
	Running State = "running"
	Done    State = "done"
	Failed  State = "failed"
)

// Active reports whether the job is still to be done.
func (s State) Active() bool { return s == Queued || s == Running }

// Name is a name that waits for the image. Tag is "" for who asked by digest.
type Name struct {
	Repo string `json:"repo"`
	Tag  string `json:"tag,omitempty"`
}

// String returns REPO:TAG, or REPO.
func (n Name) String() string {
	if n.Tag == "" {
		return n.Repo
	}
	return n.Repo + ":" + n.Tag
}

// Whose fault a reason is.
const (
	BlameInput = "input" // the source is no image that can be converted
	BlameStore = "store" // this store, its disk or bucket, or quarry itself
)

// Reason says why a conversion did not end well.
type Reason struct {
	Layer   string `json:"layer,omitempty"` // digest of the layer, when it was one
	Entry   string `json:"entry,omitempty"` // its entry, when it was one
	Message string `json:"message"`
	Blame   string `json:"blame"`
}

// Result is what a conversion did.
type Result struct {
	Image          chunk.Digest `json:"image"`    // image id
	Platform       string       `json:"platform"` // the one it was made for
	Signed         bool         `json:"signed"`
	Layers         int          `json:"layers"`
	LayersKnown    int          `json:"layers_known"` // of them, not read
	NewPlainBytes  int64        `json:"new_plain_bytes"`
	NewStoredBytes int64        `json:"new_stored_bytes"`
}

// Record is what is kept of a job.
type Record struct {
	Source   chunk.Digest `json:"source"`
	Platform string       `json:"platform,omitempty"` // "" when the source is one manifest
	Names    []Name       `json:"names"`              // the newest last
	State    State        `json:"state"`
	Created  time.Time    `json:"created"` // when it was queued
	Ended    *time.Time   `json:"ended,omitempty"`
	Attempts int          `json:"attempts"` // conversions that began
	// Interrupted counts those that this program's end cut off. A source that ends
	// the program each time must not do so for ever.
	Interrupted int `json:"interrupted,omitempty"`
	// Doubted says that an attempt did not end well, so that what it stored may
	// never have been proved.
	Doubted bool    `json:"doubted,omitempty"`
	Reason  *Reason `json:"reason,omitempty"` // of the newest attempt that did not end well
	Result  *Result `json:"result,omitempty"` // of what is done
}

// ID names the job of the record's source and platform. The same two always make
// the same id, so there is one job of them however often they are pushed.
func (r Record) ID() string { return ID(r.Source, r.Platform) }

// ID returns the id of the job of a source and platform.
func ID(source chunk.Digest, platform string) string {
	return chunk.Sum([]byte(source.String() + " " + platform)).Hex()
}

// Key returns the key of the record of a job.
func Key(id string) string { return Prefix + id }

type wireRecord struct {
	Version int `json:"version"`
	Record
}

// Encode returns the record's bytes, canonical JSON. Texts that are too long are
// cut.
func Encode(r Record) ([]byte, error) {
	if r.Reason != nil {
		reason := *r.Reason
		reason.Entry, reason.Message = image.Shortened(reason.Entry, maxText), image.Shortened(reason.Message, maxText)
		r.Reason = &reason
	}
	r.Created = r.Created.UTC()
	if r.Ended != nil {
		ended := r.Ended.UTC()
		r.Ended = &ended
	}
	if err := r.validate(); err != nil {
		return nil, fmt.Errorf("job record: %w", err)
	}
	return json.Marshal(wireRecord{Version, r})
}

// Decode reads exactly what Encode writes. Errors: ErrMalformed, ErrVersion.
func Decode(b []byte) (Record, error) {
	w, err := image.DecodeRecord[wireRecord](b, Version, MaxRecord)
	if err == nil {
		err = w.Record.validate()
	}
	if err != nil {
		return Record{}, fmt.Errorf("job record: %w", err)
	}
	return w.Record, nil
}

func (r Record) validate() error {
	if err := errors.Join(r.validateNames(), r.validateState()); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	if r.Source.IsZero() {
		return fmt.Errorf("%w: source digest is zero", ErrMalformed)
	}
	if err := validPlatform(r.Platform); r.Platform != "" && err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	return nil
}

func validPlatform(s string) error {
	if p, err := image.ParsePlatform(s); err != nil || p.String() != s {
		return fmt.Errorf("platform %q is not normalised", s)
	}
	return nil
}

func (r Record) validateNames() error {
	if len(r.Names) < 1 || len(r.Names) > MaxNames {
		return fmt.Errorf("%d names, want 1 to %d", len(r.Names), MaxNames)
	}
	for i, n := range r.Names {
		if err := validName(n); err != nil {
			return err
		}
		if slices.Contains(r.Names[:i], n) {
			return fmt.Errorf("the name %s is there twice", n)
		}
	}
	return nil
}

func validName(n Name) error {
	if n.Tag == "" {
		return image.ValidateRepo(n.Repo)
	}
	return errors.Join(image.ValidateRepo(n.Repo), image.ValidateTag(n.Tag))
}

func (r Record) validateState() error {
	ended := r.State == Done || r.State == Failed
	switch {
	case !ended && !r.State.Active():
		return fmt.Errorf("state %q", r.State)
	case ended != (r.Ended != nil):
		return errors.New("a time of the end belongs to what has ended, and only to that")
	case r.State == Failed && r.Reason == nil, r.State == Done && r.Reason != nil:
		return errors.New("what failed has a reason, and what is done has none")
	case (r.State == Done) != (r.Result != nil):
		return errors.New("a result belongs to what is done, and only to that")
	case r.Attempts < 0 || r.Interrupted < 0:
		return errors.New("a number of attempts is negative")
	}
	if err := validTime(r.Created); err != nil {
		return err
	}
	if r.Ended != nil {
		if err := validTime(*r.Ended); err != nil {
			return err
		}
	}
	if r.Result != nil {
		return r.Result.validate()
	}
	if r.Reason != nil {
		return r.Reason.validate()
	}
	return nil
}

func validTime(t time.Time) error {
	if t.Location() != time.UTC || t.Year() < 1970 || t.Year() > 9999 {
		return fmt.Errorf("time %s is not in UTC, or out of range", t)
	}
	return nil
}

func (r *Result) validate() error {
	if r.Image.IsZero() || r.Layers < 0 || r.LayersKnown < 0 || r.NewPlainBytes < 0 || r.NewStoredBytes < 0 {
		return errors.New("the result has a zero image id or a negative number")
	}
	return validPlatform(r.Platform)
}

func (r *Reason) validate() error {
	if r.Layer != "" {
		if d, err := chunk.Parse(r.Layer); err != nil || d.IsZero() {
			return fmt.Errorf("layer %.80q is no digest", r.Layer)
		}
	}
	switch {
	case r.Message == "":
		return errors.New("the reason has no message")
	case len(r.Entry) > maxText || len(r.Message) > maxText:
		return errors.New("entry or message is too long")
	case !utf8.ValidString(r.Entry + r.Message):
		return errors.New("entry or message is not UTF-8")
	case r.Blame != BlameInput && r.Blame != BlameStore:
		return fmt.Errorf("blame %q", r.Blame)
	}
	return nil
}

// addName makes n the newest of the names.
func (r *Record) addName(n Name) {
	names := slices.DeleteFunc(slices.Clone(r.Names), func(old Name) bool { return old == n })
	names = append(names, n)
	r.Names = names[max(0, len(names)-MaxNames):]
}

// inRepo reports whether a name of the repository waits for the job.
func (r Record) inRepo(repo string) bool {
	return slices.ContainsFunc(r.Names, func(n Name) bool { return n.Repo == repo })
}

// String says what the job is, for people.
func (r Record) String() string {
	var names []string
	for _, n := range r.Names {
		names = append(names, n.String())
	}
	s := fmt.Sprintf("%s (source %s)", strings.Join(names, ", "), r.Source)
	if r.Platform != "" {
		s += " for " + r.Platform
	}
	return s
}
