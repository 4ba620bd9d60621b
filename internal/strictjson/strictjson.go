// Package strictjson reads JSON that has exactly one text per value. What is
// signed, compared by digest or written to the journal must not have a second
// spelling that a lenient parser takes for the same. What clients of other languages
// send may be spelled as they like, and must still have one meaning: see Request.
package strictjson

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
)

// ErrNotCanonical says that a text is JSON of the right shape, but not as
// encoding/json writes the value.
var ErrNotCanonical = errors.New("the JSON is not in the one form quarry writes: fixed field order, no spaces, nothing after it")

// Decode reads a T from at most limit bytes that json.Marshal could have
// written. It refuses unknown, repeated and missing fields, other case or order
// of names, space, other escapes, and bytes before or after the value.
func Decode[T any](b []byte, limit int) (T, error) {
	var v, zero T
	if len(b) > limit {
		return zero, fmt.Errorf("%d bytes, at most %d", len(b), limit)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&v); err != nil {
		return zero, err
	}
	again, err := json.Marshal(v)
	if err != nil {
		return zero, err
	}
	if !bytes.Equal(b, again) {
		return zero, ErrNotCanonical
	}
	return v, nil
}
