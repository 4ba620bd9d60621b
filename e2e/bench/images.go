package main

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/klauspost/compress/gzip"

	"quarry/e2e/lab"
	"quarry/store/chunk"
)

// layout is an OCI image layout with one image.
type layout struct {
	dir    string
	family string   // images of one family are independent builds of much the same files
	layers []string // blob files
	size   int64    // of the layers
}

func (l layout) name() string { return filepath.Base(l.dir) }

// layouts returns the corpus, <family>-<n> in QUARRY_CORPUS, or the two builds
// of the Debian image where there is no corpus.
func layouts() ([]layout, error) {
	first, second, err := lab.DebianImages()
	if err != nil {
		return nil, err
	}
	dir := os.Getenv("QUARRY_CORPUS")
	if dir == "" {
		dir = filepath.Join(os.Getenv("QUARRY_IMAGES"), "..", "corpus")
	}
	indexes, err := filepath.Glob(filepath.Join(dir, "[a-z]*-[0-9]*", "index.json"))
	if err != nil {
		return nil, err
	}
	var ls []layout
	for _, index := range indexes {
		l, err := readLayout(filepath.Dir(index))
		if err != nil {
			return nil, err
		}
		l.family = l.name()[:strings.LastIndex(l.name(), "-")]
		ls = append(ls, l)
	}
	if len(ls) > 0 {
		return ls, nil
	}
	fmt.Printf("no corpus in %s (make corpus): measuring on the Debian image alone\n", dir)
	for _, dir := range []string{first, second} {
		l, err := readLayout(dir)
		if err != nil {
			return nil, err
		}
		l.family = "debian"
		ls = append(ls, l)
	}
	return ls, nil
}

func readLayout(dir string) (layout, error) {
	type descriptor struct{ Digest string }
	var index struct{ Manifests []descriptor }
	if err := readJSON(filepath.Join(dir, "index.json"), &index); err != nil {
		return layout{}, err
	}
	if len(index.Manifests) != 1 {
		return layout{}, fmt.Errorf("%s has %d manifests, want 1", dir, len(index.Manifests))
	}
	blob := func(digest string) string {
		return filepath.Join(dir, "blobs", strings.Replace(digest, ":", "/", 1))
	}
	var manifest struct{ Layers []descriptor }
	if err := readJSON(blob(index.Manifests[0].Digest), &manifest); err != nil {
		return layout{}, err
	}
	l := layout{dir: dir}
	for _, d := range manifest.Layers {
		info, err := os.Stat(blob(d.Digest))
		if err != nil {
			return layout{}, err
		}
		l.layers, l.size = append(l.layers, blob(d.Digest)), l.size+info.Size()
	}
	return l, nil
}

func readJSON(path string, v any) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return json.Unmarshal(raw, v)
}

// families groups images, each family in the order of its names.
func families(ls []layout) [][]layout {
	var groups [][]layout
	for _, l := range ls {
		i := slices.IndexFunc(groups, func(g []layout) bool { return g[0].family == l.family })
		if i < 0 {
			i, groups = len(groups), append(groups, nil)
		}
		groups[i] = append(groups[i], l)
	}
	return groups
}

// contents is what the layers of an image hold.
type contents struct {
	entries int   // of the tars
	chunks  int64 // of their files, repetitions included
}

// contents reads the layers.
func (l layout) contents() (contents, error) {
	var c contents
	for _, file := range l.layers {
		if err := c.add(file); err != nil {
			return c, fmt.Errorf("%s: %w", file, err)
		}
	}
	return c, nil
}

func (c *contents) add(layer string) error {
	f, err := os.Open(layer)
	if err != nil {
		return err
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	for t := tar.NewReader(z); ; c.entries++ {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if h.Typeflag == tar.TypeReg {
			c.chunks += chunk.Count(h.Size, chunk.DefaultSize)
		}
	}
}
