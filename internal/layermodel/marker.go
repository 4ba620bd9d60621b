package layermodel

import (
	"archive/tar"
	"errors"
	"fmt"
	"slices"
	"strings"

	"quarry/internal/testimage"
)

type marker int

const (
	none     marker = iota
	whiteout        // hides one name
	opaque          // hides all that a directory holds
	aufs            // AUFS's bookkeeping, and what is below it
)

const plnkDir = ".wh..wh.plnk/"

// markerOf says what the entry of a clean path is.
func markerOf(p string) marker {
	dir, base := split(p)
	switch {
	case slices.ContainsFunc(strings.Split(dir, "/"), func(c string) bool { return strings.HasPrefix(c, ".wh..wh.") }):
		return aufs
	case base == ".wh..wh..opq":
		return opaque
	case strings.HasPrefix(base, ".wh..wh."):
		return aufs
	case strings.HasPrefix(base, ".wh."):
		return whiteout
	}
	return none
}

// checkMarkers refuses whiteouts of no file and files below whiteouts.
func checkMarkers(p string) error {
	dir, base := split(p)
	for _, c := range strings.Split(dir, "/") {
		if strings.HasPrefix(c, ".wh..wh.") {
			return nil // all below is AUFS's own
		}
		if strings.HasPrefix(c, ".wh.") {
			return errors.New("a path through a whiteout")
		}
	}
	if base == ".wh." || base == ".wh.." || base == ".wh..." {
		return errors.New("a whiteout of no file")
	}
	return nil
}

// hide is a marker's effect: a path hidden with all below, or, all being set,
// only what is below it.
type hide struct {
	path string
	all  bool
}

func (h hide) hides(q string) bool { return !h.all && q == h.path || below(q, h.path) }

func isLinkSource(p string, typ byte) bool {
	return typ == tar.TypeReg && strings.HasPrefix(p, plnkDir)
}

// linkSources are AUFS's files that hard links of the layer may name.
func linkSources(entries []testimage.Entry) map[string]*Node {
	plnk := map[string]*Node{}
	for _, e := range entries {
		if p := clean(e.Name); isLinkSource(p, types[e.Typeflag]) {
			plnk[p] = newNode(e)
		}
	}
	return plnk
}

// makeMarkersDirs makes the directories of markers where there is nothing.
func (m model) makeMarkersDirs(layer int, entries []testimage.Entry) error {
	for _, e := range entries {
		p := clean(e.Name)
		if k := markerOf(p); k != whiteout && k != opaque {
			continue
		}
		dir, _ := split(p)
		if real, links, err := m.follow(dir, layer); err != nil || len(links) > 0 || m.throughFile(real) {
			continue
		}
		if err := m.makeDirs(dir, layer); err != nil {
			return fmt.Errorf("entry %q: %w", e.Name, err)
		}
	}
	return nil
}

// throughFile reports whether p is or leads through a file that is no directory.
func (m model) throughFile(p string) bool {
	for ; p != ""; p, _ = split(p) {
		if m[p].Node != nil && !m.isDir(p) {
			return true
		}
	}
	return false
}

// spot is where an entry or marker is in the tree of the lower layers.
type spot struct {
	hide            // what a marker hides; path alone for an entry
	kind   marker   // none for an entry
	isDir  bool     // an entry that keeps what a directory holds
	links  []string // symlinks that its path leads through
	exists bool     // its directory does
}

// hidden returns what the layer's markers hide of the lower layers. A marker
// means the directory that lower symlinks lead to, but not when the layer takes
// one of those symlinks away: what comes in its place starts empty.
func (m model) hidden(layer int, entries []testimage.Entry) []hide {
	var spots []spot
	for _, e := range entries {
		if s, ok := m.spot(layer, e); ok {
			spots = append(spots, s)
		}
	}
	var hidden []hide
	for _, s := range spots {
		if s.kind == none || !s.exists {
			continue
		}
		gone := slices.ContainsFunc(s.links, func(link string) bool {
			return slices.ContainsFunc(spots, func(o spot) bool { return o.takes(link) })
		})
		if !gone {
			hidden = append(hidden, s.hide)
		}
	}
	return hidden
}

// takes reports whether s takes the symlink away: it hides it, is in its place,
// or is no directory in the place of one above. Markers that lead through
// symlinks themselves do not count: each of two could take the other's away.
func (s spot) takes(link string) bool {
	if s.kind == none {
		return s.path == link || !s.isDir && below(link, s.path)
	}
	return s.exists && s.hides(link) && len(s.links) == 0
}

func (m model) spot(layer int, e testimage.Entry) (spot, bool) {
	p := clean(e.Name)
	dir, base := split(p)
	s := spot{kind: markerOf(p), isDir: e.Typeflag == tar.TypeDir}
	if s.kind == aufs || p == "" {
		return s, false
	}
	dir, links, err := m.follow(dir, layer)
	if err != nil {
		return s, false
	}
	s.links, s.exists = links, m.isDir(dir)
	switch s.kind {
	case opaque:
		s.hide = hide{dir, true}
	case whiteout:
		base = strings.TrimPrefix(base, ".wh.")
		fallthrough
	default:
		s.path = strings.TrimPrefix(dir+"/"+base, "/")
	}
	return s, true
}
