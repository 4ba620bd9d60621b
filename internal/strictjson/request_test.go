package strictjson_test

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"quarry/internal/strictjson"
)

type inner struct {
	Name string `json:"name"`
}

type asked struct {
	value
	At     time.Time         `json:"at"`
	In     inner             `json:"in"`
	List   []inner           `json:"list,omitempty"`
	Map    map[string]inner  `json:"map,omitempty"`
	Labels map[string]string `json:"labels,omitempty"`
	Raw    json.RawMessage   `json:"raw,omitempty"`
	Data   []byte            `json:"data,omitempty"`
}

func TestRequestTakesWhatHasOneMeaning(t *testing.T) {
	for name, good := range map[string]string{
		"as it is": `{"a":1,"b":"x"}`, "other order and space": " {\n\"b\" : \"x\",\"a\":1 }\n", "an escaped name": `{"\u0061":1}`,
		"nested": `{"in":{"name":"n"},"list":[{"name":"1"},{"name":"2"}],"map":{"A":{"name":"x"},"a":{"name":"y"}},"labels":{"K":"1","k":"2"}}`,
		"null":   `{"a":null,"c":null,"list":null}`, "its own reader": `{"at":"2026-01-01T00:00:00Z","raw":{"x":1,"X":2}}`,
		"a pair of escapes": `{"b":"\ud83d\ude00 \\ud800 \"\\\\ud800"}`, "bytes": `{"data":"AAEC"}`,
	} {
		v, err := strictjson.Request[asked]([]byte(good))
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		var want asked
		if err := json.Unmarshal([]byte(good), &want); err != nil || !reflect.DeepEqual(v, want) {
			t.Errorf("%s: %+v, want %+v, %v", name, v, want, err)
		}
	}
}

func TestRequestRefusesWhatHasTwo(t *testing.T) {
	for bad, says := range map[string]string{
		`{"A":1}`: `"A"`, `{"a":1,"a":1}`: `"a" is there twice`, `{"a":1,"A":2}`: `"A"`, `{"in":{"Name":"x"}}`: `"in.Name"`, `{"list":[{"name":"1"},{"name":"1","name":"2"}]}`: `"list[1].name"`,
		`{"labels":{"k":"1","k":"2"}}`: `"labels.k"`, `{"map":{"k":{"NAME":"1"}}}`: `"map.k.NAME"`, `{"raw":{"x":1,"x":2}}`: `"raw.x"`, `{"b":"\ud800"}`: `\ud800`, `{"b":"\udc00\ud800"}`: `\udc00`,
		`{"b":"\ud800\u0041"}`: `\ud800`, "{\"b\":\"\xff\"}": "UTF-8",
	} {
		_, err := strictjson.Request[asked]([]byte(bad))
		if !errors.Is(err, strictjson.ErrAmbiguous) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want one that says %s", bad, err, says)
		}
	}
	for _, bad := range []string{"", "{", `{"x":1}`, `{"a":"1"}`, `{"a":1}{}`, `{"a":1} x`, `[]`, `{"in":{"x":1}}`} {
		if v, err := strictjson.Request[asked]([]byte(bad)); err == nil {
			t.Errorf("%q accepted as %+v", bad, v)
		}
	}
}

// What is taken means the same to a reader of maps, which knows of no case.
func FuzzRequest(f *testing.F) {
	for _, s := range []string{`{"a":1,"b":"x","in":{"name":"é"}}`, `{"A":1}`, `{"list":[{}],"labels":{"a":"b"}}`, `{"b":"\ud83d\ude00"}`, `null`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := strictjson.Request[asked](b)
		if err != nil {
			return
		}
		var loose map[string]json.RawMessage
		if err := json.Unmarshal(b, &loose); err != nil {
			t.Fatalf("%q: %v", b, err)
		}
		var text string
		if raw, ok := loose["b"]; ok && json.Unmarshal(raw, &text) == nil && text != v.B {
			t.Fatalf("%q: b is %q and %q", b, v.B, text)
		}
		again, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		if w, err := strictjson.Request[asked](again); err != nil || !reflect.DeepEqual(w.In, v.In) || w.B != v.B || w.A != v.A {
			t.Fatalf("%q becomes %q, which is read as %+v, %v", b, again, w, err)
		}
	})
}
