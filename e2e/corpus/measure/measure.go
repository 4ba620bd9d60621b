// Package measure says what a corpus of images costs in a store, for several
// chunk sizes and for content-defined chunks beside them. The default chunk size
// is chosen by its figures.
package measure

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"

	"quarry/store/chunk"
)

// Version of the JSON document. It changes with the meaning of any field.
const Version = 1

// Image is one image of a corpus, as an OCI layout with one manifest.
type Image struct {
	Name   string
	Family string
	Layout string
}

// Config says what is measured.
type Config struct {
	Images []Image
	Sizes  []int64 // chunk sizes, ascending powers of two; also the averages of content-defined chunks
	TmpDir string  // for chunk indexes; "" = os.TempDir
	// Commands are run cold by Trace, each when its image has been read. nil =
	// none.
	Commands []Command
	Trace    Tracer
}

// Report is what a corpus costs. All sizes are in bytes.
type Report struct {
	Version int         `json:"version"`
	Sizes   []int64     `json:"sizes"`
	Groups  []Group     `json:"groups"` // the whole corpus first, then the families
	Cold    []ColdStart `json:"cold,omitempty"`
}

// Group is the whole corpus or one family, as if nothing else were stored.
type Group struct {
	Name   string `json:"name"`
	Images int    `json:"images"`
	Layers int    `json:"layers"`
	// Files and RawBytes count the regular files of all layers of all images:
	// what is there without any deduplication.
	Files    int64 `json:"files"`
	RawBytes int64 `json:"raw_bytes"`
	// ImageBytes counts the files of the merged trees, hard links once.
	ImageBytes int64 `json:"image_bytes"`
	// GzipBytes are all layers as pushed; LayerBytes those with distinct digests.
	GzipBytes  int64 `json:"gzip_bytes"`
	LayerBytes int64 `json:"layer_bytes"`
	// DiffIDBytes are the uncompressed tars with distinct diffIDs.
	DiffIDBytes int64 `json:"diffid_bytes"`
	// FileBytes are the distinct files.
	FileBytes int64 `json:"file_bytes"`
	Fixed     []Row `json:"fixed"` // one for each chunk size
	CDC       []Row `json:"cdc"`   // one for each average of content-defined chunks
}

// Row is what one way to cut files costs.
type Row struct {
	Size        int64 `json:"size"`         // S, or the average aimed for
	Chunks      int64 `json:"chunks"`       // distinct
	PlainBytes  int64 `json:"plain_bytes"`  // of the distinct chunks
	StoredBytes int64 `json:"stored_bytes"` // after zstd, as packs hold them
	PackBytes   int64 `json:"pack_bytes"`   // whole packs
	IndexBytes  int64 `json:"index_bytes"`  // of a chunk index on disk
	// The bootstraps of all images, each for itself; none for content-defined
	// chunks, which RAFS v6 cannot say.
	BootstrapBytes int64 `json:"bootstrap_bytes,omitempty"`
	BootstrapZstd  int64 `json:"bootstrap_zstd_bytes,omitempty"` // on the wire
}

// Corpus is a corpus that has been read.
type Corpus struct {
	cfg    Config
	groups []string // "all", then the families in order of appearance
	sums   []Group
	layers seen
	diffs  seen
	files  seen
	cutter *cutter
	cold   []ColdStart
}

// maxGroups is what a mask holds.
const maxGroups = 32

// Read reads every image once. Memory grows with distinct chunks and files, not
// with their content.
func Read(ctx context.Context, cfg Config) (*Corpus, error) {
	c := &Corpus{cfg: cfg, groups: []string{"all"}, sums: make([]Group, 1), layers: seen{}, diffs: seen{}, files: seen{}}
	for i, s := range cfg.Sizes {
		if !chunk.ValidSize(s) || s > pieceSize || i > 0 && s <= cfg.Sizes[i-1] {
			return nil, fmt.Errorf("chunk sizes %v are not ascending powers of two from %d to %d", cfg.Sizes, chunk.MinSize, pieceSize)
		}
	}
	c.cutter = newCutter(cfg.Sizes, runtime.GOMAXPROCS(0))
	for _, im := range cfg.Images {
		g, err := c.group(im.Family)
		if err != nil {
			return nil, err
		}
		if err := c.readImage(ctx, im, g); err != nil {
			return nil, fmt.Errorf("image %s: %w", im.Name, err)
		}
	}
	return c, nil
}

// group returns the number of a family.
func (c *Corpus) group(family string) (int, error) {
	for g, name := range c.groups {
		if g > 0 && name == family {
			return g, nil
		}
	}
	if len(c.groups) == maxGroups {
		return 0, fmt.Errorf("more than %d families", maxGroups-1)
	}
	c.groups, c.sums = append(c.groups, family), append(c.sums, Group{})
	return len(c.groups) - 1, nil
}

// Report sums up what was read.
func (c *Corpus) Report(ctx context.Context) (*Report, error) {
	r := &Report{Version: Version, Sizes: c.cfg.Sizes, Cold: c.cold}
	for g, name := range c.groups {
		sum := c.sums[g]
		sum.Name = name
		sum.LayerBytes, sum.DiffIDBytes, sum.FileBytes = c.layers.bytes(g), c.diffs.bytes(g), c.files.bytes(g)
		for i := range c.cfg.Sizes {
			fixed, err := c.row(ctx, g, c.cutter.fixed[i])
			if err != nil {
				return nil, err
			}
			fixed.BootstrapBytes, fixed.BootstrapZstd = sum.Fixed[i].BootstrapBytes, sum.Fixed[i].BootstrapZstd
			cdc, err := c.row(ctx, g, c.cutter.cdc[i])
			if err != nil {
				return nil, err
			}
			fixed.Size, cdc.Size = c.cfg.Sizes[i], c.cfg.Sizes[i]
			sum.Fixed[i] = fixed
			sum.CDC = append(sum.CDC, cdc)
		}
		r.Groups = append(r.Groups, sum)
	}
	return r, nil
}

func (c *Corpus) row(ctx context.Context, g int, s *chunkSet) (row Row, err error) {
	entries := s.entries(g)
	for _, e := range entries {
		row.Chunks++
		row.PlainBytes += int64(e.Len)
		row.StoredBytes += int64(e.Stored)
	}
	packs := layPacks(entries)
	for _, p := range packs {
		row.PackBytes += p.size
	}
	dir, err := os.MkdirTemp(c.cfg.TmpDir, "quarry-corpus-index")
	if err != nil {
		return row, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	row.IndexBytes, err = indexBytes(ctx, dir, packs)
	return row, err
}

// seen has the size of each distinct thing and the groups that have it.
type seen map[chunk.Digest]*seenItem

type seenItem struct {
	size   int64
	groups uint32
}

// add adds a thing to group 0 and group g.
func (s seen) add(d chunk.Digest, size int64, g int) {
	it := s[d]
	if it == nil {
		it = &seenItem{size: size}
		s[d] = it
	}
	it.groups |= mask(g)
}

func (s seen) bytes(g int) (n int64) {
	for _, it := range s {
		if it.groups&(1<<g) != 0 {
			n += it.size
		}
	}
	return n
}

// mask is the whole corpus and group g.
func mask(g int) uint32 { return 1 | 1<<g }
