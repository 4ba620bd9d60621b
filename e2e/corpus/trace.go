package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"quarry/e2e/corpus/measure"
	"quarry/e2e/lab"
)

// coldCommands are what a task does first, two or so in one image of each kind.
func coldCommands() []measure.Command {
	return []measure.Command{
		{Image: "python-web-1", Args: []string{"python3", "-c", "print(1)"}},
		{Image: "python-web-1", Args: []string{"pip", "--version"}},
		{Image: "python-web-1", Dir: "/testbed", Args: []string{"python3", "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"}},
		{Image: "python-science-1", Args: []string{"python3", "-c", "import numpy"}},
		{Image: "python-science-1", Args: []string{"python3", "-c", "import pandas, scipy.stats"}},
		{Image: "node-1", Args: []string{"node", "-e", "console.log(1)"}},
		{Image: "node-1", Dir: "/testbed", Args: []string{"node", "-e", "require('express'); require('webpack')"}},
		{Image: "node-1", Dir: "/testbed", Args: []string{"node_modules/.bin/tsc", "--version"}},
		{Image: "c-build-1", Args: []string{"gcc", "--version"}},
		{Image: "c-build-1", Args: []string{"sh", "-c", `echo 'int main(void){return 0;}' >/tmp/a.c && gcc -o /tmp/a /tmp/a.c && /tmp/a`}},
		{Image: "c-build-1", Dir: "/testbed", Args: []string{"git", "log", "--stat"}},
		{Image: "busybox-1", Args: []string{"ls", "/"}},
		{Image: "golang-1", Args: []string{"go", "version"}},
		{Image: "services-1", Args: []string{"perl", "-MPOSIX", "-e", "print 1"}},
		{Image: "services-1", Args: []string{"redis-server", "--version"}},
		{Image: "java-1", Args: []string{"java", "-version"}},
	}
}

// tracer runs commands on mounts that the built programs make, without
// read-ahead: what is in the page cache of a mount afterwards is what the
// command touched.
type tracer struct{ lab *lab.Lab }

func (t *tracer) trace(ctx context.Context, im measure.Image, cmds []measure.Command) (all []measure.Touched, err error) {
	data := t.lab.Path("data-" + im.Name)
	name := "corpus/" + im.Name
	if _, err := t.lab.Convert(ctx, data, "oci:"+im.Layout, name); err != nil {
		return nil, err
	}
	for _, cmd := range cmds {
		touched, err := t.cold(ctx, data, name, cmd)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", strings.Join(cmd.Args, " "), err)
		}
		all = append(all, touched)
	}
	return all, nil
}

// cold runs one command on a fresh mount.
func (t *tracer) cold(ctx context.Context, data, name string, cmd measure.Command) (touched measure.Touched, err error) {
	dir, err := os.MkdirTemp(t.lab.Dir, "mount")
	if err != nil {
		return nil, err
	}
	worker := t.lab.Path("worker")
	if _, err := t.lab.Quarry(ctx, "mount", "--data", data, "--worker-dir", worker, "--read-ahead", "0", name, dir); err != nil {
		return nil, err
	}
	defer func() {
		_, uerr := t.lab.Quarry(context.WithoutCancel(ctx), "umount", "--worker-dir", worker, dir)
		err = errors.Join(err, uerr)
	}()
	if err := inImage(ctx, dir, cmd); err != nil {
		return nil, err
	}
	return resident(dir)
}

// enterImage runs a command in an image: $1 is its root, $2 the folder to work
// in, the rest the command. The mounts end with it. PATH is the image's.
const enterImage = `
mount -t tmpfs tmp "$1/tmp"
mount --bind /dev "$1/dev"
mount -t proc proc "$1/proc"
root=$1 dir=$2
shift 2
exec env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/tmp LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 \
	unshare --root="$root" --wd="$dir" "$@"
`

func inImage(ctx context.Context, root string, c measure.Command) error {
	dir := c.Dir
	if dir == "" {
		dir = "/"
	}
	args := append([]string{"--mount", "--propagation=private", "--pid", "--fork", "--kill-child", "sh", "-e", "-c", enterImage, "sh", root, dir}, c.Args...)
	out, err := exec.CommandContext(ctx, "unshare", args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// resident returns which pages of which files below dir are in the page cache.
func resident(dir string) (measure.Touched, error) {
	touched := measure.Touched{}
	seen := map[uint64]bool{} // inodes: a file with several names counts once
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return fmt.Errorf("stat %s: %w", path, err)
		}
		if st.Size == 0 || seen[st.Ino] {
			return nil
		}
		seen[st.Ino] = true
		ranges, err := residentPages(path)
		if len(ranges) > 0 {
			touched[strings.TrimPrefix(path, dir)] = ranges
		}
		return err
	})
	return touched, err
}

func residentPages(path string) (ranges []measure.Range, err error) {
	pages, err := lab.Resident(path)
	if err != nil {
		return nil, err
	}
	page := int64(os.Getpagesize())
	for i, there := range pages {
		if !there {
			continue
		}
		off := int64(i) * page
		if k := len(ranges) - 1; k >= 0 && ranges[k].Off+ranges[k].Len == off {
			ranges[k].Len += page
		} else {
			ranges = append(ranges, measure.Range{Off: off, Len: page})
		}
	}
	return ranges, nil
}
