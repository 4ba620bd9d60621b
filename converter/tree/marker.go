package tree

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"quarry/store/image"
)

// Names of markers in layers, from AUFS by way of image-spec layer.md.
const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	metaPrefix     = ".wh..wh."
	plnkPrefix     = ".wh..wh.plnk/"
)

type kind int

const (
	ordinary    kind = iota
	whiteout         // hides one name of lower layers
	opaque           // hides all lower content of its directory
	bookkeeping      // AUFS's own, never part of the tree
)

// cleanName returns a path as lexically clean components without a leading
// slash; "" is the root. Leading .. stay at the root, which is what containerd
// does, and docker, that unpacks in a chroot.
func cleanName(name string) (string, error) {
	if strings.IndexByte(name, 0) >= 0 {
		return "", errors.New("the path holds a NUL byte")
	}
	return path.Clean("/" + name)[1:], nil
}

func splitName(name string) (parent, base string) {
	i := strings.LastIndexByte(name, '/')
	return name[:max(i, 0)], name[i+1:]
}

// classify says what the entry of a clean name is. The file type plays no
// part, as in docker and containerd.
func classify(name string) (kind, error) {
	if !strings.Contains(name, whiteoutPrefix) {
		return ordinary, nil
	}
	parent, base := splitName(name)
	for dir := range strings.SplitSeq(parent, "/") {
		switch {
		case strings.HasPrefix(dir, metaPrefix):
			return bookkeeping, nil
		case strings.HasPrefix(dir, whiteoutPrefix):
			return 0, errors.New("the path leads through a whiteout: no directory has a name that begins with \".wh.\"")
		}
	}
	switch target, isMarker := strings.CutPrefix(base, whiteoutPrefix); {
	case !isMarker:
		return ordinary, nil
	case base == opaqueName:
		return opaque, nil
	case target == "" || target == "." || target == "..":
		return 0, fmt.Errorf("the whiteout names no file: %q must be followed by a file name", whiteoutPrefix)
	case strings.HasPrefix(base, metaPrefix):
		return bookkeeping, nil
	}
	return whiteout, nil
}

// checkComponent refuses names that a directory of the tree cannot hold.
func (m *Merger) checkComponent(name string) error {
	switch most := m.cfg.Limits.NameBytes; {
	case len(name) > most:
		return fmt.Errorf("the path component %s has %d bytes, at most %d are possible (limit NameBytes)", image.Quote(name), len(name), most)
	case strings.HasPrefix(name, whiteoutPrefix):
		return fmt.Errorf("the path leads to %s: no file has a name that begins with %q", image.Quote(name), whiteoutPrefix)
	}
	return nil
}

// applyMarkers makes the directories that markers stand in where there is
// nothing, as docker and containerd do, then hides what the markers say, and
// sets AUFS's link sources aside. All markers are looked up in the tree as the
// lower layers left it, and hide the directories made for others too, so their
// order means nothing.
func (m *Merger) applyMarkers(entries []image.Entry) error {
	var markers []*image.Entry
	for i := range entries {
		e := &entries[i]
		if !strings.Contains(e.Name, whiteoutPrefix) {
			continue
		}
		markers = append(markers, e)
		if err := m.makeMarkersDir(e); err != nil {
			return m.entryError(e, err)
		}
	}
	c := covers{m: m, entries: entries}
	var hidden []spot // name "" stands for all
	for _, e := range markers {
		s, err := m.marker(e, &c)
		if err != nil {
			return m.entryError(e, err)
		}
		if s.dir != nil {
			hidden = append(hidden, s)
		}
	}
	for _, s := range hidden {
		if s.name == "" {
			m.removed[s.dir] = s.dir.children
			s.dir.children = map[string]*file{}
			continue
		}
		if f := s.dir.children[s.name]; f != nil {
			if m.removed[s.dir] == nil {
				m.removed[s.dir] = map[string]*file{}
			}
			m.removed[s.dir][s.name] = f
		}
		delete(s.dir.children, s.name)
	}
	return nil
}

// makeMarkersDir makes the directory that e stands in when it is a marker. A
// file in the directory's place stays, and so does what a symlink does not lead
// to.
func (m *Merger) makeMarkersDir(e *image.Entry) error {
	name, k, err := cleanMarker(e)
	if err != nil || k != whiteout && k != opaque {
		return err
	}
	parent, _ := splitName(name)
	p, err := m.walk(parent)
	switch {
	case errors.Is(err, errLinks) || errors.Is(err, errNotDir):
		return nil
	case err != nil || len(p.missing) == 0 || len(p.via) > 0 || p.dir.children[p.missing[0]] != nil:
		return err
	}
	_, _, err = m.makeParents(parent)
	return err
}

// cleanMarker returns the clean name of e and what it says.
func cleanMarker(e *image.Entry) (name string, k kind, err error) {
	if name, err = cleanName(e.Name); err == nil {
		k, err = classify(name)
	}
	return name, k, err
}

// marker returns what e hides, with a nil dir when that is nothing.
func (m *Merger) marker(e *image.Entry, c *covers) (spot, error) {
	name, k, err := cleanMarker(e)
	switch {
	case err != nil || k == ordinary:
		return spot{}, err
	case k == bookkeeping:
		return spot{}, m.keepLinkSource(e, name)
	}
	s, via, err := m.locate(name, k)
	if err != nil || s.dir == nil {
		return spot{}, err
	}
	covered, err := c.any(slices.Clone(via))
	if err != nil || covered {
		return spot{}, err
	}
	return s, nil
}

// locate returns the spot of an entry in the tree or, for a marker, of what it
// hides, with the name "" for all that is in the directory. The dir is nil when
// it does not exist. via is valid until the next walk.
func (m *Merger) locate(name string, k kind) (s spot, via []spot, err error) {
	parent, base := splitName(name)
	switch k {
	case opaque:
		base = ""
	case whiteout:
		base = base[len(whiteoutPrefix):]
	}
	p, err := m.walk(parent)
	switch {
	case errors.Is(err, errLinks) || errors.Is(err, errNotDir) || err == nil && len(p.missing) > 0:
		return s, nil, nil
	case err != nil:
		return s, nil, err
	}
	return spot{p.dir, base}, p.via, nil
}

// keepLinkSource keeps regular files below .wh..wh.plnk: AUFS put the content
// of hard-linked files there, and entries of the same layer link to it.
func (m *Merger) keepLinkSource(e *image.Entry, name string) error {
	if e.Type != image.TypeReg || !strings.HasPrefix(name, plnkPrefix) {
		return nil
	}
	f, err := m.newFile(e)
	m.plnk[name] = f
	return err
}
