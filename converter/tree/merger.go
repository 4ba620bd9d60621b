// Package tree merges the layers of an OCI image into one file tree, gives
// trees a digest, reads them from folders and exports them as tar. It exists so
// that every rule of layer application stands in one place that touches no file
// system: a hostile layer has nothing to escape to.
package tree

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

// Config configures a Merger.
type Config struct {
	ChunkSize uint32        // S of the entries' chunks; 0 means chunk.DefaultSize
	Limits    Limits        // zero fields mean the defaults
	Warn      func(Warning) // called for what is left out of the tree; nil ignores it
}

// Limits bound what one image can cost. Each is far above real images.
type Limits struct {
	// Names is how many names all layers together may create, implied
	// directories included. A name costs about 300 bytes until the image is
	// encoded.
	Names int
	// Depth is how many components a path may have after its symlinks are
	// resolved.
	Depth int
	// PathBytes is the summed length of the paths of all names created. Names
	// and Depth alone would allow few bytes of tar to make paths of terabytes.
	PathBytes int64
	// LinkSteps is how many path components all layers together may walk after
	// a symlink. A 4 KiB target stands for 2 000 steps, 255 times in one path,
	// in every entry of a layer; real images take a step or two in some entries.
	LinkSteps int64

	// What one file may have. A bootstrap holds no more than the defaults, so
	// higher values count as those.
	NameBytes       int // one component of a path
	TargetBytes     int // a symlink's target
	XattrNameBytes  int // the name of an xattr, its prefix included
	XattrValueBytes int // the value of an xattr
	XattrBytes      int // all xattrs of a file, as they are stored
}

// Defaults of Limits.
const (
	DefaultNames     = 10 << 20
	DefaultDepth     = rafs.MaxDepth - 1
	DefaultPathBytes = 4 << 30
	DefaultLinkSteps = 64 << 20

	DefaultNameBytes       = rafs.MaxName
	DefaultTargetBytes     = rafs.MaxTarget
	DefaultXattrNameBytes  = rafs.MaxXattrName
	DefaultXattrValueBytes = rafs.MaxXattrValue
	DefaultXattrBytes      = rafs.MaxXattrs
)

func (l Limits) withDefaults() Limits {
	return Limits{
		Names:     cmp.Or(l.Names, DefaultNames),
		Depth:     cmp.Or(l.Depth, DefaultDepth),
		PathBytes: cmp.Or(l.PathBytes, DefaultPathBytes),
		LinkSteps: cmp.Or(l.LinkSteps, DefaultLinkSteps),

		NameBytes:       atMost(l.NameBytes, DefaultNameBytes),
		TargetBytes:     atMost(l.TargetBytes, DefaultTargetBytes),
		XattrNameBytes:  atMost(l.XattrNameBytes, DefaultXattrNameBytes),
		XattrValueBytes: atMost(l.XattrValueBytes, DefaultXattrValueBytes),
		XattrBytes:      atMost(l.XattrBytes, DefaultXattrBytes),
	}
}

func atMost(n, most int) int { return min(cmp.Or(n, most), most) }

// Warning says that something an entry carries is not in the tree.
type Warning struct {
	Layer  int    // counted from 1, the lowest
	Name   string // of the entry, raw bytes
	Xattr  string // the attribute left out
	Reason string
}

// String returns the warning as one line of text.
func (w Warning) String() string {
	return fmt.Sprintf("layer %d: entry %s: xattr %s left out: %s", w.Layer, image.Quote(w.Name), image.Quote(w.Xattr), w.Reason)
}

// file is an inode while layers are being merged. Names that are hard links
// share one file.
type file struct {
	rafs.Inode     // its Entries are filled in by Tree
	*folder        // directories only, never nil for them
	layer      int // that made it
	xattrArea  int // what the xattrs take, for Limits.XattrBytes
	xattrNames int // of it their names, as listxattr(2) returns them
}

// folder is what only directories have: an image can have millions of files.
type folder struct {
	children map[string]*file
	pathLen  int  // length of the path, for Limits.PathBytes
	at       spot // where; the root is nowhere
}

