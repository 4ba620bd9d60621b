package wire_test

import (
	"bytes"
	"encoding/hex"
	"errors"
	"flag"
	"io"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/worker/guest/wire"
)

var update = flag.Bool("update", false, "write the goldens")

func requests() []wire.Request {
	return []wire.Request{
		{Op: wire.OpStat, Path: "/"},
		{Op: wire.OpRead, Path: "/a\xff\n b ", Offset: 3, Length: -1, MaxBytes: 1 << 40},
		{Op: wire.OpWrite, Path: "/" + strings.Repeat("x", wire.MaxPath-1), Flags: wire.FlagMkDirs | wire.FlagMode, Mode: 0o4755, UID: 1, GID: 2},
		{Op: wire.OpTarDown, Path: "/srv", Exclude: []string{"*.o", ".git"}, MaxCount: 9, MaxBytes: 10},
	}
}

func entries() []wire.Entry {
	return []wire.Entry{
		{Type: wire.TypeFile, Shared: true, Mode: 0o644, UID: 1, GID: 2, Size: 3, Sec: -1, Nsec: 999999999, Path: "a/b"},
		{Type: wire.TypeSymlink, Mode: 0o777, Path: "l", Target: "../x\xfe"},
		{Type: wire.TypeHardLink, Path: "h", Target: "a/b"},
		{Type: wire.TypeChar, Major: 1, Minor: 5, Path: "zero"},
		{Type: wire.TypeFolder, Mode: 0o1777},
	}
}

func TestRequestsComeBackAsTheyWere(t *testing.T) {
	for _, q := range requests() {
		got, err := wire.DecodeRequest(q.Encode())
		if err != nil {
			t.Fatalf("%+v: %v", q, err)
		}
		if d := cmp.Diff(got, q); d != "" {
			t.Error(d)
		}
	}
}

