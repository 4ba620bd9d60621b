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

func TestPartsOfAFile(t *testing.T) {
	for _, c := range []struct {
		o               sandbox.ReadOptions
		size, offset, n int64
		valid           bool
	}{
		{sandbox.ReadOptions{Length: -1}, 10, 0, 10, true}, {sandbox.ReadOptions{Offset: 3, Length: 4}, 10, 3, 4, true}, {sandbox.ReadOptions{Offset: 8, Length: 4}, 10, 8, 2, true},
		{sandbox.ReadOptions{Offset: 10, Length: -1}, 10, 10, 0, true}, {sandbox.ReadOptions{Offset: 99, Length: 1}, 10, 99, 0, true}, {sandbox.ReadOptions{Offset: -3, Length: -1}, 10, 7, 3, true},
		{sandbox.ReadOptions{Offset: -30, Length: -1}, 10, 0, 10, true}, {sandbox.ReadOptions{Offset: -3, Length: -1}, 0, 0, 0, true}, {sandbox.ReadOptions{Length: 0}, 10, 0, 0, true},
		{sandbox.ReadOptions{Offset: -3, Length: 1}, 10, 7, 1, false}, {sandbox.ReadOptions{Length: -2}, 10, 0, 10, false},
	} {
		if offset, n := c.o.Part(c.size); offset != c.offset || n != c.n || c.o.Valid() != c.valid {
			t.Errorf("%+v of %d: %d, %d, %v", c.o, c.size, offset, n, c.o.Valid())
		}
	}
}
