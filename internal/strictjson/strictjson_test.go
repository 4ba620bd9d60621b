package strictjson_test

import (
	"errors"
	"strings"
	"testing"

	"quarry/internal/strictjson"
)

type value struct {
	A int    `json:"a"`
	B string `json:"b"`
	C *int   `json:"c,omitempty"`
}

func TestDecodeTakesOnlyTheOneForm(t *testing.T) {
	const good = `{"a":1,"b":"x"}`
	if v, err := strictjson.Decode[value]([]byte(good), len(good)); err != nil || v.A != 1 || v.B != "x" {
		t.Fatalf("Decode = %+v, %v", v, err)
	}
	for name, bad := range map[string]string{
		"empty": "", "null": "null", "space": `{"a": 1,"b":"x"}`, "newline": good + "\n", "second value": good + good, "order": `{"b":"x","a":1}`,
		"case": `{"A":1,"b":"x"}`, "twice": `{"a":2,"a":1,"b":"x"}`, "missing": `{"a":1}`, "unknown": `{"a":1,"b":"x","d":1}`,
		"escape": `{"a":1,"b":"\u0078"}`, "float": `{"a":1.0,"b":"x"}`, "explicit null": `{"a":1,"b":"x","c":null}`, "bad UTF-8": "{\"a\":1,\"b\":\"\xff\"}",
	} {
		if v, err := strictjson.Decode[value]([]byte(bad), 100); err == nil {
			t.Errorf("%s: %s accepted as %+v", name, bad, v)
		}
	}
	if _, err := strictjson.Decode[value]([]byte(good+" "), 100); !errors.Is(err, strictjson.ErrNotCanonical) {
		t.Errorf("trailing space: %v, want ErrNotCanonical", err)
	}
	if _, err := strictjson.Decode[value]([]byte(good), len(good)-1); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("over the limit: %v", err)
	}
}
