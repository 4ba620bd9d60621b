package tree

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"quarry/rafs"
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
func checkComponent(name string) error {
	switch {
	case len(name) > rafs.MaxName:
		return fmt.Errorf("the path component %q has %d bytes, at most %d are possible", name, len(name), rafs.MaxName)
	case strings.HasPrefix(name, whiteoutPrefix):
		return fmt.Errorf("the path leads to %q: no file has a name that begins with %q", name, whiteoutPrefix)
	}
	return nil
}

// applyMarkers hides what the layer's markers say and sets AUFS's link sources
// aside. All markers are looked up in the tree as the lower layers left it, so
// their order means nothing. They make no directories, and one whose directory
// does not exist does nothing.
func (m *Merger) applyMarkers(entries []image.Entry) error {
	c := covers{m: m, entries: entries}
	var hidden []spot // name "" stands for all
	for i := range entries {
		e := &entries[i]
		if !strings.Contains(e.Name, whiteoutPrefix) {
			continue
		}
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
			s.dir.children = map[string]*file{}
			continue
		}
		delete(s.dir.children, s.name)
	}
	return nil
}

// marker returns what e hides, with a nil dir when that is nothing.
func (m *Merger) marker(e *image.Entry, c *covers) (spot, error) {
	name, err := cleanName(e.Name)
	if err != nil {
		return spot{}, err
	}
	kind, err := classify(name)
	if err != nil {
		return spot{}, err
	}
	parent, base := splitName(name)
	switch kind {
	case ordinary:
		return spot{}, nil
	case bookkeeping:
		return spot{}, m.keepLinkSource(e, name)
	case opaque:
		base = ""
	case whiteout:
		base = base[len(whiteoutPrefix):]
	}
	p, err := m.walk(parent)
	if errors.Is(err, errLinks) || errors.Is(err, errNotDir) || len(p.missing) > 0 {
		return spot{}, nil
	}
	if err != nil {
		return spot{}, err
	}
	dir := p.dir
	covered, err := c.any(slices.Clone(p.via))
	if err != nil || covered {
		return spot{}, err
	}
	return spot{dir, base}, nil
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

// covers knows which names of the lower tree the layer has entries of its own
// for. A marker in lib/ is meant for the directory that a lower symlink lib
// leads to, but not when the layer puts its own directory in lib's place: that
// one starts empty, and following the link would hide files the layer's author
// never saw there.
type covers struct {
	m       *Merger
	entries []image.Entry
	names   map[spot]struct{} // nil until asked for; most layers need none
}

func (c *covers) any(links []spot) (bool, error) {
	if len(links) == 0 {
		return false, nil
	}
	if c.names == nil {
		if err := c.collect(); err != nil {
			return false, err
		}
	}
	return slices.ContainsFunc(links, func(s spot) bool { _, ok := c.names[s]; return ok }), nil
}

func (c *covers) collect() error {
	c.names = map[spot]struct{}{}
	for i := range c.entries {
		name, err := cleanName(c.entries[i].Name)
		if err != nil {
			continue // its turn to be reported comes
		}
		kind, err := classify(name)
		if err != nil || kind == opaque || kind == bookkeeping {
			continue
		}
		parent, base := splitName(name)
		if kind == whiteout {
			base = base[len(whiteoutPrefix):]
		}
		p, err := c.m.walk(parent)
		switch {
		case errors.Is(err, errLinks) || errors.Is(err, errNotDir) || len(p.missing) > 0:
		case err != nil:
			return err
		default:
			c.names[spot{p.dir, base}] = struct{}{}
		}
	}
	return nil
}
