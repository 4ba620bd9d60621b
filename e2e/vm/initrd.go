package vm

import (
	"bufio"
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

var (
	//go:embed init.sh
	initScript []byte
	//go:embed init2.sh
	init2Script []byte
)

// baseModules are what every guest has: the shared folders, and what mounts an
// image as the worker does.
var baseModules = []string{"virtio_pci", "9pnet_virtio", "9p", "loop", "fuse", "erofs", "overlay"}

// writeInitrd makes the initial ramfs: busybox and other programs, the two scripts, the
// modules with what they depend on, and those that are only there to be loaded. work is
// an empty folder.
func (k *Kernel) writeInitrd(ctx context.Context, work string, programs []string, modules, loadable []string) (string, error) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return "", err
	}
	root := filepath.Join(work, "root")
	for _, dir := range []string{"bin", "modules"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return "", err
		}
	}
	for _, path := range append([]string{busybox}, programs...) {
		path, err := filepath.Abs(path)
		if err == nil {
			err = os.Symlink(path, filepath.Join(root, "bin", filepath.Base(path)))
		}
		if err != nil {
			return "", err
		}
	}
	list, err := k.copyModules(ctx, filepath.Join(root, "modules"), modules)
	if err != nil {
		return "", err
	}
	if _, err := k.copyModules(ctx, filepath.Join(root, "modules"), loadable); err != nil {
		return "", err
	}
	err = errors.Join(
		os.WriteFile(filepath.Join(root, "init"), initScript, 0o755),
		os.WriteFile(filepath.Join(root, "init2"), init2Script, 0o755),
		os.WriteFile(filepath.Join(root, "modules/list"), list, 0o644),
	)
	if err != nil {
		return "", err
	}
	initrd := filepath.Join(work, "initrd")
	return initrd, archive(ctx, root, initrd)
}

// archive writes a folder, and what its links name, as a cpio archive that the kernel
// reads.
func archive(ctx context.Context, root, to string) error {
	var names strings.Builder
	err := fs.WalkDir(os.DirFS(root), ".", func(path string, _ fs.DirEntry, err error) error {
		fmt.Fprintln(&names, path)
		return err
	})
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, "cpio", "--create", "--dereference", "--format=newc", "--quiet", "--owner=0:0", "--file="+to)
	cmd.Dir = root
	cmd.Stdin = strings.NewReader(names.String())
	_, err = output(cmd)
	return err
}

// copyModules puts modules, each "NAME [PARAMETER…]", and what they need into
// dir, unpacked. It returns the list of them in the order to load them.
func (k *Kernel) copyModules(ctx context.Context, dir string, modules []string) ([]byte, error) {
	var list bytes.Buffer
	seen := map[string]bool{}
	for _, m := range modules {
		name, params, _ := strings.Cut(m, " ")
		steps, err := output(exec.CommandContext(ctx, "modprobe", "-C", "/dev/null", "-d", k.base, "-S", k.Release, "--show-depends", name))
		if err != nil {
			return nil, fmt.Errorf("kernel %s has no module %s: %w", k.Release, name, err)
		}
		lines := bufio.NewScanner(strings.NewReader(steps))
		for lines.Scan() {
			// "insmod PATH" or "builtin NAME"
			f := strings.Fields(lines.Text())
			if len(f) < 2 || f[0] != "insmod" || seen[f[1]] {
				continue
			}
			seen[f[1]] = true
			file, err := unpackModule(ctx, f[1], dir)
			if err != nil {
				return nil, err
			}
			if strings.TrimSuffix(strings.ReplaceAll(file, "-", "_"), ".ko") != strings.ReplaceAll(name, "-", "_") {
				file += " " // a dependency: the parameters are not its
			} else {
				file += " " + params
			}
			fmt.Fprintln(&list, file)
		}
	}
	return list.Bytes(), nil
}

// unpackModule puts one module into dir and returns its file's name there.
func unpackModule(ctx context.Context, path, dir string) (string, error) {
	name, packed := strings.CutSuffix(filepath.Base(path), ".xz")
	raw, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	if packed {
		text, err := output(exec.CommandContext(ctx, "xz", "-dc", path))
		if err != nil {
			return "", err
		}
		raw = []byte(text)
	}
	return name, os.WriteFile(filepath.Join(dir, name), raw, 0o644)
}
