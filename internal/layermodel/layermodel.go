// Package layermodel is image-spec layer.md and docs/conversion.md once more, in
// the plainest form: a map from path to file, changed entry by entry, without
// regard to cost. It exists to be compared with what the converter makes of the
// same entries, so it shares nothing with it but the documents.
//
// Left out are the limits on what an image may cost, and the sums of a file's
// xattrs: the converter's own tests have them.
package layermodel

import (
	"archive/tar"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"quarry/internal/testimage"
)

// Tree is an image: its files by path, "" being the root. Two paths with the
// same Node are hard links of one file.
type Tree map[string]*Node

// Node is one file.
type Node struct {
	Type         byte // as in tar: '0' for regular files
	Mode         int64
	UID, GID     int64
	Mtime        int64 // seconds
	Nsec         int64
	Major, Minor int64  // devices
	Target       string // symlinks
	Body         string // regular files
	Xattrs       map[string]string
}

// Merge applies layers, each given as its tar entries, the lowest first. An
// error means that the image must be refused.
func Merge(layers ...[]testimage.Entry) (Tree, error) {
	m := model{"": {impliedDir(), 0}}
	for i, entries := range layers {
		if err := m.apply(i+1, entries); err != nil {
			return nil, fmt.Errorf("layer %d: %w", i+1, err)
		}
	}
	t := Tree{}
	for p, n := range m {
		t[p] = n.Node
	}
	return t, nil
}

// model is the tree between two entries.
type model map[string]name

// name is one path's file and the layer that gave it the path.
type name struct {
	*Node
	layer int
}

func impliedDir() *Node { return &Node{Type: tar.TypeDir, Mode: 0o755} }

func (m model) isDir(p string) bool { return m[p].Node != nil && m[p].Type == tar.TypeDir }

// remove deletes a path and all below.
func (m model) remove(p string) {
	maps.DeleteFunc(m, func(q string, _ name) bool { return q == p || below(q, p) })
}

func below(q, dir string) bool { return q != "" && (dir == "" || strings.HasPrefix(q, dir+"/")) }

// clean makes a name of a tar a path of the tree.
func clean(name string) string { return path.Clean("/" + name)[1:] }

func split(p string) (dir, base string) {
	dir, base = path.Split(p)
	return strings.TrimSuffix(dir, "/"), base
}

// maxLinks is how many symlinks a path may lead through.
const maxLinks = 255

// follow returns where the path of a directory leads in layer: through symlinks
// to a path that is a directory, does not exist, or is a lower layer's file that
// a directory can take the place of. links are the symlinks on the way.
func (m model) follow(dir string, layer int) (real string, links []string, err error) {
	for todo := strings.Split(dir, "/"); len(todo) > 0; {
		c := todo[0]
		todo = todo[1:]
		if c == "" || c == "." {
			continue
		}
		if c == ".." {
			real, _ = split(real)
			continue
		}
		next := strings.TrimPrefix(real+"/"+c, "/")
		n := m[next]
		switch {
		case n.Node == nil || n.Type == tar.TypeDir:
			real = next
		case n.Type == tar.TypeSymlink && len(links) == maxLinks:
			return "", nil, fmt.Errorf("%q leads through too many symlinks", dir)
		case n.Type == tar.TypeSymlink:
			links = append(links, next)
			if strings.HasPrefix(n.Target, "/") {
				real = ""
			}
			todo = append(strings.Split(n.Target, "/"), todo...)
		case n.layer < layer && len(links) == 0:
			real = next
		default:
			return "", nil, fmt.Errorf("%q leads through %q, which is no directory", dir, next)
		}
	}
	return real, links, nil
}

// apply applies the markers, as if all at once, and then the other entries in
// their order.
func (m model) apply(layer int, entries []testimage.Entry) error {
	entries = slices.DeleteFunc(slices.Clone(entries), func(e testimage.Entry) bool { return e.Typeflag == tar.TypeXGlobalHeader })
	for _, e := range entries {
		if err := checkEntry(e); err != nil {
			return fmt.Errorf("entry %q: %w", e.Name, err)
		}
	}
	if err := m.makeMarkersDirs(layer, entries); err != nil {
		return err
	}
	hidden := m.hidden(layer, entries)
	maps.DeleteFunc(m, func(q string, _ name) bool {
		return slices.ContainsFunc(hidden, func(h hide) bool { return h.hides(q) })
	})
	plnk := linkSources(entries)
	for _, e := range entries {
		if markerOf(clean(e.Name)) != none {
			continue
		}
		if err := m.add(layer, e, plnk); err != nil {
			return fmt.Errorf("entry %q: %w", e.Name, err)
		}
	}
	return nil
}

// add applies an entry that is no marker.
func (m model) add(layer int, e testimage.Entry, plnk map[string]*Node) error {
	p := clean(e.Name)
	if p == "" {
		if e.Typeflag != tar.TypeDir {
			return fmt.Errorf("the root is a directory")
		}
		m[""] = name{newNode(e), layer}
		return nil
	}
	dir, base := split(p)
	dir, _, err := m.follow(dir, layer)
	if err != nil {
		return err
	}
	if err := m.makeDirs(dir, layer); err != nil {
		return err
	}
	p = strings.TrimPrefix(dir+"/"+base, "/")
	if err := checkComponent(base); err != nil {
		return err
	}
	if e.Typeflag == tar.TypeLink {
		return m.link(layer, p, e, plnk)
	}
	n := newNode(e)
	if !(m.isDir(p) && n.Type == tar.TypeDir) {
		m.remove(p)
	}
	m[p] = name{n, layer}
	return nil
}

// makeDirs makes a directory and those above it that do not exist.
func (m model) makeDirs(dir string, layer int) error {
	if dir == "" || m.isDir(dir) {
		return nil
	}
	parent, base := split(dir)
	if err := m.makeDirs(parent, layer); err != nil {
		return err
	}
	m[dir] = name{impliedDir(), layer}
	return checkComponent(base)
}

// link makes p another name of the file that e links to.
func (m model) link(layer int, p string, e testimage.Entry, plnk map[string]*Node) error {
	dir, base := split(clean(e.Linkname))
	dir, _, err := m.follow(dir, layer)
	if err != nil {
		return err
	}
	target := strings.TrimPrefix(dir+"/"+base, "/")
	n := m[target].Node
	switch source := plnk[clean(e.Linkname)]; {
	case source != nil:
		file := *source // AUFS's own links are not known: each name is a file
		m.remove(p)
		m[p] = name{&file, layer}
		return nil
	case base == "":
		return fmt.Errorf("%q is the root", e.Linkname)
	case n == nil:
		return fmt.Errorf("there is no %q", e.Linkname)
	case n.Type == tar.TypeDir:
		return fmt.Errorf("%q is a directory", e.Linkname)
	case below(target, p):
		return fmt.Errorf("%q is gone with the directory that the link takes the place of", e.Linkname)
	}
	for k, v := range xattrs(e, n.Type) {
		n.Xattrs[k] = v
	}
	if m[p].Node != n {
		m.remove(p)
	}
	m[p] = name{n, layer}
	return nil
}
