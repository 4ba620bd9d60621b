package measure

import (
	"context"
	"fmt"

	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

// Command is one command that is run in an image nothing of which is cached.
type Command struct {
	Image string // name
	Dir   string // working directory
	Args  []string
}

// Range is bytes of a file.
type Range struct{ Off, Len int64 }

// Touched says which bytes of which files a command read, by path in the image.
type Touched map[string][]Range

// Tracer runs commands, each cold, and returns what they touched.
type Tracer func(ctx context.Context, im Image, cmds []Command) ([]Touched, error)

// ColdStart is what one cold command touches and would fetch.
type ColdStart struct {
	Image   string    `json:"image"`
	Command []string  `json:"command"`
	Files   int       `json:"files"`
	Pages   int64     `json:"page_bytes"` // of pages touched, the last of a file cut to its length
	Fixed   []Fetched `json:"fixed"`      // one for each chunk size
}

// Fetched is the distinct chunks that hold the touched pages.
type Fetched struct {
	Size        int64 `json:"size"`
	Chunks      int64 `json:"chunks"`
	PlainBytes  int64 `json:"plain_bytes"`
	StoredBytes int64 `json:"stored_bytes"`
}

// coldStarts traces the commands of an image that was just read.
func (c *Corpus) coldStarts(ctx context.Context, im Image, recs []*image.LayerRecord) error {
	var cmds []Command
	for _, cmd := range c.cfg.Commands {
		if cmd.Image == im.Name {
			cmds = append(cmds, cmd)
		}
	}
	if len(cmds) == 0 || c.cfg.Trace == nil {
		return nil
	}
	touched, err := c.cfg.Trace(ctx, im, cmds)
	if err != nil {
		return fmt.Errorf("cold commands: %w", err)
	}
	first := len(c.cold)
	for k, cmd := range cmds {
		c.cold = append(c.cold, ColdStart{Image: im.Name, Command: cmd.Args, Files: len(touched[k])})
	}
	for i, size := range c.cfg.Sizes {
		t, err := c.cutter.tree(recs, i, size)
		if err != nil {
			return err
		}
		files := regularFiles(t)
		for k := range cmds {
			f, pages, err := fetched(touched[k], files, size, c.cutter.fixed[i])
			if err != nil {
				return err
			}
			c.cold[first+k].Pages = pages
			c.cold[first+k].Fixed = append(c.cold[first+k].Fixed, f)
		}
	}
	return nil
}

func regularFiles(t *rafs.Tree) map[string]*rafs.Inode {
	files := map[string]*rafs.Inode{}
	t.Walk(func(path string, n *rafs.Inode) error { // without an error there is none
		if n.IsRegular() {
			files[path] = n
		}
		return nil
	})
	return files
}

// fetched sums the chunks of size S that hold what was touched.
func fetched(touched Touched, files map[string]*rafs.Inode, size int64, set *chunkSet) (f Fetched, pages int64, err error) {
	f.Size = size
	done := map[chunk.Digest]bool{}
	for path, ranges := range touched {
		n := files[path]
		if n == nil {
			return f, 0, fmt.Errorf("%s was touched and is no file of the image", path)
		}
		for _, r := range ranges {
			end := min(r.Off+r.Len, n.Size)
			if r.Off < 0 || r.Len <= 0 || end <= r.Off {
				return f, 0, fmt.Errorf("%s: touched range %+v is outside of its %d bytes", path, r, n.Size)
			}
			pages += end - r.Off
			for k := r.Off / size; k*size < end; k++ {
				d := n.Chunks[k]
				if done[d] {
					continue
				}
				done[d] = true
				c := set.chunks[d]
				f.Chunks++
				f.PlainBytes += int64(c.len)
				f.StoredBytes += int64(c.stored)
			}
		}
	}
	return f, pages, nil
}
