package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"quarry/store/chunk"
)

const (
	// FailureVersion is the version of failure records.
	FailureVersion = 1
	// FailuresPrefix starts the keys of all failure records.
	FailuresPrefix = "failures/"
	// maxFailureSource and maxFailureReason bound the two texts in bytes; what is
	// longer is cut in the middle.
	maxFailureSource = 1 << 10
	maxFailureReason = 4 << 10
	// MaxFailure bounds a record: JSON makes at most 6 bytes of one, so source
	// and reason take 30 KiB at most, and the names of the rest less than 2.
	MaxFailure = 32 << 10
)

// States of a Failure.
const (
	// FailureUnfinished stands while a conversion reads layers, and stays when it
	// is killed.
	FailureUnfinished = "unfinished"
	FailureFailed     = "failed"
)

// Whose fault a failure is.
const (
	BlameInput  = "input"  // the source is no image that can be converted
	BlameSource = "source" // the source is out of reach
	BlameStore  = "store"  // this store, its disk, or quarry itself
	BlameCaller = "caller" // whoever asked has gone
)

// Failure is what a store remembers of the newest conversion of a name that has
// not made its image ready. The name is where it was; a conversion that succeeds
// removes the record.
type Failure struct {
	Repo      string        `json:"repo"`
	Tag       string        `json:"tag"`
	State     string        `json:"state"`
	Source    string        `json:"source"`             // as it was asked for
	Platform  string        `json:"platform,omitempty"` // as it was asked for; absent: the host's
	Digest    *chunk.Digest `json:"digest,omitempty"`   // source digest, once it was known
	Converter string        `json:"converter"`
	Time      time.Time     `json:"time"` // of the failure, or when an unfinished one began
	Reason    string        `json:"reason,omitempty"`
	Blame     string        `json:"blame,omitempty"`
}

type wireFailure struct {
	Version int `json:"version"`
	Failure
}

// FailureKey is the key of the failure record of a name. It is made of the name's
// digest: repositories and tags as key elements could be a folder and a file of
// one name.
func FailureKey(repo, tag string) string {
	return FailuresPrefix + chunk.Sum([]byte(repo+":"+tag)).Hex()
}

// EncodeFailure returns the record's bytes, canonical JSON. Texts that are too
// long are cut.
func EncodeFailure(f Failure) ([]byte, error) {
	f.Source, f.Reason = Shortened(f.Source, maxFailureSource), Shortened(f.Reason, maxFailureReason)
	f.Time = f.Time.UTC()
	if err := f.validate(); err != nil {
		return nil, fmt.Errorf("failure record: %w", err)
	}
	return json.Marshal(wireFailure{FailureVersion, f})
}

// DecodeFailure reads exactly what EncodeFailure writes. Errors: ErrMalformed,
// ErrVersion.
func DecodeFailure(b []byte) (Failure, error) {
	w, err := DecodeRecord[wireFailure](b, FailureVersion, MaxFailure)
	if err == nil {
		err = w.Failure.validate()
	}
	if err != nil {
		return Failure{}, fmt.Errorf("failure record: %w", err)
	}
	return w.Failure, nil
}

func (f Failure) validate() error {
	if err := errors.Join(ValidateRepo(f.Repo), ValidateTag(f.Tag), validateTime("time", f.Time)); err != nil {
		return fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	switch {
	case f.State != FailureUnfinished && f.State != FailureFailed:
		return fmt.Errorf("%w: state %q", ErrMalformed, f.State)
	case (f.State == FailureFailed) != (f.Reason != ""):
		return fmt.Errorf("%w: a reason belongs to what failed, and only to that", ErrMalformed)
	case (f.State == FailureFailed) != slices.Contains([]string{BlameInput, BlameSource, BlameStore, BlameCaller}, f.Blame):
		return fmt.Errorf("%w: blame %q of state %s", ErrMalformed, f.Blame, f.State)
	case len(f.Source) > maxFailureSource || len(f.Reason) > maxFailureReason:
		return fmt.Errorf("%w: source or reason is too long", ErrMalformed)
	case len(f.Platform) > 3*maxPlatformPart+2 || len(f.Converter) < 1 || len(f.Converter) > maxConverter:
		return fmt.Errorf("%w: platform or converter version has a wrong length", ErrMalformed)
	case f.Digest != nil && f.Digest.IsZero():
		return fmt.Errorf("%w: source digest is zero", ErrMalformed)
	}
	return nil
}

// String says what happened, as one sentence.
func (f Failure) String() string {
	if f.State == FailureUnfinished {
		return fmt.Sprintf("the conversion of %s that began at %s has not ended: when none is running it was interrupted, convert again",
			f.Source, f.Time.Format(time.RFC3339))
	}
	return fmt.Sprintf("the conversion of %s failed at %s: %s", f.Source, f.Time.Format(time.RFC3339), f.Reason)
}

// Shortened cuts a text in the middle and makes it UTF-8, as JSON would.
func Shortened(s string, most int) string {
	const dots = " … "
	if s = strings.ToValidUTF8(s, "\ufffd"); len(s) <= most {
		return s
	}
	head, tail := s[:(most-len(dots))/2], s[len(s)-(most-len(dots))/2:]
	for !utf8.ValidString(head) {
		head = head[:len(head)-1]
	}
	for !utf8.ValidString(tail) {
		tail = tail[1:]
	}
	return head + dots + tail
}
