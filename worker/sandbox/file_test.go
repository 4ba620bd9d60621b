package sandbox_test

import (
	"encoding/json"
	"testing"

	"quarry/worker/sandbox"
)

func TestNamesThatAreNotUTF8PassThroughJSON(t *testing.T) {
	for _, want := range []sandbox.FileInfo{
		{Path: "/a b\n"}, {Path: "/\xff", Target: "ü"}, {Path: "/a", Target: "\xfe"}, {Path: "/\xff\xfe"}, {},
	} {
		b, err := json.Marshal(want.Encoded())
		if err != nil {
			t.Fatal(err)
		}
		var in sandbox.FileInfo
		if err := json.Unmarshal(b, &in); err != nil {
			t.Fatal(err)
		}
		if got, err := in.Decoded(); err != nil || got != want {
			t.Errorf("%q: %+v, %v", want.Path, got, err)
		}
	}
	if _, err := (sandbox.FileInfo{Path: "!", NameEncoded: true}).Decoded(); err == nil {
		t.Error("no base64 is taken for a name")
	}
}
