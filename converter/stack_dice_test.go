package converter_test

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"quarry/internal/testimage"
)

// dice turns bytes into choices. Behind their end it always chooses the first,
// so that a shorter input is a simpler one.
type dice []byte

func (d *dice) roll(n int) int {
	if len(*d) == 0 {
		return 0
	}
	v := int((*d)[0]) % n
	*d = (*d)[1:]
	return v
}

// oneIn is true in one of n cases, and never behind the end.
func (d *dice) oneIn(n int) bool { return d.roll(n) == n-1 }

func choose[T any](d *dice, of ...T) T { return of[d.roll(len(of))] }

// The names collide often: a stack is of few of them, in all kinds of places.
var (
	dirNames   = []string{"a", "d", "b", "d", "a", "e"}
	plainNames = []string{"c", "a", "b", "f", "c", "d", "f", "g"}
	oddNames   = []string{
		"..", ".", "", ".wh", "wh.a", "caf\xe9", "caf\u00e9", "cafe\u0301", "new\nline", `back\slash`, "\x01\x7f",
		strings.Repeat("n", 100), strings.Repeat("n", 101), strings.Repeat("n", 255), strings.Repeat("n", 256), "nul\x00",
		".wh.", ".wh..", ".wh...", ".wh..wh.plnk", ".wh..wh.orph", ".wh.a", ".wh..wh..opq",
	}
)

// stack is a stack of layers being made.
type stack struct {
	dice   dice // about entries
	forms  dice // about their bytes: the same dice from the other end
	layers [][]testimage.Entry
	serial int      // of the entry, which its mtime tells
	files  []string // names of files so far, for hard links
}

// wildStack makes one to four layers in which anything can happen.
func wildStack(p []byte) *stack {
	s := &stack{dice: p, forms: slices.Clone(p)}
	slices.Reverse(s.forms)
	s.layers = make([][]testimage.Entry, 1+s.dice.roll(4))
	for i := range s.layers {
		// Few entries most of the time: then what one of them does still shows in the end.
		for n := s.dice.roll(choose(&s.dice, 6, 10, 10, 40) + 1); n > 0 && len(s.dice) > 0; n-- {
			s.serial++
			s.layers[i] = append(s.layers[i], s.entry())
		}
	}
	return s
}

// blobs are the layers as they lie in a registry.
func (s *stack) blobs(t testing.TB) [][]byte {
	var blobs [][]byte
	for _, l := range s.layers {
		blobs = append(blobs, blobOf(t, &s.forms, tarOf(&s.forms, l)))
	}
	return blobs
}

func (s *stack) path() string {
	p := ""
	for s.dice.roll(5) > 2 {
		p += s.component(dirNames) + "/"
	}
	return p + s.component(plainNames)
}

func (s *stack) component(names []string) string {
	if s.dice.oneIn(80) {
		names = oddNames
	}
	return choose(&s.dice, names...)
}

// name is a path, sometimes with a decoration that means nothing.
func (s *stack) name() string {
	p := s.path()
	if s.dice.oneIn(12) {
		return choose(&s.dice, "./"+p, "/"+p, "//"+p, "../"+p, "a/../"+p, p+"//b")
	}
	return p
}

func (s *stack) entry() testimage.Entry {
	e := testimage.Entry{Header: tar.Header{Name: s.name(), Mode: 0o644, ModTime: time.Unix(int64(s.serial), 0)}}
	switch s.dice.roll(12) {
	case 0, 1:
		e.Typeflag, e.Body = tar.TypeReg, body(&s.dice, s.serial)
		s.files = append(s.files, e.Name)
	case 2, 3, 4:
		e.Typeflag, e.Mode = tar.TypeDir, 0o755
		e.Name += choose(&s.dice, "", "/")
	case 5, 6:
		e.Typeflag, e.Linkname = tar.TypeSymlink, s.target()
	case 7, 8:
		e.Typeflag, e.Linkname = tar.TypeLink, s.linkname()
		if e.Linkname == "" {
			e.Typeflag = tar.TypeFifo
		}
		s.files = append(s.files, e.Name)
	case 9:
		e.Typeflag = tar.TypeReg
		e.Name = whiteoutOf(e.Name)
	case 10:
		e.Typeflag = tar.TypeReg
		e.Name += choose(&s.dice, "/.wh..wh..opq", "/.wh..wh..opq", "/.wh..wh.aufs", "/.wh.a")
	case 11:
		oddity(&s.dice, &e)
	}
	if s.dice.oneIn(3) {
		attributes(&s.dice, &e)
	}
	return e
}

// linkname is what a hard link names, mostly one of the last files; "" when
// there are none.
func (s *stack) linkname() string {
	switch {
	case s.dice.oneIn(20):
		return ".wh..wh.plnk/" + choose(&s.dice, "a", "b")
	case s.dice.oneIn(20):
		return s.name()
	case len(s.files) == 0:
		return ""
	}
	return choose(&s.dice, s.files[max(0, len(s.files)-4):]...)
}

func whiteoutOf(name string) string {
	i := strings.LastIndexByte(strings.TrimSuffix(name, "/"), '/') + 1
	return name[:i] + ".wh." + name[i:]
}

func (s *stack) target() string {
	t := choose(&s.dice, "", "", "", "/", "../", "../../", "./", "d/../") + s.path()
	if s.dice.oneIn(30) {
		return choose(&s.dice, ".", "/", "..", "a//b/", "t\xff", strings.Repeat("t", 4095), strings.Repeat("t", 4096))
	}
	return t
}

