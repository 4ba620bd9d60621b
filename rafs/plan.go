package rafs

import (
	"errors"
	"fmt"
	"strings"

	"quarry/store/chunk"
)

// plan is where everything of a tree goes in its bootstrap. It depends on the
// tree alone. Images have up to millions of files, so a plan holds of each only
// what is not quickly worked out again.
type plan struct {
	tree  *Tree
	nodes []node // in the order of the inode area: a depth-first walk
	// kids are the nodes of directories' entries, numbers the chunks of files in
	// blob.Chunks; a node says where its own begin.
	kids, numbers []uint32
	blob          Blob
	// fileOffs says for each chunk where in a file it was first used.
	fileOffs []int64

	inodeEnd   int64 // end of the inode area, the block area follows at the next block
	blocks     int64 // length of the block area in blocks
	chunkTable int64 // offset of the chunk-info table, when there are chunks
	size       int64 // of the bootstrap
	hasXattrs  bool
	dirents    []Dirent // scratch
}

// node is the place of one inode. MaxBootstrap keeps every count in 32 bits.
type node struct {
	inode  *Inode
	parent uint32 // directories: the node that ".." is
	first  uint32 // directories: in plan.kids; regular files: in plan.numbers
	slot   uint32 // where it is, in slots
	block  uint32 // the first of its blocks, counted from the block area
	nlink  uint32
}

func (nd *node) off() int64 { return int64(nd.slot) * slotSize }

// planner walks a tree once to fill a plan.
type planner struct {
	plan
	index   map[*Inode]uint32 // nodes
	linked  func(*Inode) bool // which inodes can come again; nil: all
	chunks  []firstUse        // by chunk number
	known   *chunk.Numbers    // of chunks
	pending []uint32          // kids of the directories being visited
	names   []string          // path of the inode at hand
}

// firstUse is the first chunk of a file that has a new digest. Its place follows
// from those before it, so blob.Chunks is made at once when all are known.
type firstUse struct {
	digest *chunk.Digest
	len    uint32
	k      uint32 // in the file
}

// knowledge is what a decoder knows of the tree it has made; zero: nothing. It
// only saves memory.
type knowledge struct {
	inodes, chunks int
	linked         func(*Inode) bool // whether an inode can have more than one path
}

func newPlan(t *Tree, c knowledge) (*plan, error) {
	p := planner{
		plan:  plan{tree: t, inodeEnd: inodeArea, nodes: make([]node, 0, c.inodes), kids: make([]uint32, 0, c.inodes)},
		index: map[*Inode]uint32{}, chunks: make([]firstUse, 0, c.chunks), linked: c.linked,
	}
	p.known = chunk.NewNumbers(c.chunks, func(n uint32) *chunk.Digest { return p.chunks[n].digest })
	if !chunk.ValidSize(int64(t.ChunkSize)) {
		return nil, p.fail(fmt.Errorf("chunk size %d is not a power of two from %d to %d", t.ChunkSize, chunk.MinSize, chunk.MaxSize))
	}
	if t.Root == nil || !t.Root.IsDir() {
		return nil, p.fail(errors.New("the root is no directory"))
	}
	if _, err := p.visit(t.Root, 0); err != nil {
		return nil, err
	}
	p.index, p.known, p.pending = nil, nil, nil // before blob.Chunks needs the memory
	p.placeChunks()
	p.size = align(p.inodeEnd, blockSize) + p.blocks*blockSize
	if n := int64(len(p.blob.Chunks)); n > 0 {
		p.chunkTable = p.size
		p.size = align(p.size+n*chunkRecSize, blockSize)
	}
	if p.size > MaxBootstrap {
		return nil, p.fail(fmt.Errorf("the whole tree needs a bootstrap of %d bytes, over the limit of %d", p.size, MaxBootstrap))
	}
	if err := p.blob.checkSize(); err != nil {
		return nil, p.fail(err)
	}
	p.blob.MappedOff = align(p.size, mappedAlign)
	done := p.plan // by itself, so that the rest of the planner can go
	return &done, nil
}

