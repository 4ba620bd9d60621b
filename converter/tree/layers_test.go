// Cases of a bug have its number in the list of faults in converter/bugs_test.go.

package tree_test

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"testing"

	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
)

const chunkSize = chunk.MinSize

// defaultMtime is that of entries that do not say another.
const defaultMtime = 1700000000

// content is a chunk store in memory. The texts of layers are put there, so that
// trees can be printed with them.
type content map[chunk.Digest][]byte

var _ store.BatchGetter = content{}

func (c content) GetBatch(_ context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	for i := len(ds) - 1; i >= 0; i-- { // any order will do
		p, ok := c[ds[i]]
		err := error(nil)
		if !ok {
			err = store.ErrNotFound
		}
		if err := fn(ds[i], p, err); err != nil {
			return err
		}
	}
	return nil
}

func (c content) put(p []byte) (chunks []chunk.Digest) {
	for len(p) > 0 {
		n := min(len(p), chunkSize)
		d := chunk.Sum(p[:n])
		c[d] = append([]byte(nil), p[:n]...)
		chunks = append(chunks, d)
		p = p[n:]
	}
	return chunks
}

// layer reads entries in the notation of the tests, one a line:
//
//	d PATH            f PATH "text"        l PATH -> TARGET      h PATH => TARGET
//	c|b PATH MAJ,MIN  p PATH
//
// followed by any of: mode=0755 uid=7 gid=8 mtime=-5.000000001 xattr NAME=VALUE
// as user.k=1. PATH and TARGET may be quoted as in Go.
func layer(t testing.TB, c content, lines ...string) []image.Entry {
	t.Helper()
	var entries []image.Entry
	for _, line := range lines {
		for l := range strings.SplitSeq(line, "\n") {
			if l = strings.TrimSpace(l); l != "" {
				entries = append(entries, entry(t, c, l))
			}
		}
	}
	return entries
}

func words(t testing.TB, line string) (ws []string) {
	t.Helper()
	for line = strings.TrimSpace(line); line != ""; line = strings.TrimSpace(line) {
		if line[0] != '"' {
			w, rest, _ := strings.Cut(line, " ")
			ws, line = append(ws, w), rest
			continue
		}
		q, err := strconv.QuotedPrefix(line)
		if err != nil {
			t.Fatalf("test line %q: %v", line, err)
		}
		w, err := strconv.Unquote(q)
		if err != nil {
			t.Fatalf("test line %q: %v", line, err)
		}
		ws, line = append(ws, w), line[len(q):]
	}
	return ws
}

func entry(t testing.TB, c content, line string) image.Entry {
	t.Helper()
	ws := words(t, line)
	e := image.Entry{Name: ws[1], Mode: 0o644, Mtime: defaultMtime}
	rest := ws[2:]
	switch ws[0] {
	case "d":
		e.Type, e.Mode = image.TypeDir, 0o755
	case "f":
		e.Type, e.Size = image.TypeReg, int64(len(rest[0]))
		e.Chunks, rest = c.put([]byte(rest[0])), rest[1:]
	case "l":
		e.Type, e.Mode, e.Link, rest = image.TypeSymlink, 0o777, rest[1], rest[2:]
	case "h":
		e.Type, e.Link, rest = image.TypeLink, rest[1], rest[2:]
	case "c", "b":
		e.Type = image.TypeChar
		if ws[0] == "b" {
			e.Type = image.TypeBlock
		}
		if _, err := fmt.Sscanf(rest[0], "%d,%d", &e.Major, &e.Minor); err != nil {
			t.Fatalf("test line %q: %v", line, err)
		}
		rest = rest[1:]
	case "p":
		e.Type = image.TypeFIFO
	default:
		t.Fatalf("test line %q: unknown type", line)
	}
	for _, a := range rest {
		setAttr(t, &e, a)
	}
	return e
}

