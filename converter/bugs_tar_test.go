package converter_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strconv"
	"strings"
	"testing"
)

// tarEntry is one tar entry byte by byte. archive/tar's Writer is no help here:
// it refuses most of what the bug reports are about.
type tarEntry struct {
	flag         byte
	name, link   string
	mode         int64
	uid, gid     int64
	mtime        string // as a PAX record has it
	major, minor int64
	size         int64 // len(body), unless the header is to lie
	body         string
	pax          []string // records, "key=value", after those that the fields need
	format       string   // "pax", "gnu" or "ustar": how to write what is too long
	uname        string
}

// tarNotation writes a tar of entries in the notation of the reports, one a line:
//
//	d PATH            f PATH "text"        l PATH -> TARGET      h PATH => TARGET
//	c|b PATH MAJ,MIN  p PATH               g                     (a global header)
//
// followed by any of mode=0755 uid=7 gid=8 mtime=-1.5 type=Z as=gnu uname=x
// claim=100 (the size in the header), pax:KEY=VALUE and xattrs as user.k=1.
// Words may be quoted as in Go.
func tarNotation(t testing.TB, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	for line := range strings.SplitSeq(text, "\n") {
		if line = strings.TrimSpace(line); line != "" {
			b.Write(parseEntry(t, line).bytes())
		}
	}
	b.Write(make([]byte, 1024))
	return b.Bytes()
}

// words splits a line at spaces; a quoted word is unquoted.
func words(t testing.TB, line string) (ws []string) {
	t.Helper()
	for rest := strings.TrimSpace(line); rest != ""; rest = strings.TrimSpace(rest) {
		q, err := strconv.QuotedPrefix(rest)
		if rest[0] != '"' {
			q, _, _ = strings.Cut(rest, " ")
			ws, rest = append(ws, q), rest[len(q):]
			continue
		}
		if err != nil {
			t.Fatalf("test line %q: %v", line, err)
		}
		w, err := strconv.Unquote(q)
		if err != nil {
			t.Fatalf("test line %q: %v", line, err)
		}
		ws, rest = append(ws, w), rest[len(q):]
	}
	return ws
}

func parseEntry(t testing.TB, line string) *tarEntry {
	t.Helper()
	ws := words(t, line)
	e := &tarEntry{mode: 0o644, mtime: "1700000000", format: "pax"}
	if ws[0] == "g" {
		e.flag, e.name = 'g', "pax_global_header"
		e.attributes(t, ws[1:])
		return e
	}
	e.name = ws[1]
	rest := ws[2:]
	switch ws[0] {
	case "d":
		e.flag, e.mode = '5', 0o755
	case "f":
		e.flag, e.body, rest = '0', rest[0], rest[1:]
		e.size = int64(len(e.body))
	case "l":
		e.flag, e.mode, e.link, rest = '2', 0o777, rest[1], rest[2:]
	case "h":
		e.flag, e.link, rest = '1', rest[1], rest[2:]
	case "c", "b":
		e.flag = map[string]byte{"c": '3', "b": '4'}[ws[0]]
		if _, err := fmt.Sscanf(rest[0], "%d,%d", &e.major, &e.minor); err != nil {
			t.Fatalf("test line %q: %v", line, err)
		}
		rest = rest[1:]
	case "p":
		e.flag = '6'
	default:
		t.Fatalf("test line %q: unknown type", line)
	}
	e.attributes(t, rest)
	return e
}

func (e *tarEntry) attributes(t testing.TB, as []string) {
	t.Helper()
	for _, a := range as {
		key, value, _ := strings.Cut(a, "=")
		number := func() int64 {
			n, err := strconv.ParseInt(value, 0, 64)
			if err != nil {
				t.Fatalf("test attribute %q: %v", a, err)
			}
			return n
		}
		switch record, isRecord := strings.CutPrefix(a, "pax:"); {
		case isRecord:
			e.pax = append(e.pax, record)
		case key == "mode":
			e.mode = number()
		case key == "uid":
			e.uid = number()
		case key == "gid":
			e.gid = number()
		case key == "claim":
			e.size = number()
		case key == "mtime":
			e.mtime = value
		case key == "type":
			e.flag = value[0]
		case key == "as":
			e.format = value
		case key == "uname":
			e.uname = value
		default:
			e.pax = append(e.pax, "SCHILY.xattr."+a)
		}
	}
}

