package converter_test

import (
	"archive/tar"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"quarry/internal/layermodel"
	"quarry/internal/testimage"
)

// tameStack makes layers as build tools write them, which every unpacker must
// agree on. What is left out, since tools differ there or cannot do it:
//
//   - a path twice in a layer, or under an entry of the same layer that is no
//     directory: the order of entries decides, in each tool by rules of its own
//   - parents without an entry: the time of unpacking shows
//   - markers whose directory or target does not exist, AUFS's names, markers
//     that are not regular files: umoci takes the former for errors
//   - names with .. and symlinks that lead nowhere as parents
//   - hard links with attributes of their own, and of symlinks, which umoci
//     follows
//   - xattrs that a kernel refuses, those of overlayfs, and empty values, which
//     Go's tar reader hides from umoci
//   - times before 1970, which umoci sets wrong; and the root's time, which it
//     makes up
type tameStack struct {
	dice   dice
	layers [][]testimage.Entry
	lower  layermodel.Tree // what the layers so far make
	taken  map[string]bool // paths the layer has its say on
	serial int

	markers bool // and directories that are given again
}

func newTameStack(p []byte, markers bool) *tameStack {
	s := &tameStack{dice: p, markers: markers}
	s.layer([]testimage.Entry{s.with(testimage.Dir("./")), s.with(testimage.Dir("usr")), s.with(testimage.Dir("usr/lib")), s.with(testimage.Symlink("lib", "usr/lib"))})
	for range 1 + s.dice.roll(4) {
		s.taken = map[string]bool{"": true}
		var entries []testimage.Entry
		for range 5 + s.dice.roll(20) {
			entries = append(entries, s.change()...)
		}
		s.layer(entries)
	}
	return s
}

func (s *tameStack) layer(entries []testimage.Entry) {
	s.layers = append(s.layers, entries)
	lower, err := layermodel.Merge(s.layers...)
	if err != nil {
		panic(fmt.Sprintf("a tame stack is refused: %v\n%s", err, listLayers(s.layers)))
	}
	s.lower = lower
}

// with gives an entry attributes.
func (s *tameStack) with(e testimage.Entry) testimage.Entry {
	s.serial++
	d := &s.dice
	e.ModTime = time.Unix(1_500_000_000+int64(s.serial), int64(choose(d, 0, 1, 999_999_999)))
	e.Uid, e.Gid = choose(d, 0, 0, 1000, 70_000), choose(d, 0, 0, 100)
	if e.Typeflag == tar.TypeSymlink {
		return e
	}
	e.Mode = choose(d, e.Mode, e.Mode, 0o600, 0o755, 0o4755, 0o2755, 0o1777)
	if d.oneIn(4) {
		e = e.WithXattr("trusted.t", choose(d, "v", "\x00\xff"))
		if e.Typeflag == tar.TypeReg || e.Typeflag == tar.TypeDir {
			e = e.WithXattr("user."+choose(d, "k", "l"), choose(d, "v", "w"))
		}
	}
	return e
}

// pick chooses a path of the lower layers that this one has left alone, with
// all above and below it; "" when there is none.
func (s *tameStack) pick(suits func(n *layermodel.Node) bool) string {
	var found []string
	for _, p := range slices.Sorted(maps.Keys(s.lower)) {
		if p != "" && !strings.HasPrefix(p, "usr") && p != "lib" && suits(s.lower[p]) && s.free(p) {
			found = append(found, p)
		}
	}
	if len(found) == 0 {
		return ""
	}
	return choose(&s.dice, found...)
}

func (s *tameStack) free(p string) bool {
	for q := range s.taken {
		if q == p || strings.HasPrefix(q, p+"/") || q != "" && strings.HasPrefix(p, q+"/") {
			return false
		}
	}
	return true
}

func anyFile(*layermodel.Node) bool       { return true }
func isDir(n *layermodel.Node) bool       { return n.Type == tar.TypeDir }
func isLinkable(n *layermodel.Node) bool  { return n.Type != tar.TypeDir && n.Type != tar.TypeSymlink }
func (s *tameStack) take(p string) string { s.taken[p] = true; return p }
func (s *tameStack) newName(d *dice) string {
	return choose(d, "a", "b", "c.txt", "caf\u00e9", "d", strings.Repeat("n", 120))
}

// change returns the entries of one change: a file added or replaced, a
// directory's attributes changed, something deleted.
func (s *tameStack) change() []testimage.Entry {
	d := &s.dice
	kind := d.roll(10)
	switch {
	case kind < 2 && s.markers: // something is deleted
		if p := s.pick(anyFile); p != "" {
			s.take(p)
			dir, base := p[:strings.LastIndexByte(p, '/')+1], p[strings.LastIndexByte(p, '/')+1:]
			return []testimage.Entry{testimage.File(dir+".wh."+base, "").WithMtime(time.Unix(0, 0))}
		}
	case kind == 2 && s.markers: // a directory is made anew
		if p := s.pick(isDir); p != "" {
			s.take(p)
			entries := []testimage.Entry{s.with(testimage.Dir(p)), testimage.File(p+"/.wh..wh..opq", ""), s.with(testimage.File(p+"/new", "n"))}
			i := d.roll(2) // the marker stands before or behind what comes new
			entries[1+i], entries[1] = entries[1], entries[1+i]
			return entries
		}
	case kind == 3: // another name of a file
		if p := s.pick(isLinkable); p != "" {
			s.take(p)
			if at := s.place(); at != "" {
				return []testimage.Entry{testimage.Hardlink(s.take(at), p)}
			}
		}
	case kind < 6: // something is replaced
		if p := s.pick(anyFile); p != "" {
			return []testimage.Entry{s.with(s.file(s.take(p)))}
		}
	case kind == 6: // through a symlink, as with a merged /usr
		p := "lib/" + s.newName(d)
		if !s.taken["usr/"+p] && s.lower["usr/"+p] == nil {
			s.take("usr/" + p)
			return []testimage.Entry{s.with(testimage.File(p, "through lib"))}
		}
	}
	if at := s.place(); at != "" {
		return []testimage.Entry{s.with(s.file(s.take(at)))}
	}
	return nil
}

// place is a path that does not exist, in a directory that does.
func (s *tameStack) place() string {
	dir := ""
	if !s.dice.oneIn(3) {
		dir = s.pick(isDir)
	}
	p := strings.TrimPrefix(dir+"/"+s.newName(&s.dice), "/")
	if s.lower[p] != nil || !s.free(p) {
		return ""
	}
	return p
}

func (s *tameStack) file(p string) testimage.Entry {
	d := &s.dice
	switch d.roll(8) {
	case 0, 1, 2:
		if n := s.lower[p]; n == nil || !isDir(n) || s.markers {
			return testimage.Dir(p)
		}
	case 3:
		return testimage.Symlink(p, choose(d, "a", "../b", "/usr/lib/c.txt", "no/where", p))
	case 4:
		return testimage.Entry{Header: tar.Header{Typeflag: tar.TypeFifo, Name: p, Mode: 0o600}}
	case 5:
		return testimage.Device(p, choose[byte](d, tar.TypeChar, tar.TypeBlock), choose(d, int64(1), 8), choose(d, int64(3), 300))
	}
	return testimage.File(p, body(d, s.serial))
}
