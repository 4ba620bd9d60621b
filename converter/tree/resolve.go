package tree

import (
	"errors"
	"fmt"
	"strings"

	"quarry/rafs"
)

// MaxLinks is how many symlinks one path may lead through; containerd's bound.
const MaxLinks = 255

var (
	errLinks  = fmt.Errorf("the path leads through more than %d symlinks", MaxLinks)
	errNotDir = errors.New("the path leads through a file that is not a directory")
)

// place is where a path leads to.
type place struct {
	dir     *file
	depth   int      // of dir: 0 is the root
	missing []string // components below dir that do not exist
	via     []spot   // symlinks followed
}

// spot is a name in a directory.
type spot struct {
	dir  *file
	name string
}

// walker is the memory of one walk, kept between walks to save allocations.
type walker struct {
	dirs    []*file
	todo    []string // what is left of the path and of symlinks' targets, the next last
	missing []string
	via     []spot
}

// walk follows path from the root through directories and symlinks, the last
// component included. Nothing leads above the root: an absolute target starts
// there and .. stays there. A file of a lower layer, other than a symlink,
// counts as missing, since an overlay would cover it by a directory. What it
// returns is valid until the next walk.
func (m *Merger) walk(path string) (place, error) {
	w := &m.walker
	w.dirs = append(w.dirs[:0], m.root)
	w.todo = append(w.todo[:0], path)
	w.missing, w.via = w.missing[:0], w.via[:0]
	for len(w.todo) > 0 {
		m.steps++
		if len(w.via) > 0 {
			if err := m.spendLinkStep(); err != nil {
				return place{}, err
			}
		}
		if err := m.step(w, w.next()); err != nil {
			return place{}, err
		}
	}
	top := len(w.dirs) - 1
	return place{dir: w.dirs[top], depth: top, missing: w.missing, via: w.via}, nil
}

// next takes one component off the path.
func (w *walker) next() string {
	last := len(w.todo) - 1
	name, rest, _ := strings.Cut(w.todo[last], "/")
	w.todo[last] = rest
	if rest == "" {
		w.todo = w.todo[:last]
	}
	return name
}

func (m *Merger) step(w *walker, name string) error {
	switch {
	case name == "" || name == ".":
		return nil
	case name == "..":
		w.up()
		return nil
	case len(w.missing) > 0:
		w.missing = append(w.missing, name)
		return nil
	}
	dir := w.dirs[len(w.dirs)-1]
	f := dir.children[name]
	switch {
	case f == nil:
		w.missing = append(w.missing, name)
	case f.IsDir():
		w.dirs = append(w.dirs, f)
	case f.Type() == rafs.ModeSymlink:
		w.via = append(w.via, spot{dir, name})
		if len(w.via) > MaxLinks {
			return errLinks
		}
		if f.Target[0] == '/' {
			w.dirs = w.dirs[:1]
		}
		w.todo = append(w.todo, f.Target)
	case len(w.via) == 0 && m.isLower(spot{dir, name}, f):
		w.missing = append(w.missing, name)
	default:
		return errNotDir
	}
	return nil
}

func (m *Merger) spendLinkStep() error {
	if m.linkSteps++; m.linkSteps > m.cfg.Limits.LinkSteps {
		return fmt.Errorf("the image's paths lead through symlinks for more than %d steps (limit LinkSteps)", m.cfg.Limits.LinkSteps)
	}
	return nil
}

// isLower reports whether a lower layer gave f the name s. A hard link of this
// layer is a name of its own, whichever layer the file is from.
func (m *Merger) isLower(s spot, f *file) bool {
	_, linked := m.linked[s]
	return f.layer < m.layer && !linked
}

func (w *walker) up() {
	switch {
	case len(w.missing) > 0:
		w.missing = w.missing[:len(w.missing)-1]
	case len(w.dirs) > 1:
		w.dirs = w.dirs[:len(w.dirs)-1]
	}
}

// makeParents returns the directory that path leads to and its depth; what does
// not exist of it is made as implied directories.
func (m *Merger) makeParents(path string) (*file, int, error) {
	p, err := m.walk(path)
	if err != nil {
		return nil, 0, err
	}
	dir, depth := p.dir, p.depth+len(p.missing)
	if depth > m.cfg.Limits.Depth {
		return nil, 0, m.depthError()
	}
	for _, name := range p.missing {
		sub := impliedDir(m.layer)
		if err := m.put(dir, name, sub); err != nil {
			return nil, 0, err
		}
		dir = sub
	}
	return dir, depth, nil
}

func (m *Merger) depthError() error {
	return fmt.Errorf("the path has more than %d components (limit Depth)", m.cfg.Limits.Depth)
}
