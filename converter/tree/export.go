package tree

import (
	"bufio"
	"context"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"

	"quarry/rafs"
	"quarry/store"
	"quarry/store/chunk"
)

// Export writes a tree as a PAX tar, which Merger and tar programs read back
// to the same tree. Entries are in bytewise order of their names, directories
// with their slash, after the root as "./"; the first path of a file with several has the data, the others are
// hard links to it. The same tree gives the same bytes. Content is read from
// src in windows, the next one while the current is written. After an error
// the archive has no end blocks, so no reader takes it for whole.
//
// A tree with a socket fails before anything is written: tar has no type for it.
func Export(ctx context.Context, w io.Writer, t *rafs.Tree, src store.BatchGetter) error {
	files, err := exported(t)
	if err != nil {
		return fmt.Errorf("export tree: %w", err)
	}
	g, ctx := errgroup.WithContext(ctx)
	r := newChunkReader(int64(t.ChunkSize), src)
	g.Go(func() error { return r.fetch(ctx, files) })
	g.Go(func() error {
		e := exporter{tar: paxWriter{w: bufio.NewWriter(w)}, chunks: r, chunkSize: int64(t.ChunkSize)}
		return e.export(ctx, t)
	})
	if err := g.Wait(); err != nil {
		return fmt.Errorf("export tree: %w", err)
	}
	return nil
}

var flags = map[uint32]byte{
	rafs.ModeRegular: flagReg,
	rafs.ModeSymlink: flagSymlink,
	rafs.ModeChar:    flagChar,
	rafs.ModeBlock:   flagBlock,
	rafs.ModeDir:     flagDir,
	rafs.ModeFIFO:    flagFIFO,
}

// exported returns the files whose content the archive has, in its order.
func exported(t *rafs.Tree) ([]*rafs.Inode, error) {
	var files []*rafs.Inode
	links := linked(t.Root)
	for path, n := range paths(t.Root) {
		switch {
		case n.Type() == rafs.ModeSocket:
			return nil, fmt.Errorf("%q is a socket, which tar cannot hold: remove it from the image", path)
		case flags[n.Type()] == 0:
			return nil, fmt.Errorf("%q has mode %#o, which is no type of file", path, n.Mode)
		}
		if n.Size == 0 {
			continue
		}
		first, isLinked := links[n]
		if isLinked && !first {
			continue
		}
		if isLinked {
			links[n] = false
		}
		files = append(files, n)
	}
	return files, nil
}

type exporter struct {
	tar       paxWriter
	chunks    *chunkReader
	chunkSize int64
}

func (e *exporter) export(ctx context.Context, t *rafs.Tree) error {
	links := linked(t.Root)
	first := make(map[*rafs.Inode]string, len(links))
	for path, n := range paths(t.Root) {
		h := paxHeader{name: path, flag: flags[n.Type()], link: n.Target, size: n.Size, Inode: n}
		target, isLink := first[n]
		switch {
		case isLink:
			h.flag, h.link, h.size = flagLink, target, 0
		case links[n]:
			first[n] = path
		case path == "":
			h.name = "./"
		case n.IsDir():
			h.name += "/"
		}
		if err := e.tar.header(&h); err != nil {
			return err
		}
		if h.size == 0 {
			continue
		}
		if err := e.content(ctx, n); err != nil {
			return fmt.Errorf("%q: %w", path, err)
		}
	}
	return e.tar.close()
}

func (e *exporter) content(ctx context.Context, n *rafs.Inode) error {
	for k, d := range n.Chunks {
		p, err := e.chunks.next(ctx, d)
		if err != nil {
			return err
		}
		if want := chunk.Len(int64(k), n.Size, e.chunkSize); int64(len(p)) != want {
			return fmt.Errorf("chunk %s has %d bytes, the file needs %d", d, len(p), want)
		}
		if err := e.tar.write(p); err != nil {
			return err
		}
	}
	return e.tar.pad(tarBlock)
}