func (p *planner) fail(err error) error {
	return &TreeError{Path: "/" + strings.Join(p.names, "/"), Err: err}
}

// visit gives n its place at its first path, counts the others, and returns its
// node.
func (p *planner) visit(n *Inode, parent uint32) (uint32, error) {
	if i, seen := p.index[n]; seen {
		if n.IsDir() {
			return 0, p.fail(errors.New("the directory has another path already"))
		}
		p.nodes[i].nlink++
		return i, nil
	}
	if err := checkInode(n, p.tree.ChunkSize); err != nil {
		return 0, p.fail(err)
	}
	first := uint32(len(p.numbers))
	if err := p.numberChunks(n); err != nil {
		return 0, p.fail(err)
	}
	i := p.place(n, parent)
	p.nodes[i].first = first
	if !n.IsDir() {
		return i, nil
	}
	return i, p.visitEntries(n, i)
}

func (p *planner) visitEntries(n *Inode, i uint32) error {
	if len(p.names) >= MaxDepth {
		return p.fail(fmt.Errorf("the directory is nested deeper than the limit of %d", MaxDepth))
	}
	nlink, kids := uint32(2), len(p.pending)
	for _, d := range n.Entries {
		p.names = append(p.names, d.Name)
		kid, err := p.visit(d.Inode, i)
		if err != nil {
			return err
		}
		p.names = p.names[:len(p.names)-1]
		p.pending = append(p.pending, kid)
		if d.Inode.IsDir() {
			nlink++
		}
	}
	p.nodes[i].nlink, p.nodes[i].first = nlink, uint32(len(p.kids))
	p.kids = append(p.kids, p.pending[kids:]...)
	p.pending = p.pending[:kids]
	return nil
}

func (p *planner) place(n *Inode, parent uint32) uint32 {
	s := p.shapeOf(n)
	i := uint32(len(p.nodes))
	off, end := place(p.inodeEnd, s)
	p.nodes = append(p.nodes, node{inode: n, parent: parent, slot: uint32(off / slotSize), block: uint32(p.blocks), nlink: 1})
	p.inodeEnd, p.blocks = end, p.blocks+s.blocks
	p.hasXattrs = p.hasXattrs || s.xattrs > 0
	if p.linked == nil || p.linked(n) {
		p.index[n] = i
	}
	return i
}

func (p *plan) shapeOf(n *Inode) shape {
	xattrs := xattrsSize(n.Xattrs)
	switch n.Type() {
	case ModeDir:
		p.dirents = withDots(p.dirents[:0], n, n) // the parent does not matter here
		return flatShape(dirSize(p.dirents), xattrs)
	case ModeRegular:
		return fileShape(n.Size, xattrs, p.tree.ChunkSize)
	case ModeSymlink:
		return flatShape(int64(len(n.Target)), xattrs)
	default:
		return flatShape(0, xattrs)
	}
}

// numberChunks gives every chunk of n its number, a new one if no earlier file has it.
func (p *planner) numberChunks(n *Inode) error {
	for k := range n.Chunks {
		d, length := &n.Chunks[k], uint32(chunk.Len(int64(k), n.Size, int64(p.tree.ChunkSize)))
		i, known := p.known.Find(d)
		if !known {
			p.chunks = append(p.chunks, firstUse{d, length, uint32(k)})
			i = p.known.Add(d)
		}
		if have := p.chunks[i].len; have != length {
			return fmt.Errorf("chunk %d is %s with %d bytes, elsewhere in the tree it has %d", k, d, length, have)
		}
		p.numbers = append(p.numbers, i)
	}
	return nil
}

// placeChunks gives every chunk its place.
func (p *planner) placeChunks() {
	p.blob.Chunks, p.fileOffs = make([]Chunk, 0, len(p.chunks)), make([]int64, len(p.chunks))
	for i, c := range p.chunks {
		p.blob.add(*c.digest, c.len)
		p.fileOffs[i] = int64(c.k) * int64(p.tree.ChunkSize)
	}
}
