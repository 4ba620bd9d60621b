package main

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"quarry/api/sandboxes/client"
	"quarry/worker/sandbox"
)

func newCp() *cobra.Command {
	var node nodeTarget
	o := copyOptions{most: byteSize{text: "16G", bytes: 16 << 30}}
	c := &cobra.Command{
		Use:   "cp [--exclude PATTERN]… [--max-bytes N] SANDBOX:PATH DEST | SOURCE SANDBOX:PATH",
		Short: "copy a file or folder out of a sandbox of a worker, or into one",
		Long: `cp copies a file, or what is in a folder. DEST and SOURCE are on this machine; - is stdin or stdout, as a file.
Of a folder that comes out of a sandbox, links stay links, devices and fifos are left out and named, and blocks of zeros become holes.
More than --max-bytes of content, holes included, is not taken: cp fails, and of a folder what came before stays.`,
		Args: exactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			cl, err := node.dial()
			if err != nil {
				return err
			}
			from, fromPath, out := sandboxPath(args[0])
			to, toPath, in := sandboxPath(args[1])
			switch {
			case out && !in:
				return o.copyOut(c.Context(), cl, from, fromPath, args[1], c.OutOrStdout(), c.ErrOrStderr())
			case in && !out:
				return copyIn(c.Context(), cl, args[0], to, toPath, c.InOrStdin())
			}
			return usage(c, errors.New("want SANDBOX:PATH as one of the two, and a path of this machine as the other"))
		},
	}
	node.flags(c)
	c.Flags().StringArrayVar(&o.exclude, "exclude", nil, "leave out of a folder that comes out what this pattern matches; may be repeated")
	c.Flags().Var(&o.most, "max-bytes", "how much content may come out of the sandbox, such as 512M or 20G")
	return c
}

type copyOptions struct {
	exclude []string
	most    byteSize
}

// sandboxPath takes SANDBOX:PATH apart; what has a slash before the colon is a path of
// this machine.
func sandboxPath(text string) (id, path string, ok bool) {
	id, path, ok = strings.Cut(text, ":")
	return id, path, ok && id != "" && path != "" && !strings.ContainsAny(id, "/.")
}

func (o *copyOptions) copyOut(ctx context.Context, c *client.Client, id, path, dest string, stdout, stderr io.Writer) error {
	fi, err := c.StatFile(ctx, id, path)
	if errors.Is(err, sandbox.ErrNotReady) { // paused: its files can be read, and nothing else
		return o.copyFileOut(ctx, c, id, path, dest, stdout)
	}
	if err != nil {
		return err
	}
	if fi.Type != sandbox.TypeFolder {
		return o.copyFileOut(ctx, c, id, path, dest, stdout)
	}
	if dest == "-" {
		return fmt.Errorf("%s is a folder, and stdout takes a file: give a folder of this machine", path)
	}
	if st, err := os.Stat(dest); err == nil && !st.IsDir() {
		return fmt.Errorf("%s is a file, and %s a folder: give a folder, or a name that is not there", dest, path)
	}
	if err := os.MkdirAll(dest, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(dest)
	if err != nil {
		return err
	}
	defer root.Close()
	r, w := io.Pipe()
	done := make(chan error, 1)
	go func() { // ends with the pipe
		err := c.TarDown(ctx, id, sandbox.TarOptions{Path: path, Exclude: o.exclude}, w)
		w.CloseWithError(err)
		done <- err
	}()
	err = unpack(root, r, newBudget(o.most.bytes), stderr)
	r.CloseWithError(err)
	switch tarErr := <-done; {
	case err == nil:
		return tarErr
	case tarErr == nil || errors.Is(err, tarErr) || errors.Is(tarErr, err):
		return err // one was told the other's
	default:
		return errors.Join(err, tarErr)
	}
}

func (o *copyOptions) copyFileOut(ctx context.Context, c *client.Client, id, path, dest string, stdout io.Writer) (err error) {
	if dest == "-" {
		_, err := c.ReadFile(ctx, id, path, sandbox.ReadOptions{Length: -1}, newBudget(o.most.bytes).to(stdout))
		return err
	}
	if st, err := os.Stat(dest); err == nil && st.IsDir() {
		dest = filepath.Join(dest, filepath.Base(path))
	}
	f, err := os.CreateTemp(filepath.Dir(dest), ".quarry-cp-*")
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is no folder %s: make it first", filepath.Dir(dest))
	}
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	to := &holes{f: f}
	fi, err := c.ReadFile(ctx, id, path, sandbox.ReadOptions{Length: -1}, newBudget(o.most.bytes).to(to))
	if err == nil {
		err = to.finish()
	}
	if err == nil {
		err = f.Chmod(fs.FileMode(fi.Mode & 0o777))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(f.Name(), dest)
}

// maxUnpacked bounds the entries of a folder that comes out: no worker sends more.
const maxUnpacked = sandbox.MaxFiles

// unpack makes of a sandbox's tar what a folder can hold. The tar is hostile: root
// keeps all of it inside, and neither owners nor set-id bits come over.
func unpack(root *os.Root, r io.Reader, b *budget, stderr io.Writer) error {
	tr := tar.NewReader(r)
	for n := 0; ; n++ {
		h, err := tr.Next()
		if err == nil && n == maxUnpacked {
			return fmt.Errorf("%w: more than %d files", errTooMuch, maxUnpacked)
		}
		if errors.Is(err, io.EOF) {
			_, err := io.Copy(io.Discard, r) // what follows the end blocks is part of its digest
			return err
		}
		if err != nil {
			return err
		}
		name := filepath.Clean(strings.TrimPrefix(h.Name, "/"))
		if name == "." {
			continue
		}
		if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return linked(root, name, err)
		}
		mode := fs.FileMode(h.Mode & 0o777)
		switch h.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(name, mode|0o700)
		case tar.TypeReg:
			err = unpackFile(root, name, mode, tr, b)
		case tar.TypeSymlink:
			_ = root.Remove(name)
			err = root.Symlink(h.Linkname, name)
		case tar.TypeLink:
			_ = root.Remove(name)
			err = root.Link(filepath.Clean(strings.TrimPrefix(h.Linkname, "/")), name)
		default:
			fmt.Fprintf(stderr, "quarry: %s is left out: it is no file, folder or link\n", oneLine(h.Name))
		}
		if err != nil {
			return linked(root, name, fmt.Errorf("%s: %w", oneLine(h.Name), err))
		}
	}
}

