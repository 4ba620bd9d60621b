package tree_test

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"quarry/store/image"
)

// model is an image as a map from canonical path to file, "/" being the root:
// the rules of layer application once more, by brute force and without a tree.
type model map[string]*mfile

type mfile struct {
	image.Entry // never a hard link
	layer       int
	linked      map[string]int // its hard links, and the layers that made them
}

func (m model) isDir(p string) bool { return m[p] != nil && m[p].Type == image.TypeDir }

func (m model) remove(p string) {
	maps.DeleteFunc(m, func(q string, _ *mfile) bool { return q == p || strings.HasPrefix(q, p+"/") })
}

// place returns the canonical path of a name, whose last component is not
// followed, and the symlinks on the way. It is not ok behind a loop or a file.
func (m model) place(name string, layer int) (canon string, links []string, ok bool) {
	name = path.Clean("/" + name)
	for todo := strings.Split(path.Dir(name), "/"); len(todo) > 0; {
		next := path.Join("/", canon, todo[0])[1:]
		todo = todo[1:]
		switch f := m[next]; {
		case f != nil && f.Type == image.TypeSymlink && len(links) < 255:
			links = append(links, next)
			if strings.HasPrefix(f.Link, "/") {
				canon = ""
			}
			todo = append(strings.Split(f.Link, "/"), todo...)
		case f == nil || m.isDir(next) || len(links) == 0 && f.layer != layer && f.linked[next] != layer:
			canon = next
		default:
			return "", links, false
		}
	}
	return path.Join(canon, path.Base(name)), links, true
}

// makeMarkersDirs makes the directories of markers where there is nothing.
func (m model) makeMarkersDirs(layer int, entries []image.Entry) {
	for _, e := range entries {
		p, links, ok := m.place(e.Name, layer)
		if !ok || len(links) > 0 || !strings.HasPrefix(path.Base(p), ".wh.") {
			continue
		}
		for i := range p {
			if p[i] == '/' && i > 0 && m[p[:i]] == nil {
				m[p[:i]] = &mfile{Entry: image.Entry{Type: image.TypeDir}, layer: layer}
			} else if p[i] == '/' && i > 0 && !m.isDir(p[:i]) {
				break
			}
		}
	}
}

func (m model) apply(layer int, entries []image.Entry) error {
	m.makeMarkersDirs(layer, entries)
	lower := maps.Clone(m)
	for _, e := range entries {
		p, links, ok := lower.place(e.Name, layer)
		dir, base := path.Split(p)
		target, isMarker := strings.CutPrefix(base, ".wh.")
		reached := dir == "" || lower.isDir(strings.TrimSuffix(dir, "/"))
		switch {
		case !ok || !isMarker || !reached || slices.ContainsFunc(links, func(l string) bool { return lower.takes(layer, entries, l) }):
		case base == ".wh..wh..opq":
			maps.DeleteFunc(m, func(q string, _ *mfile) bool { return q != "/" && strings.HasPrefix(q, dir) })
		default:
			m.remove(dir + target)
		}
	}
	for _, e := range entries {
		if err := m.add(layer, e); err != nil {
			return err
		}
	}
	return nil
}

// takes reports whether the layer has something in the symlink's place, or takes
// it away with a directory it is in. Markers behind symlinks do not count.
func (m model) takes(layer int, entries []image.Entry, link string) bool {
	return slices.ContainsFunc(entries, func(e image.Entry) bool {
		p, links, ok := m.place(e.Name, layer)
		dir, base := path.Split(p)
		target, isMarker := strings.CutPrefix(base, ".wh.")
		switch {
		case !ok || isMarker && len(links) > 0:
			return false
		case base == ".wh..wh..opq":
			return strings.HasPrefix(link, dir)
		}
		return link == dir+target || strings.HasPrefix(link, dir+target+"/") && (isMarker || e.Type != image.TypeDir)
	})
}

func (m model) add(layer int, e image.Entry) error {
	p, _, ok := m.place(e.Name, layer)
	f := &mfile{e, layer, map[string]int{}}
	switch {
	case strings.HasPrefix(path.Base(path.Clean(e.Name)), ".wh."):
		return nil
	case !ok || p == "/" && e.Type != image.TypeDir:
		return fmt.Errorf("%s: no place", e.Name)
	}
	for i := range p {
		if p[i] == '/' && i > 0 && !m.isDir(p[:i]) {
			m.remove(p[:i])
			m[p[:i]] = &mfile{Entry: image.Entry{Type: image.TypeDir}, layer: layer}
		}
	}
	if e.Type == image.TypeLink {
		target, _, ok := m.place(e.Link, layer)
		if f = m[target]; !ok || f == nil || f.Type == image.TypeDir || strings.HasPrefix(target, p+"/") {
			return fmt.Errorf("%s: bad link", e.Name)
		}
		f.linked[p] = layer
	}
	if m[p] != f && !(m.isDir(p) && f.Type == image.TypeDir) {
		m.remove(p)
	}
	m[p] = f
	return nil
}

// show prints the model as show prints a tree, without attributes.
func (m model) show() string {
	var b strings.Builder
	first := map[*mfile]string{}
	inOrder := func(p, q string) int { return slices.Compare(strings.Split(p, "/"), strings.Split(q, "/")) }
	for _, p := range slices.SortedFunc(maps.Keys(m), inOrder) {
		f := m[p]
		p = strings.TrimPrefix(p, "/")
		if target, ok := first[f]; ok {
			fmt.Fprintf(&b, "h %s => %s\n", p, target)
			continue
		}
		first[f] = p
		switch f.Type {
		case image.TypeDir:
			fmt.Fprintf(&b, "d %s %d\n", p, f.Mtime)
		case image.TypeSymlink:
			fmt.Fprintf(&b, "l %s -> %s\n", p, f.Link)
		default:
			fmt.Fprintf(&b, "f %s %d\n", p, f.Mtime)
		}
	}
	return b.String()
}