func newFolder() *folder { return &folder{children: map[string]*file{}} }

// Merger applies layers one upon the other. It is not safe for concurrent use.
type Merger struct {
	cfg   Config
	root  *file
	layer int   // being applied, counted from 1
	err   error // of the first Apply that failed
	done  bool  // the tree was taken

	plnk      map[string]*file           // AUFS link sources of the layer being applied
	linked    map[spot]struct{}          // names that the layer being applied made hard links
	removed   map[*file]map[string]*file // what its markers took out of directories
	names     int                        // used up of Limits
	pathBytes int64
	linkSteps int64

	walker walker // scratch space
	steps  int64  // path components walked and xattrs set, all in all
}

// NewMerger returns a Merger that holds an empty root directory. It panics on
// a chunk size that no store can have.
func NewMerger(cfg Config) *Merger {
	cfg.ChunkSize = cmp.Or(cfg.ChunkSize, chunk.DefaultSize)
	if !chunk.ValidSize(int64(cfg.ChunkSize)) {
		panic(fmt.Sprintf("tree: chunk size %d", cfg.ChunkSize))
	}
	cfg.Limits = cfg.Limits.withDefaults()
	if cfg.Warn == nil {
		cfg.Warn = func(Warning) {}
	}
	return &Merger{cfg: cfg, root: impliedDir(0)}
}

// impliedDir returns a directory that no entry describes. Its attributes are
// constants, so that the same image has the same tree on every machine.
func impliedDir(layer int) *file {
	return &file{
		Inode:  rafs.Inode{Mode: rafs.ModeDir | 0o755},
		folder: newFolder(),
		layer:  layer,
	}
}

// Apply applies one layer, given as its entries in tar order, on top of those
// applied before. It keeps references to the entries' targets, xattrs and
// chunks but not to the slice. An error names the entry; after one the Merger
// is of no further use, since the layer is half applied.
func (m *Merger) Apply(entries []image.Entry) error {
	if m.done {
		return errors.New("apply layer: the tree was taken already")
	}
	if m.err != nil {
		return m.err
	}
	m.layer++
	m.err = m.apply(entries)
	return m.err
}

// apply removes first and adds then: a marker hides only what lower layers
// hold, wherever in the tar it stands.
func (m *Merger) apply(entries []image.Entry) error {
	m.plnk, m.linked, m.removed = map[string]*file{}, map[spot]struct{}{}, map[*file]map[string]*file{}
	defer func() { m.removed = nil }()
	if err := m.applyMarkers(entries); err != nil {
		return err
	}
	for i := range entries {
		if err := m.applyEntry(&entries[i]); err != nil {
			return m.entryError(&entries[i], err)
		}
	}
	return nil
}

func (m *Merger) entryError(e *image.Entry, err error) error {
	return fmt.Errorf("layer %d: %w", m.layer, &image.EntryError{Entry: e.Name, Err: err})
}

func (m *Merger) applyEntry(e *image.Entry) error {
	name, err := cleanName(e.Name)
	if err != nil {
		return err
	}
	kind, err := classify(name)
	if err != nil || kind != ordinary {
		return err
	}
	if name == "" {
		return m.applyRoot(e)
	}
	parent, base := splitName(name)
	dir, depth, err := m.makeParents(parent)
	if err != nil {
		return err
	}
	if depth+1 > m.cfg.Limits.Depth {
		return m.depthError()
	}
	if e.Type == image.TypeLink {
		return m.applyLink(e, dir, base)
	}
	f, err := m.newFile(e)
	if err != nil {
		return err
	}
	old := dir.children[base]
	if old != nil && old.IsDir() && f.IsDir() {
		f.folder = old.folder
		*old = *f
		return nil
	}
	return m.put(dir, base, f)
}

// applyRoot sets the attributes of the root.
func (m *Merger) applyRoot(e *image.Entry) error {
	if e.Type != image.TypeDir {
		return errors.New("the name is empty or the root, and the entry is not a directory")
	}
	f, err := m.newFile(e)
	if err != nil {
		return err
	}
	f.folder, f.layer = m.root.folder, 0
	*m.root = *f
	return nil
}