// bytes returns the entry with the helper entries before it.
func (e *tarEntry) bytes() []byte {
	var before bytes.Buffer
	var records []string
	h := tarHeader{}
	name, prefix := e.name, ""
	switch {
	case len(name) <= 100:
	case e.format == "gnu":
		before.Write(helper('L', name+"\x00"))
		name = name[:100]
	case e.format == "ustar":
		cut := strings.LastIndexByte(name[:min(len(name), 156)], '/')
		prefix, name = name[:cut], name[cut+1:]
	default:
		records = append(records, "path="+name)
		name = name[:100]
	}
	link := e.link
	switch {
	case len(link) <= 100:
	case e.format == "gnu":
		before.Write(helper('K', link+"\x00"))
		link = link[:100]
	default:
		records = append(records, "linkpath="+link)
		link = link[:100]
	}
	copy(h[0:100], name)
	copy(h[157:257], link)
	h.octal(100, 8, e.mode)
	for _, f := range []struct {
		key   string
		off   int
		width int
		value int64
	}{{"uid", 108, 8, e.uid}, {"gid", 116, 8, e.gid}, {"size", 124, 12, e.size}, {"devmajor", 329, 8, e.major}, {"devminor", 337, 8, e.minor}} {
		switch fits := f.value >= 0 && f.value < 1<<(3*(f.width-1)); {
		case fits:
			h.octal(f.off, f.width, f.value)
		case e.format == "gnu":
			h.base256(f.off, f.width, f.value)
		default:
			records = append(records, fmt.Sprintf("%s=%d", f.key, f.value))
		}
	}
	sec, err := strconv.ParseInt(e.mtime, 10, 64)
	switch {
	case err == nil && sec >= 0 && sec < 1<<33:
		h.octal(136, 12, sec)
	case err == nil && e.format == "gnu":
		h.base256(136, 12, sec)
	default:
		records = append(records, "mtime="+e.mtime)
	}
	h[156] = e.flag
	if e.format == "gnu" {
		copy(h[257:], "ustar  \x00")
	} else {
		copy(h[257:], "ustar\x0000")
		copy(h[345:500], prefix)
	}
	copy(h[265:297], e.uname)
	records = append(records, e.pax...)
	if e.flag == 'g' {
		return helper('g', paxRecords(records))
	}
	if len(records) > 0 {
		before.Write(helper('x', paxRecords(records)))
	}
	h.sum()
	before.Write(h[:])
	before.WriteString(e.body)
	before.Write(make([]byte, -len(e.body)&511))
	return before.Bytes()
}

// helper returns an entry that describes the next one.
func helper(flag byte, body string) []byte {
	var h tarHeader
	copy(h[:], "helper")
	h.octal(100, 8, 0o644)
	h.octal(124, 12, int64(len(body)))
	h[156] = flag
	copy(h[257:], "ustar\x0000")
	if flag == 'L' || flag == 'K' {
		copy(h[257:], "ustar  \x00")
	}
	h.sum()
	return append(append(h[:], body...), make([]byte, -len(body)&511)...)
}

func paxRecords(records []string) string {
	var b strings.Builder
	for _, r := range records {
		n := len(r) + 2
		for len(strconv.Itoa(n))+len(r)+2 != n {
			n = len(strconv.Itoa(n)) + len(r) + 2
		}
		fmt.Fprintf(&b, "%d %s\n", n, r)
	}
	return b.String()
}

type tarHeader [512]byte

func (h *tarHeader) octal(off, width int, v int64) {
	copy(h[off:], fmt.Sprintf("%0*o", width-1, v))
}

// base256 writes v as GNU tar writes what octal digits do not hold.
func (h *tarHeader) base256(off, width int, v int64) {
	f := h[off : off+width]
	for i := range f {
		f[i] = byte(v >> 63) // the sign
	}
	n := min(width, 8)
	copy(f[width-n:], binary.BigEndian.AppendUint64(nil, uint64(v))[8-n:])
	f[0] = f[0]&0x7f | 0x80
	if v < 0 {
		f[0] = 0xff
	}
}

func (h *tarHeader) sum() {
	copy(h[148:156], "        ")
	sum := 0
	for _, c := range h {
		sum += int(c)
	}
	copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
}