// linked says of an error which symlink is in the way, if one is.
func linked(root *os.Root, name string, err error) error {
	for i := range len(name) + 1 {
		if i < len(name) && name[i] != '/' {
			continue
		}
		if st, serr := root.Lstat(name[:i]); serr == nil && st.Mode()&fs.ModeSymlink != 0 {
			return fmt.Errorf("%s is a symlink, and nothing is written where it leads: remove it, or copy to another folder: %w", oneLine(name[:i]), err)
		}
	}
	return err
}

func unpackFile(root *os.Root, name string, mode fs.FileMode, r io.Reader, b *budget) error {
	_ = root.Remove(name) // never through a link that was there
	f, err := root.OpenFile(name, os.O_CREATE|os.O_EXCL|os.O_WRONLY, mode)
	if err != nil {
		return err
	}
	to := &holes{f: f}
	if _, err = io.Copy(b.to(to), r); err == nil {
		err = to.finish()
	}
	return errors.Join(err, f.Close())
}

func copyIn(ctx context.Context, c *client.Client, source, id, path string, stdin io.Reader) error {
	if source == "-" {
		_, err := c.WriteFile(ctx, id, path, sandbox.WriteOptions{Size: -1}, stdin)
		return err
	}
	st, err := os.Stat(source)
	if err != nil {
		return err
	}
	if st.IsDir() {
		return copyFolderIn(ctx, c, source, id, path)
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s is neither a file nor a folder: give - and the content on stdin", source)
	}
	f, err := os.Open(source)
	if err != nil {
		return err
	}
	defer f.Close()
	if fi, err := c.StatFile(ctx, id, path); err == nil && fi.Type == sandbox.TypeFolder {
		path = strings.TrimSuffix(path, "/") + "/" + filepath.Base(source)
	}
	mode := uint32(st.Mode().Perm())
	_, err = c.WriteFile(ctx, id, path, sandbox.WriteOptions{Size: st.Size(), Mode: &mode}, f)
	if errors.Is(err, sandbox.ErrFileNotFound) {
		err = fmt.Errorf("%w: make the folder first: quarry exec %s mkdir -p DIR", err, id)
	}
	return err
}

func copyFolderIn(ctx context.Context, c *client.Client, source, id, path string) error {
	r, w := io.Pipe()
	go func() { // ends with the pipe
		tw := tar.NewWriter(w)
		err := tw.AddFS(os.DirFS(source))
		w.CloseWithError(errors.Join(err, tw.Close()))
	}()
	err := c.TarUp(ctx, id, path, r)
	r.CloseWithError(err)
	return err
}