// applyLink makes base in dir another name of the file that e links to. The
// entry's own mode, ids and times are not taken: they can only repeat the
// file's. Its xattrs are set on the file one by one, as setxattr(2) does.
func (m *Merger) applyLink(e *image.Entry, dir *file, base string) error {
	if src := m.plnk[path.Clean("/" + e.Link)[1:]]; src != nil {
		f := *src // docker and containerd copy: AUFS's own links are not known to them
		f.Xattrs = slices.Clone(src.Xattrs)
		return m.put(dir, base, &f)
	}
	f, err := m.linkTarget(e.Link)
	if err != nil {
		return fmt.Errorf("hard link to %s: %w", image.Quote(e.Link), err)
	}
	if old := dir.children[base]; old != nil && slices.Contains(m.walker.dirs, old) {
		return fmt.Errorf("hard link to %s: it is in the directory that the link takes the place of", image.Quote(e.Link))
	}
	if err := m.setXattrs(f, e); err != nil {
		return err
	}
	m.linked[spot{dir, base}] = struct{}{}
	if dir.children[base] == f {
		return nil // GNU tar writes a file given twice as a link to itself
	}
	return m.put(dir, base, f)
}

func (m *Merger) linkTarget(link string) (*file, error) {
	name, err := cleanName(link)
	if err != nil {
		return nil, err
	}
	if strings.HasPrefix(name, plnkPrefix) {
		return nil, errors.New("the layer has no such file")
	}
	parent, base := splitName(name)
	p, err := m.walk(parent)
	if err != nil {
		return nil, err
	}
	f := p.dir.children[base]
	switch {
	case base == "" || f != nil && len(p.missing) == 0 && f.IsDir():
		return nil, errors.New("it is a directory")
	case f == nil || len(p.missing) > 0:
		first := append(p.missing, base)[0]
		if m.removed[p.dir][first] != nil {
			return nil, errors.New("no such file any more: the same layer removes it with a whiteout, which comes before all its entries")
		}
		return nil, errors.New("no such file in this layer or below")
	}
	return f, nil
}

// put gives f the name base in dir, in place of what had it before.
func (m *Merger) put(dir *file, base string, f *file) error {
	if err := m.checkComponent(base); err != nil {
		return err
	}
	pathLen := dir.pathLen + 1 + len(base)
	if dir.children[base] == nil {
		m.names++
		m.pathBytes += int64(pathLen)
	}
	l := &m.cfg.Limits
	if m.names > l.Names {
		return fmt.Errorf("the image makes more than %d names (limit Names)", l.Names)
	}
	if m.pathBytes > l.PathBytes {
		return fmt.Errorf("the image's paths are longer than %d bytes together (limit PathBytes)", l.PathBytes)
	}
	base = strings.Clone(base) // it is part of a path, which can be long
	if f.IsDir() {
		f.pathLen, f.at = pathLen, spot{dir, base}
	}
	dir.children[base] = f
	return nil
}

// Tree returns the merged tree and ends the Merger. It panics after a failed
// Apply, whose tree would be wrong.
func (m *Merger) Tree() *rafs.Tree {
	if m.err != nil {
		panic("tree: Tree after a failed Apply")
	}
	m.done = true
	dirs := []*file{m.root}
	for len(dirs) > 0 {
		d := dirs[len(dirs)-1]
		dirs = dirs[:len(dirs)-1]
		if len(d.children) > 0 {
			d.Entries = make([]rafs.Dirent, 0, len(d.children))
		}
		for name, f := range d.children {
			d.Entries = append(d.Entries, rafs.Dirent{Name: name, Inode: &f.Inode})
			if f.IsDir() {
				dirs = append(dirs, f)
			}
		}
		slices.SortFunc(d.Entries, func(a, b rafs.Dirent) int { return strings.Compare(a.Name, b.Name) })
		d.folder = nil
	}
	return &rafs.Tree{ChunkSize: m.cfg.ChunkSize, Root: &m.root.Inode}
}