// body is content of a length around chunk ends, often the same as another's.
func body(d *dice, serial int) string {
	switch d.roll(6) {
	case 0:
		return fmt.Sprint(serial)
	case 1:
		return ""
	case 2:
		return "shared"
	case 3:
		return strings.Repeat("x", choose(d, 511, 512, 513, testChunk-1, testChunk, testChunk+1, 3*testChunk))
	case 4:
		return strings.Repeat("\x00", choose(d, 1, testChunk, 2*testChunk+5)) // a hole
	}
	return fmt.Sprint("content ", serial)
}

// oddity makes e something rarer than a file.
func oddity(d *dice, e *testimage.Entry) {
	e.Mode = 0o600
	switch d.roll(16) {
	case 0, 1, 9, 10:
		e.Typeflag = tar.TypeFifo
	case 2, 3, 11, 12:
		e.Typeflag, e.Devmajor, e.Devminor = choose[byte](d, tar.TypeChar, tar.TypeBlock), choose(d, int64(0), 1, 8, 4095), choose(d, int64(0), 3, 256, 1<<20-1)
	case 4:
		e.Typeflag, e.Devmajor, e.Devminor = tar.TypeChar, choose[int64](d, 1, 1, 1, 4096), choose[int64](d, 3, 3, 1<<20, 3)
	case 5, 13:
		e.Typeflag, e.Body = tar.TypeCont, "contiguous"
	case 6, 14:
		e.Typeflag, e.Name, e.Body = tar.TypeReg, ".wh..wh.plnk/"+choose(d, "a", "b"), "kept aside "+e.Name
	case 7:
		e.Typeflag = choose[byte](d, tar.TypeDir, tar.TypeDir, tar.TypeDir, tar.TypeDir, tar.TypeReg, 'Z')
		e.Name = choose(d, ".wh.a", ".wh..wh..opq", ".wh..wh.orph", "./", "/", ".", "", "..", "a/..", "a")
	case 8, 15:
		e.Typeflag, e.Name, e.ModTime = tar.TypeXGlobalHeader, "global", time.Time{}
		e.PAXRecords = map[string]string{"comment": "nothing", "path": "a"}
	}
}

// attributes gives e owners, times, permissions and xattrs.
func attributes(d *dice, e *testimage.Entry) {
	if e.Typeflag == tar.TypeXGlobalHeader {
		return
	}
	e.Mode = choose(d, e.Mode, 0, 0o4755, 0o2755, 0o1777, 0o100644, 0o7777)
	e.Uid = choose(d, 0, 1000, 70_000, 2_097_152, 1<<32-2)
	if d.oneIn(120) {
		e.Uid = 1<<32 - 1
	}
	e.Gid = choose(d, 0, 1, 1<<32-2)
	e.ModTime = choose(d, e.ModTime, time.Unix(-1, 0), time.Unix(-2, 500_000_000), time.Unix(1<<33, 999_999_999), time.Unix(1_700_000_000, 1), time.Unix(253402300800, 0))
	for d.roll(3) > 0 {
		key := choose(d, "user.k", "user.k", "user.l", "trusted.t", "security.capability", "security.selinux", "system.posix_acl_access",
			"system.posix_acl_default", "user.", "user", "btrfs.compression", "com.apple.provenance", "trusted.overlay.opaque",
			"user.overlay.origin", "userx.y", "user."+strings.Repeat("k", 250))
		value := choose(d, "v", "", "\x01\x00\n=", "w")
		if d.oneIn(80) {
			key = choose(d, "user.k", "trusted.t", "user."+strings.Repeat("k", 251), "noprefix")
			value = choose(d, strings.Repeat("V", 65535), strings.Repeat("V", 65536), "v", strings.Repeat("V", 4000))
		}
		*e = e.WithXattr(key, value)
	}
}

// tarOf writes a layer as tar bytes, every entry in a format of its own. What
// archive/tar's writer refuses or would not write as it stands is written raw.
func tarOf(d *dice, entries []testimage.Entry) []byte {
	var b bytes.Buffer
	for _, e := range entries {
		e.Format = choose(d, tar.FormatPAX, tar.FormatGNU, tar.FormatUSTAR)
		p, ok := written(e)
		if !ok || e.Format == tar.FormatPAX && d.oneIn(2) {
			p = testimage.RawTar(e)
		}
		b.Write(p)
	}
	// One end marker block, or none, ends an archive as well.
	b.Write(testimage.EndMarker[:512*choose(d, 2, 2, 1, 0)])
	return b.Bytes()
}

// written is one entry as archive/tar's writer writes it, if it does.
func written(e testimage.Entry) ([]byte, bool) {
	if e.Format != tar.FormatPAX && e.ModTime.Nanosecond() != 0 {
		return nil, false // it would cut the time
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	e.Size = int64(len(e.Body))
	if e.Typeflag == tar.TypeXGlobalHeader {
		e.Header = tar.Header{Typeflag: e.Typeflag, Name: e.Name, PAXRecords: e.PAXRecords}
	}
	if w.WriteHeader(&e.Header) != nil {
		return nil, false
	}
	if _, err := io.WriteString(w, e.Body); err != nil {
		return nil, false
	}
	err := w.Flush()
	return b.Bytes(), err == nil
}

// blobOf compresses a layer, or does not, in one of the ways of the wild.
func blobOf(t testing.TB, d *dice, plain []byte) []byte {
	half := len(plain) / 2
	switch d.roll(6) {
	case 0:
		return plain
	case 1:
		return testimage.Gzip(t, plain)
	case 2:
		return testimage.Zstd(t, plain)
	case 3:
		return append(testimage.Gzip(t, plain[:half]), testimage.Gzip(t, plain[half:])...)
	case 4:
		return append(testimage.Zstd(t, plain[:half]), testimage.Zstd(t, plain[half:])...)
	}
	skippable := "\x50\x2a\x4d\x18\x03\x00\x00\x00abc"
	return append([]byte(skippable), append(testimage.Zstd(t, plain), skippable...)...)
}
