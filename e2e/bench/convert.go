package main

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"time"

	"quarry/e2e/lab"
)

// measureConvert compares a conversion of new content with gunzip and umoci on
// the same layers, and then converts the same image again.
func measureConvert(ctx context.Context, r *report, l *lab.Lab, layout, _ string) error {
	layers, err := layerFiles(layout)
	if err != nil {
		return err
	}
	var gunzip, convert, again, umoci, memory []float64
	for i := range rounds {
		s, err := timed(func() error { return gunzipAll(ctx, layers) })
		if err != nil {
			return err
		}
		gunzip = append(gunzip, s)
		data := l.Path(fmt.Sprintf("convert%d", i))
		if s, err = timed(func() error { return convertNew(ctx, l, data, layout) }); err != nil {
			return err
		}
		convert = append(convert, s)
		if s, err = timed(func() error { return convertKnown(ctx, l, data, layout) }); err != nil {
			return err
		}
		again = append(again, s)
		peak, err := l.PeakMemory(data)
		if err != nil {
			return err
		}
		memory = append(memory, float64(peak)/(1<<20))
		target := l.Path(fmt.Sprintf("umoci%d", i))
		if s, err = timed(func() error { return umociUnpack(ctx, layout, target) }); err != nil {
			return err
		}
		umoci = append(umoci, s)
		if err := os.RemoveAll(target); err != nil {
			return err
		}
	}
	g := median(gunzip)
	r.figure("gzip -dc of the layers", fmt.Sprintf("%.2f s", g))
	r.figure("umoci unpack ÷ gzip -dc", fmt.Sprintf("%.2f", median(umoci)/g))
	r.atMost("convert, new content ÷ gzip -dc", median(convert)/g, 2.0, "×")
	r.atMost("convert again, no layer read", median(again)*1000, 100, "ms")
	r.atMost("convert, peak resident memory of the server", median(memory), 300, "MiB")
	return nil
}

func timed(f func() error) (float64, error) {
	start := time.Now()
	err := f()
	return time.Since(start).Seconds(), err
}

func convertNew(ctx context.Context, l *lab.Lab, data, layout string) error {
	res, err := l.Convert(ctx, data, "oci:"+layout, "bench/debian")
	if err == nil && res.LayersSkipped != 0 {
		return fmt.Errorf("convert into an empty data folder skipped %d layers", res.LayersSkipped)
	}
	return err
}

func convertKnown(ctx context.Context, l *lab.Lab, data, layout string) error {
	res, err := l.Convert(ctx, data, "oci:"+layout, "bench/debian")
	if err == nil && res.LayersSkipped != res.Layers {
		return fmt.Errorf("converting a known image read %d of %d layers", res.Layers-res.LayersSkipped, res.Layers)
	}
	return err
}

func gunzipAll(ctx context.Context, layers []string) error {
	cmd := exec.CommandContext(ctx, "gzip", append([]string{"-dc"}, layers...)...)
	cmd.Stdout = nil // /dev/null
	return cmd.Run()
}

func umociUnpack(ctx context.Context, layout, target string) error {
	out, err := exec.CommandContext(ctx, "umoci", "unpack", "--image", layout+":latest", target).CombinedOutput()
	if err != nil {
		return fmt.Errorf("umoci unpack: %w: %s", err, out)
	}
	return nil
}

// layerFiles returns the layer blobs of a layout with one image.
func layerFiles(layout string) ([]string, error) {
	type descriptor struct{ Digest string }
	var index struct{ Manifests []descriptor }
	if err := readJSON(filepath.Join(layout, "index.json"), &index); err != nil {
		return nil, err
	}
	if len(index.Manifests) != 1 {
		return nil, fmt.Errorf("%s has %d manifests, want 1", layout, len(index.Manifests))
	}
	blob := func(digest string) string {
		return filepath.Join(layout, "blobs", strings.Replace(digest, ":", "/", 1))
	}
	var manifest struct{ Layers []descriptor }
	if err := readJSON(blob(index.Manifests[0].Digest), &manifest); err != nil {
		return nil, err
	}
	var files []string
	for _, d := range manifest.Layers {
		files = append(files, blob(d.Digest))
	}
	return files, nil
}

func readJSON(path string, v any) error {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return json.Unmarshal(raw, v)
}

// measureSharing says how much of the independent build's content the store
// already had. The packages that only the second build has are left out.
func measureSharing(ctx context.Context, r *report, l *lab.Lab, first, second string) error {
	data := l.Path("sharing")
	if _, err := l.Convert(ctx, data, "oci:"+first, "bench/debian"); err != nil {
		return err
	}
	res, err := l.Convert(ctx, data, "oci:"+second, "bench/again")
	if err != nil {
		return err
	}
	a, err := contents(ctx, l, data, "bench/debian")
	if err != nil {
		return err
	}
	b, err := contents(ctx, l, data, "bench/again")
	if err != nil {
		return err
	}
	extra := b.bytesOnlyIn(a)
	share := 1 - float64(res.NewPlainBytes-extra)/float64(b.total-extra)
	r.figure("independent build: file bytes, new plain chunk bytes", fmt.Sprintf("%.1f MB, %.2f MB", float64(b.total)/1e6, float64(res.NewPlainBytes)/1e6))
	r.figure("of which the extra packages", fmt.Sprintf("%.2f MB", float64(extra)/1e6))
	r.atLeast("independent build: share of file bytes already stored", 100*share, 98, "%")
	return nil
}

// files are the regular files of an image, by path, with the package lists.
type files struct {
	total int64
	size  map[string]int64
	lists map[string][]string // package → its paths
}

const dpkgInfo = "var/lib/dpkg/info/"

// contents reads the files of an image from its export.
func contents(ctx context.Context, l *lab.Lab, data, name string) (files, error) {
	f := files{size: map[string]int64{}, lists: map[string][]string{}}
	cmd := l.Command(ctx, "export", "--data", data, name)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return f, err
	}
	if err := cmd.Start(); err != nil {
		return f, err
	}
	readErr := f.read(out)
	io.Copy(io.Discard, out)
	return f, errors.Join(readErr, cmd.Wait())
}

func (f *files) read(r io.Reader) error {
	t := tar.NewReader(r)
	for {
		h, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		name := path.Clean(h.Name)
		f.total += h.Size
		f.size[name] = h.Size
		pkg, isList := strings.CutSuffix(strings.TrimPrefix(name, dpkgInfo), ".list")
		if !isList || path.Dir(name)+"/" != dpkgInfo {
			continue
		}
		raw, err := io.ReadAll(t)
		if err != nil {
			return err
		}
		f.lists[pkg] = strings.Fields(string(raw))
	}
}

// bytesOnlyIn sums the files of the packages that other does not have.
func (f *files) bytesOnlyIn(other files) int64 {
	var sum int64
	for pkg, paths := range f.lists {
		if _, both := other.lists[pkg]; both {
			continue
		}
		for _, p := range paths {
			sum += f.size[strings.TrimPrefix(p, "/")]
		}
		for name, size := range f.size {
			if strings.HasPrefix(name, dpkgInfo+pkg+".") {
				sum += size
			}
		}
	}
	return sum
}
