package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"quarry/e2e/lab"
)

// measureSharing says how much of the independent build's content the store
// already had. The packages that only the second build has are left out.
func measureSharing(ctx context.Context, b *bench) error {
	l := b.lab
	first, second, err := lab.DebianImages()
	if err != nil {
		return err
	}
	data := l.Path("sharing")
	if _, err := l.Convert(ctx, data, "oci:"+first, "bench/debian"); err != nil {
		return err
	}
	res, err := l.Convert(ctx, data, "oci:"+second, "bench/again")
	if err != nil {
		return err
	}
	had, err := exported(ctx, l, data, "bench/debian")
	if err != nil {
		return err
	}
	has, err := exported(ctx, l, data, "bench/again")
	if err != nil {
		return err
	}
	extra := has.bytesOnlyIn(had)
	share := 1 - float64(res.NewPlainBytes-extra)/float64(has.total-extra)
	b.figure("independent build: file bytes, new plain chunk bytes", fmt.Sprintf("%.1f MB, %.2f MB", float64(has.total)/1e6, float64(res.NewPlainBytes)/1e6))
	b.figure("of which the extra packages", fmt.Sprintf("%.2f MB", float64(extra)/1e6))
	b.atLeast("independent build: share of file bytes already stored", 100*share, 98, "%")
	return nil
}

// files are the regular files of an image, by path, with the package lists.
type files struct {
	total int64
	size  map[string]int64
	lists map[string][]string // package → its paths
}

const dpkgInfo = "var/lib/dpkg/info/"

// exported reads the files of an image from its export.
func exported(ctx context.Context, l *lab.Lab, data, name string) (files, error) {
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
