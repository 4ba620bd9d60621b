package main

import (
	"archive/tar"
	"bufio"
	"compress/gzip"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"time"
)

// generated returns an image of one layer that fill writes, made in dir when it
// is not there.
func generated(dir, name string, fill func(*tar.Writer) error) (layout, error) {
	path := filepath.Join(dir, name)
	if _, err := os.Stat(filepath.Join(path, "index.json")); err != nil {
		if err := errors.Join(os.RemoveAll(path), generate(path, fill)); err != nil {
			return layout{}, fmt.Errorf("generate %s: %w", path, err)
		}
	}
	return readLayout(path)
}

func generate(path string, fill func(*tar.Writer) error) error {
	g := generator{blobs: filepath.Join(path, "blobs", "sha256")}
	if err := os.MkdirAll(g.blobs, 0o755); err != nil {
		return err
	}
	layer, diffID := g.layer(fill)
	config := g.json("application/vnd.oci.image.config.v1+json", map[string]any{
		"architecture": "amd64", "os": "linux",
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{diffID}},
	})
	manifest := g.json("application/vnd.oci.image.manifest.v1+json", map[string]any{
		"schemaVersion": 2, "mediaType": "application/vnd.oci.image.manifest.v1+json",
		"config": config, "layers": []descriptor{layer},
	})
	g.write(filepath.Join(path, "oci-layout"), []byte(`{"imageLayoutVersion":"1.0.0"}`))
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "manifests": []descriptor{manifest}})
	if err != nil {
		return err
	}
	g.write(filepath.Join(path, "index.json"), index) // last: it says that the image is whole
	return g.err
}

type descriptor struct {
	MediaType string `json:"mediaType"`
	Digest    string `json:"digest"`
	Size      int64  `json:"size"`
}

// generator writes the blobs of a layout. Its first error stays.
type generator struct {
	blobs string
	err   error
}

func (g *generator) write(path string, p []byte) {
	if g.err == nil {
		g.err = os.WriteFile(path, p, 0o644)
	}
}

func (g *generator) json(mediaType string, v any) descriptor {
	p, err := json.Marshal(v)
	g.err = errors.Join(g.err, err)
	sum := fmt.Sprintf("%x", sha256.Sum256(p))
	g.write(filepath.Join(g.blobs, sum), p)
	return descriptor{mediaType, "sha256:" + sum, int64(len(p))}
}

// layer writes the layer and returns its diffID too.
func (g *generator) layer(fill func(*tar.Writer) error) (descriptor, string) {
	tmp := filepath.Join(g.blobs, "layer")
	f, err := os.Create(tmp)
	if err != nil {
		g.err = errors.Join(g.err, err)
		return descriptor{}, ""
	}
	blob, plain := sha256.New(), sha256.New()
	err = errors.Join(writeLayer(io.MultiWriter(f, blob), plain, fill), f.Close())
	sum := fmt.Sprintf("%x", blob.Sum(nil))
	info, statErr := os.Stat(tmp)
	if g.err = errors.Join(g.err, err, statErr, os.Rename(tmp, filepath.Join(g.blobs, sum))); g.err != nil {
		return descriptor{}, ""
	}
	return descriptor{"application/vnd.oci.image.layer.v1.tar+gzip", "sha256:" + sum, info.Size()}, fmt.Sprintf("sha256:%x", plain.Sum(nil))
}

func writeLayer(w io.Writer, plain hash.Hash, fill func(*tar.Writer) error) error {
	z, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if err != nil {
		return err
	}
	out := bufio.NewWriterSize(io.MultiWriter(z, plain), 256<<10)
	t := tar.NewWriter(out)
	return errors.Join(fill(t), t.Close(), out.Flush(), z.Close())
}

// writeEntries writes n entries: directories of 50 files of a line each, no two
// alike.
func writeEntries(t *tar.Writer, n int) error {
	mtime := time.Unix(1_700_000_000, 0)
	for i := range n {
		dir := fmt.Sprintf("srv/node_modules/package-%d/", i/51)
		h := &tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755, ModTime: mtime}
		body := fmt.Sprintf("export default require('./lib/%d')\n", i)
		if i%51 != 0 {
			h = &tar.Header{Typeflag: tar.TypeReg, Name: fmt.Sprintf("%smodule-%d.js", dir, i), Mode: 0o644, ModTime: mtime, Size: int64(len(body))}
		}
		if err := t.WriteHeader(h); err != nil {
			return err
		}
		if h.Typeflag == tar.TypeReg {
			if _, err := io.WriteString(t, body); err != nil {
				return err
			}
		}
	}
	return nil
}