// The bytes are a contract between two programs.
func TestGolden(t *testing.T) {
	var b []byte
	for _, q := range requests()[:2] {
		b = wire.AppendFrame(b, wire.KindRequest, q.Encode())
	}
	for _, e := range entries() {
		b = wire.AppendFrame(b, wire.KindEntry, e.Encode())
	}
	b = wire.AppendFrame(b, wire.KindSum, wire.Sum{Size: 258, SHA256: [32]byte{1, 31: 2}}.Encode())
	b = wire.AppendFrame(b, wire.KindError, wire.Error{Errno: wire.CodeChanged, Message: "x"}.Encode())
	b = wire.AppendFrame(wire.AppendFrame(wire.AppendFrame(b, wire.KindData, []byte("abc")), wire.KindReady, nil), wire.KindEnd, nil)
	const name = "testdata/frames.golden"
	if *update {
		if err := os.WriteFile(name, []byte(hex.Dump(b)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(hex.Dump(b), string(want)); d != "" {
		t.Error(d)
	}
}

func TestEntriesComeBackAsTheyWere(t *testing.T) {
	for _, e := range entries() {
		got, err := wire.DecodeEntry(e.Encode())
		if err != nil {
			t.Fatalf("%+v: %v", e, err)
		}
		if d := cmp.Diff(got, e); d != "" {
			t.Error(d)
		}
	}
}

func TestWhatCannotBeIsRefused(t *testing.T) {
	for name, e := range map[string]wire.Entry{
		"an unknown type":                    {Type: 'x', Path: "a"},
		"a negative size":                    {Type: wire.TypeFile, Size: -1, Path: "a"},
		"a folder with a size":               {Type: wire.TypeFolder, Size: 1, Path: "a"},
		"a symlink without a target":         {Type: wire.TypeSymlink, Path: "a"},
		"a file with a target":               {Type: wire.TypeFile, Path: "a", Target: "b"},
		"a zero byte in a name":              {Type: wire.TypeFile, Path: "a\x00b"},
		"a type in the mode":                 {Type: wire.TypeFile, Mode: 0o100644, Path: "a"},
		"a second of a thousand million ns":  {Type: wire.TypeFile, Nsec: 1e9, Path: "a"},
		"a path that is longer than allowed": {Type: wire.TypeFile, Path: strings.Repeat("a", wire.MaxPath+1)},
		"a device number of a file":          {Type: wire.TypeFile, Major: 1, Path: "a"},
		"a folder with more names":           {Type: wire.TypeFolder, Shared: true, Path: "a"},
	} {
		if _, err := wire.DecodeEntry(e.Encode()); !errors.Is(err, wire.ErrFrame) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, q := range map[string]wire.Request{
		"a relative path":     {Op: wire.OpStat, Path: "a"},
		"no path":             {Op: wire.OpStat},
		"no op":               {Path: "/"},
		"a negative offset":   {Op: wire.OpRead, Path: "/", Offset: -1},
		"an unknown flag":     {Op: wire.OpRead, Path: "/", Flags: 1 << 20},
		"too many patterns":   {Op: wire.OpTarDown, Path: "/", Exclude: make([]string, wire.MaxExclude+1)},
		"an unknown op":       {Op: 200, Path: "/"},
		"a length below none": {Op: wire.OpRead, Path: "/", Length: -2},
	} {
		if _, err := wire.DecodeRequest(q.Encode()); !errors.Is(err, wire.ErrFrame) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestFramesAreBoundedBeforeTheyAreRead(t *testing.T) {
	for _, h := range []string{"D\x00\x01\x00\x01", "E\xff\xff\xff\xff", "R\x00\x00\x00\x01", "?\x00\x00\x00\x00"} {
		if _, _, err := wire.NewReader(strings.NewReader(h)).Next(); !errors.Is(err, wire.ErrFrame) {
			t.Errorf("%q: %v", h, err)
		}
	}
	for _, cut := range []string{"D", "D\x00\x00\x00\x02", "D\x00\x00\x00\x02x"} {
		if _, _, err := wire.NewReader(strings.NewReader(cut)).Next(); !errors.Is(err, wire.ErrFrame) {
			t.Errorf("%q: %v", cut, err)
		}
	}
	if _, _, err := wire.NewReader(strings.NewReader("")).Next(); err != io.EOF {
		t.Errorf("nothing: %v", err)
	}
}

// FuzzFrames: whatever comes, what is accepted is what an encoder writes.
func FuzzFrames(f *testing.F) {
	for _, q := range requests() {
		f.Add(wire.AppendFrame(nil, wire.KindRequest, q.Encode()))
	}
	for _, e := range entries() {
		f.Add(wire.AppendFrame(nil, wire.KindEntry, e.Encode()))
	}
	f.Add(wire.AppendFrame(nil, wire.KindSum, wire.Sum{Size: 1}.Encode()))
	f.Add(wire.AppendFrame(nil, wire.KindError, wire.Error{Errno: 2, Message: "stat"}.Encode()))
	f.Add(wire.AppendFrame(wire.AppendFrame(nil, wire.KindData, []byte("abc")), wire.KindEnd, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := wire.NewReader(bytes.NewReader(b))
		var again []byte
		for {
			k, p, err := r.Next()
			if err != nil {
				break
			}
			again = wire.AppendFrame(again, k, p)
			var enc []byte
			switch k {
			case wire.KindRequest:
				var q wire.Request
				q, err = wire.DecodeRequest(p)
				enc = q.Encode()
			case wire.KindEntry:
				var e wire.Entry
				e, err = wire.DecodeEntry(p)
				enc = e.Encode()
			case wire.KindSum:
				var s wire.Sum
				s, err = wire.DecodeSum(p)
				enc = s.Encode()
			case wire.KindError:
				var e wire.Error
				e, err = wire.DecodeError(p)
				enc = e.Encode()
			default:
				continue
			}
			if err == nil && !bytes.Equal(enc, p) {
				t.Fatalf("%c %x is taken, and written as %x", k, p, enc)
			}
		}
		if !bytes.HasPrefix(b, again) {
			t.Fatal("frames are not what was read")
		}
	})
}
