package rafs

import (
	"errors"
	"fmt"
	"strings"

	"quarry/store/chunk"
)

// plan is where everything of a tree goes in its bootstrap. It depends on the
// tree alone.
type plan struct {
	tree  *Tree
	nodes []node // in the order of the inode area: a depth-first walk
	index map[*Inode]int
	blob  Blob
	// numbers finds a chunk in blob.Chunks.
	numbers map[chunk.Digest]uint32
	// fileOffs says for each chunk where in a file it was first used.
	fileOffs []int64

	inodeEnd   int64 // end of the inode area, the block area follows at the next block
	blocks     int64 // length of the block area in blocks
	chunkTable int64 // offset of the chunk-info table, when there are chunks
	size       int64 // of the bootstrap
	hasXattrs  bool
}

// node is the place of one inode.
type node struct {
	shape
	inode  *Inode
	parent *Inode // directories: what ".." is
	off    int64
	block  int64 // the first of its blocks, counted from the block area
	nlink  uint32
}

// planner walks a tree once to fill a plan.
type planner struct {
	plan
	names   []string // path of the inode at hand
	dirents []Dirent // scratch
}

func newPlan(t *Tree) (*plan, error) {
	p := planner{plan: plan{tree: t, index: map[*Inode]int{}, numbers: map[chunk.Digest]uint32{}, inodeEnd: inodeArea}}
	if !chunk.ValidSize(int64(t.ChunkSize)) {
		return nil, p.fail(fmt.Errorf("chunk size %d is not a power of two from %d to %d", t.ChunkSize, chunk.MinSize, chunk.MaxSize))
	}
	if t.Root == nil || !t.Root.IsDir() {
		return nil, p.fail(errors.New("the root is no directory"))
	}
	if err := p.visit(t.Root, t.Root); err != nil {
		return nil, err
	}
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
	return &p.plan, nil
}

func (p *planner) fail(err error) error {
	return &TreeError{Path: "/" + strings.Join(p.names, "/"), Err: err}
}

// visit gives n its place at its first path, and counts the others.
func (p *planner) visit(n, parent *Inode) error {
	if i, seen := p.index[n]; seen {
		if n.IsDir() {
			return p.fail(errors.New("the directory has another path already"))
		}
		p.nodes[i].nlink++
		return nil
	}
	if err := checkInode(n, p.tree.ChunkSize); err != nil {
		return p.fail(err)
	}
	if err := p.numberChunks(n); err != nil {
		return p.fail(err)
	}
	i := p.place(n, parent)
	if !n.IsDir() {
		return nil
	}
	if len(p.names) >= MaxDepth {
		return p.fail(fmt.Errorf("the directory is nested deeper than the limit of %d", MaxDepth))
	}
	p.nodes[i].nlink = 2
	for _, d := range n.Entries {
		p.names = append(p.names, d.Name)
		if err := p.visit(d.Inode, n); err != nil {
			return err
		}
		p.names = p.names[:len(p.names)-1]
		if d.Inode.IsDir() {
			p.nodes[i].nlink++
		}
	}
	return nil
}

func (p *planner) place(n, parent *Inode) int {
	nd := node{shape: p.shapeOf(n, parent), inode: n, parent: parent, block: p.blocks, nlink: 1}
	nd.off, p.inodeEnd = place(p.inodeEnd, nd.shape)
	p.blocks += nd.blocks
	p.hasXattrs = p.hasXattrs || nd.xattrs > 0
	p.index[n] = len(p.nodes)
	p.nodes = append(p.nodes, nd)
	return len(p.nodes) - 1
}

func (p *planner) shapeOf(n, parent *Inode) shape {
	xattrs := xattrsSize(n.Xattrs)
	switch n.Type() {
	case ModeDir:
		p.dirents = withDots(p.dirents[:0], n, parent)
		return flatShape(dirSize(p.dirents), xattrs)
	case ModeRegular:
		return fileShape(n.Size, xattrs, p.tree.ChunkSize)
	case ModeSymlink:
		return flatShape(int64(len(n.Target)), xattrs)
	default:
		return flatShape(0, xattrs)
	}
}

// numberChunks gives every chunk of n that no earlier file has its number.
func (p *planner) numberChunks(n *Inode) error {
	size := int64(p.tree.ChunkSize)
	for k, d := range n.Chunks {
		length := uint32(chunk.Len(int64(k), n.Size, size))
		if i, known := p.numbers[d]; known {
			if have := p.blob.Chunks[i].Len; have != length {
				return fmt.Errorf("chunk %d is %s with %d bytes, elsewhere in the tree it has %d", k, d, length, have)
			}
			continue
		}
		p.numbers[d] = uint32(len(p.blob.Chunks))
		p.blob.add(d, length)
		p.fileOffs = append(p.fileOffs, int64(k)*size)
	}
	return nil
}
