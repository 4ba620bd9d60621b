// Package durable writes files that a crash leaves either whole or absent. It
// is the one place that knows the order of write, fsync, rename and fsync of
// the parent, so that nobody else has to get it right.
package durable

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// WriteFile makes path hold data, replacing what was there; it is durable on
// nil. A failure leaves the old file as it was; a crash may leave a file
// .<name>.tmp<number> beside it, which nothing reads.
func WriteFile(path string, data []byte, perm fs.FileMode) error {
	return writeFile(path, data, perm, (*os.Root).Rename)
}

// ReplaceFile is WriteFile for data that whoever reads it verifies and can have
// anew: nobody waits for the disk. The file is whole or the old one for every
// reader, and after the death of any process; a power cut may leave less of it.
func ReplaceFile(path string, data []byte, perm fs.FileMode) error {
	tmp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".tmp*")
	if err != nil {
		return err
	}
	err = write(tmp, data, perm)
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		os.Remove(tmp.Name())
	}
	return err
}

func write(f *os.File, data []byte, perm fs.FileMode) error {
	if err := f.Chmod(perm); err != nil {
		return err
	}
	_, err := f.Write(data)
	return err
}

// CreateFile is WriteFile for a file that must not exist yet: of any number of
// concurrent calls one succeeds, the others get fs.ErrExist.
func CreateFile(path string, data []byte, perm fs.FileMode) error {
	return writeFile(path, data, perm, (*os.Root).Link)
}

func writeFile(path string, data []byte, perm fs.FileMode, commit commitFunc) error {
	root, err := os.OpenRoot(filepath.Dir(path))
	if err != nil {
		return err
	}
	defer root.Close()
	tmp, err := os.CreateTemp(root.Name(), "."+filepath.Base(path)+".tmp*")
	if err != nil {
		return err
	}
	defer root.Remove(filepath.Base(tmp.Name()))
	if err := fill(tmp, func(io.Writer) error { return write(tmp, data, perm) }); err != nil {
		return err
	}
	return publish(root, filepath.Base(tmp.Name()), filepath.Base(path), commit)
}

// MkdirAll makes the folder and its missing parents, durable on nil.
func MkdirAll(dir string, perm fs.FileMode) error {
	info, err := os.Stat(dir)
	if err == nil {
		if !info.IsDir() {
			return fmt.Errorf("%s is not a folder", dir)
		}
		return nil
	}
	parent := filepath.Dir(filepath.Clean(dir))
	if err := MkdirAll(parent, perm); err != nil {
		return err
	}
	if err := os.Mkdir(dir, perm); err != nil && !os.IsExist(err) {
		return err
	}
	root, err := os.OpenRoot(parent)
	if err != nil {
		return err
	}
	defer root.Close()
	return SyncDir(root, ".")
}

// SyncDir makes the entries of a folder below root durable: names created,
// renamed or removed in it survive a crash once it returns nil.
func SyncDir(root *os.Root, dir string) error {
	d, err := root.Open(dir)
	if err != nil {
		return err
	}
	if err := d.Sync(); err != nil {
		d.Close()
		return err
	}
	return d.Close()
}

type commitFunc func(root *os.Root, tmp, name string) error

// fill writes the content of a new file, makes it durable and closes it.
func fill(f *os.File, write func(io.Writer) error) error {
	err := write(f)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// publish gives a filled file its name, durably: the content was synced before
// (fill), so the name never leads to less than the whole content.
func publish(root *os.Root, tmp, name string, commit commitFunc) error {
	if err := commit(root, tmp, name); err != nil {
		return err
	}
	return SyncDir(root, filepath.Dir(name))
}
