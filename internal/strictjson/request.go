package strictjson

import (
	"bytes"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf8"
)

// ErrAmbiguous says that a text is JSON of the right shape, and that two readers could
// take it for different values.
var ErrAmbiguous = errors.New("the JSON can be read in two ways")

// Request reads a T from JSON as programs of other languages write it: in any order and
// with any space. What encoding/json is lenient about and other readers are not is
// refused: names of fields in another case, a field or key twice, text that is no
// Unicode, unknown fields, and bytes after the value. The caller bounds b.
func Request[T any](b []byte) (T, error) {
	var v, zero T
	if err := RequestInto(b, &v); err != nil {
		return zero, err
	}
	return v, nil
}

// RequestInto is Request into what v points to, which after an error holds anything.
func RequestInto(b []byte, v any) error {
	if err := unicode(b); err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the JSON document")
	}
	dec = json.NewDecoder(bytes.NewReader(b))
	dec.UseNumber()
	return unambiguous(dec, reflect.TypeOf(v), "")
}

// unambiguous walks one value that encoding/json has taken for a t. A nil t is one
// whose names nobody knows.
func unambiguous(dec *json.Decoder, t reflect.Type, at string) error {
	tok, err := dec.Token()
	if err != nil {
		return err
	}
	t = plain(t)
	switch tok {
	case json.Delim('['):
		var elem reflect.Type
		if t != nil && (t.Kind() == reflect.Slice || t.Kind() == reflect.Array) {
			elem = t.Elem()
		}
		for i := 0; dec.More(); i++ {
			if err := unambiguous(dec, elem, at+"["+strconv.Itoa(i)+"]"); err != nil {
				return err
			}
		}
		_, err = dec.Token()
	case json.Delim('{'):
		if err := object(dec, t, at); err != nil {
			return err
		}
		_, err = dec.Token()
	}
	return err
}

func object(dec *json.Decoder, t reflect.Type, at string) error {
	var known map[string]reflect.Type
	if t != nil && t.Kind() == reflect.Struct {
		known = fields(t)
	}
	seen := map[string]bool{}
	for dec.More() {
		tok, err := dec.Token()
		if err != nil {
			return err
		}
		name, _ := tok.(string)
		path := strings.TrimPrefix(at+"."+name, ".")
		if seen[name] {
			return fmt.Errorf("%w: %q is there twice", ErrAmbiguous, path)
		}
		seen[name] = true
		var elem reflect.Type
		if known != nil {
			var ok bool
			if elem, ok = known[name]; !ok {
				return fmt.Errorf("%w: unknown field %q: case counts", ErrAmbiguous, path)
			}
		} else if t != nil && t.Kind() == reflect.Map {
			elem = t.Elem()
		}
		if err := unambiguous(dec, elem, path); err != nil {
			return err
		}
	}
	return nil
}

// plain takes pointers off a type, and gives nil for one that reads JSON by itself.
func plain(t reflect.Type) reflect.Type {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == nil {
		return nil
	}
	p := reflect.PointerTo(t)
	if p.Implements(reflect.TypeFor[json.Unmarshaler]()) || p.Implements(reflect.TypeFor[encoding.TextUnmarshaler]()) {
		return nil
	}
	return t
}

// fields are the names that a struct has in JSON, with what they hold.
func fields(t reflect.Type) map[string]reflect.Type {
	out := map[string]reflect.Type{}
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && name == "" || !f.IsExported() || name == "-" {
			continue
		}
		if name == "" {
			name = f.Name
		}
		out[name] = f.Type
	}
	return out
}

// unicode refuses what encoding/json would replace by U+FFFD: bytes that are not
// UTF-8, and escapes of half a character.
func unicode(b []byte) error {
	if !utf8.Valid(b) {
		return fmt.Errorf("%w: it is not UTF-8", ErrAmbiguous)
	}
	for i := 0; i+1 < len(b); i++ {
		if b[i] != '\\' {
			continue
		}
		i++
		first, ok := escape(b[i-1:])
		if !ok || first < 0xd800 || first > 0xdfff {
			continue
		}
		second, ok := escape(b[min(i+5, len(b)):])
		if first >= 0xdc00 || !ok || second < 0xdc00 || second > 0xdfff {
			return fmt.Errorf("%w: \\u%04x is half a character", ErrAmbiguous, first)
		}
		i += 10
	}
	return nil
}

// escape reads the \uXXXX that b begins with.
func escape(b []byte) (rune, bool) {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return 0, false
	}
	n, err := strconv.ParseUint(string(b[2:6]), 16, 16)
	return rune(n), err == nil
}