func setAttr(t testing.TB, e *image.Entry, a string) {
	t.Helper()
	key, value, _ := strings.Cut(a, "=")
	num := func(bits int) int64 {
		n, err := strconv.ParseInt(value, 0, bits)
		if err != nil {
			t.Fatalf("test attribute %q: %v", a, err)
		}
		return n
	}
	switch key {
	case "mode":
		e.Mode = uint32(num(33))
	case "uid":
		e.UID = uint32(num(33))
	case "gid":
		e.GID = uint32(num(33))
	case "mtime":
		var nsec string
		value, nsec, _ = strings.Cut(value, "+")
		e.Mtime = num(64)
		if nsec != "" {
			value = nsec
			e.MtimeNsec = uint32(num(33))
		}
	default:
		e.Xattrs = append(e.Xattrs, rafs.Xattr{Name: key, Value: []byte(value)})
	}
}

// show prints a tree in the notation of layers: every path in order, with
// attributes where they differ from those an entry has by default. A root that
// no entry describes is not printed.
func show(tr *rafs.Tree, c content) string {
	var b strings.Builder
	first := map[*rafs.Inode]string{}
	_ = tr.Walk(func(path string, n *rafs.Inode) error {
		path = strings.TrimPrefix(path, "/")
		if target, ok := first[n]; ok {
			fmt.Fprintf(&b, "h %s => %s\n", quote(path), quote(target))
			return nil
		}
		first[n] = path
		if s := describe(path, n, c); s != `d "" mtime=0` {
			b.WriteString(s + "\n")
		}
		return nil
	})
	return b.String()
}

func describe(path string, n *rafs.Inode, c content) string {
	letter := map[uint32]string{
		rafs.ModeDir: "d", rafs.ModeRegular: "f", rafs.ModeSymlink: "l",
		rafs.ModeChar: "c", rafs.ModeBlock: "b", rafs.ModeFIFO: "p", rafs.ModeSocket: "s",
	}[n.Type()]
	s := letter + " " + quote(path)
	mode := uint32(0o644)
	switch n.Type() {
	case rafs.ModeDir:
		mode = 0o755
	case rafs.ModeRegular:
		var text []byte
		for _, d := range n.Chunks {
			text = append(text, c[d]...)
		}
		s += fmt.Sprintf(" %q", text)
	case rafs.ModeSymlink:
		mode = 0o777
		s += " -> " + quote(n.Target)
	case rafs.ModeChar, rafs.ModeBlock:
		s += fmt.Sprintf(" %d,%d", n.Major(), n.Minor())
	}
	if n.Mode&rafs.ModePerm != mode {
		s += fmt.Sprintf(" mode=%#o", n.Mode&rafs.ModePerm)
	}
	if n.UID != 0 {
		s += fmt.Sprintf(" uid=%d", n.UID)
	}
	if n.GID != 0 {
		s += fmt.Sprintf(" gid=%d", n.GID)
	}
	if n.MtimeNsec != 0 {
		s += fmt.Sprintf(" mtime=%d+%d", n.Mtime, n.MtimeNsec)
	} else if n.Mtime != defaultMtime {
		s += fmt.Sprintf(" mtime=%d", n.Mtime)
	}
	for _, x := range n.Xattrs {
		s += fmt.Sprintf(" %s=%s", x.Name, x.Value)
	}
	return s
}

func quote(s string) string {
	if s == "" || strings.ContainsAny(s, " \"\\") || strconv.Quote(s) != `"`+s+`"` {
		return strconv.Quote(s)
	}
	return s
}

// merge applies layers with a Merger of the tests' chunk size.
func merge(t testing.TB, layers ...[]image.Entry) *rafs.Tree {
	t.Helper()
	m := tree.NewMerger(tree.Config{ChunkSize: chunkSize})
	for _, l := range layers {
		if err := m.Apply(l); err != nil {
			t.Fatal(err)
		}
	}
	return m.Tree()
}

// lines normalises an expected tree: one line an entry, no indentation.
func lines(s string) string {
	var b strings.Builder
	for l := range strings.SplitSeq(s, "\n") {
		if l = strings.TrimSpace(l); l != "" {
			b.WriteString(l + "\n")
		}
	}
	return b.String()
}
