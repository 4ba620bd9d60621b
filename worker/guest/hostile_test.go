package guest_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"quarry/worker/guest"
	"quarry/worker/guest/wire"
	"quarry/worker/sandbox"
)

// impostor answers in the place of the helper, as a guest that has root can.
type impostor struct{ answer []byte }

func (i *impostor) Run(_ context.Context, _ []string, stdin, stdout, _ *os.File) (int, error) {
	_, _, _ = wire.NewReader(stdin).Next()
	_, _ = stdout.Write(i.answer)
	return 1, nil
}

func (i *impostor) Cat(context.Context, string, *os.File) error { return errors.New("none") }

// frames joins frames: entries, data as strings, and kinds that are alone.
func frames(parts ...any) []byte {
	var b []byte
	for _, p := range parts {
		switch p := p.(type) {
		case wire.Entry:
			b = wire.AppendFrame(b, wire.KindEntry, p.Encode())
		case wire.Sum:
			b = wire.AppendFrame(b, wire.KindSum, p.Encode())
		case wire.Error:
			b = wire.AppendFrame(b, wire.KindError, p.Encode())
		case string:
			b = wire.AppendFrame(b, wire.KindData, []byte(p))
		case wire.Kind:
			b = wire.AppendFrame(b, p, nil)
		case []byte:
			b = append(b, p...)
		}
	}
	return b
}

func TestAnImpostorIsFoundOut(t *testing.T) {
	file := func(p string, n int64) wire.Entry { return wire.Entry{Type: wire.TypeFile, Path: p, Size: n} }
	dir := func(p string) wire.Entry { return wire.Entry{Type: wire.TypeFolder, Path: p} }
	empty := wire.Sum{SHA256: [32]byte{0xe3, 0xb0, 0xc4, 0x42, 0x98, 0xfc, 0x1c, 0x14, 0x9a, 0xfb, 0xf4, 0xc8, 0x99, 0x6f, 0xb9, 0x24, 0x27, 0xae, 0x41, 0xe4, 0x64, 0x9b, 0x93, 0x4c, 0xa4, 0x95, 0x99, 0x1b, 0x78, 0x52, 0xb8, 0x55}}
	end := wire.KindEnd
	ctx := context.Background()
	stat := func(f *guest.Files) error { _, err := f.Stat(ctx, "/x"); return err }
	list := func(f *guest.Files) error { _, err := f.List(ctx, "/x", 1); return err }
	get := func(f *guest.Files) error { _, _, err := read(f, "/x", all); return err }
	take := func(f *guest.Files) error { return f.TarDown(ctx, sandbox.TarOptions{Path: "/x"}, io.Discard) }
	put := func(f *guest.Files) error {
		_, err := f.Write(ctx, "/x", sandbox.WriteOptions{Size: -1}, guest.Owner{}, strings.NewReader("abc"))
		return err
	}
	for what, c := range map[string]struct {
		call   func(*guest.Files) error
		answer []byte
	}{
		"nothing":                        {stat, nil},
		"no frame":                       {stat, []byte("hello")},
		"half a frame":                   {stat, frames(file("/x", 1))[:20]},
		"a frame of another kind":        {stat, frames(end)},
		"an error that is none":          {stat, frames(wire.Error{Errno: 0})},
		"a hard link as a file":          {stat, frames(wire.Entry{Type: wire.TypeHardLink, Path: "/x", Target: "/y"})},
		"a file of another folder":       {list, frames(file("/y/z", 1), end)},
		"a name with ..":                 {list, frames(file("/x/../z", 1), end)},
		"a file deeper than asked for":   {list, frames(file("/x/y/z", 1), end)},
		"the folder itself":              {list, frames(file("/x/", 1), end)},
		"the same file twice":            {list, frames(file("/x/y", 1), file("/x/y", 1), end)},
		"a list without end":             {list, frames(file("/x/y", 1))},
		"a folder that is read":          {get, frames(dir("/x"), empty)},
		"less data than said":            {get, frames(file("/x", 3), "ab", empty)},
		"more data than said":            {get, frames(file("/x", 3), "abcd", empty)},
		"data with another sum":          {get, frames(file("/x", 0), wire.Sum{})},
		"data that ends":                 {get, frames(file("/x", 3), "ab")},
		"data of nothing, for ever":      {get, frames(file("/x", 3), "", "", "")},
		"a tar with names out of order":  {take, frames(file("b", 0), empty, file("a", 0), empty, end)},
		"a tar with a name twice":        {take, frames(file("a", 0), empty, file("a", 0), empty, end)},
		"a tar of a file and its folder": {take, frames(file("a", 0), empty, file("a/b", 0), empty, end)},
		"a tar with an absolute name":    {take, frames(file("/a", 0), empty, end)},
		"a tar with ..":                  {take, frames(dir("a"), file("a/..", 0), empty, end)},
		"a tar without a folder":         {take, frames(file("a/b", 0), empty, end)},
		"a tar with a link to nothing":   {take, frames(wire.Entry{Type: wire.TypeHardLink, Path: "b", Target: "a"}, end)},
		"a tar that is cut off":          {take, frames(file("a", 0), empty)},
		"a tar with a name of 256 bytes": {take, frames(file(strings.Repeat("a", 256), 0), empty, end)},
		"a write that was not asked for": {put, frames(file("/x", 3))},
		"a write of another size":        {put, frames(wire.KindReady, file("/x", 2))},
		"a write without an answer":      {put, frames(wire.KindReady)},
	} {
		f := guest.New(guest.Config{Runner: &impostor{c.answer}, Limits: guest.Limits{Idle: 5 * time.Second}})
		if err := c.call(f); !errors.Is(err, sandbox.ErrFileStuck) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// FuzzAnswers: whatever a guest answers, a call ends, and what a tar holds can be read.
func FuzzAnswers(f *testing.F) {
	f.Add(frames(wire.Entry{Type: wire.TypeFolder, Path: "a"}, wire.Entry{Type: wire.TypeSymlink, Path: "a/b", Target: "\xff"}, wire.KindEnd))
	f.Add(frames(wire.Entry{Type: wire.TypeFile, Path: "/x/a", Size: 3}, "abc", wire.Sum{Size: 3}))
	f.Add(frames(wire.Error{Errno: 2, Message: "x"}))
	f.Add(frames(wire.Entry{Type: wire.TypeChar, Path: "a", Major: 1 << 31, UID: 1<<32 - 1, Sec: -1 << 63}, wire.KindEnd))
	f.Fuzz(func(t *testing.T, answer []byte) {
		if len(answer) > 32<<10 {
			return // more than the pipe holds would need a reader of its own
		}
		files := guest.New(guest.Config{Runner: &impostor{answer}, Limits: guest.Limits{Idle: 5 * time.Second}})
		_, _ = files.Stat(context.Background(), "/x")
		_, _ = files.List(context.Background(), "/x", 3)
		_, _, _ = read(files, "/x", all)
		var b bytes.Buffer
		if err := files.TarDown(context.Background(), sandbox.TarOptions{Path: "/x"}, &b); err == nil {
			names(t, b.Bytes())
		}
	})
}
