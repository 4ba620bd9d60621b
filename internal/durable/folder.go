package durable

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strconv"
	"sync"
	"sync/atomic"
)

// TmpDir is where a Folder keeps files until they are whole.
const TmpDir = "tmp"

// maxSynced bounds the memory of folders known to be durable: at 200 bytes a
// name, 4096 names are less than 1 MiB. Forgetting costs only fsyncs.
const maxSynced = 4096

// Folder writes files at slash-separated names below one folder of the file
// system. All methods are safe for concurrent use. Names and symlinks never
// lead out of the folder (os.Root). Files get mode 0600 and folders 0700.
type Folder struct {
	root *os.Root
	self string        // makes names in TmpDir unique among processes
	seq  atomic.Uint64 // and among files

	mu     sync.Mutex
	synced map[string]struct{} // guarded by mu: folders whose own name is durable
}

// OpenFolder opens the folder, makes it when it is missing, and removes what a
// crash left half-written. One process at a time owns a folder; a second one
// would have its half-written files removed, and opens it with ShareFolder.
func OpenFolder(dir string) (*Folder, error) {
	return openFolder(dir, (*Folder).Sweep)
}

// ShareFolder is OpenFolder beside processes that have the folder open.
func ShareFolder(dir string) (*Folder, error) {
	return openFolder(dir, func(f *Folder) error {
		f.self = rand.Text()[:8] + "-"
		if err := f.root.Mkdir(TmpDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		return nil
	})
}

func openFolder(dir string, begin func(*Folder) error) (*Folder, error) {
	if err := MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, err
	}
	f := &Folder{root: root, synced: map[string]struct{}{}}
	if err := begin(f); err != nil {
		root.Close()
		return nil, err
	}
	return f, nil
}

// Sweep removes what others have left half-written. Nothing may be written meanwhile,
// and whoever still writes fails.
func (f *Folder) Sweep() error {
	if err := f.root.RemoveAll(TmpDir); err != nil {
		return fmt.Errorf("remove half-written files: %w", err)
	}
	return f.root.Mkdir(TmpDir, 0o700)
}

// Root gives read access to the files.
func (f *Folder) Root() *os.Root { return f.root }

// Close releases the folder; no other method may be called after it.
func (f *Folder) Close() error { return f.root.Close() }

// Replace makes name hold what write writes, replacing a file that was there.
// It is all or nothing, and durable on nil.
func (f *Folder) Replace(name string, write func(io.Writer) error) error {
	return f.put(name, write, (*os.Root).Rename)
}

// Create is Replace for a name that must not exist: of any number of concurrent
// calls one succeeds, the others get fs.ErrExist.
func (f *Folder) Create(name string, write func(io.Writer) error) error {
	return f.put(name, write, (*os.Root).Link)
}

func (f *Folder) put(name string, write func(io.Writer) error, commit commitFunc) error {
	tmp := path.Join(TmpDir, f.self+strconv.FormatUint(f.seq.Add(1), 10))
	file, err := f.root.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.root.Remove(tmp)
	if err := fill(file, write); err != nil {
		return err
	}
	if err := f.ensure(path.Dir(name)); err != nil {
		return err
	}
	if err := publish(f.root, tmp, name, commit); err != nil {
		f.forget() // the folder may have been removed behind our back
		return err
	}
	return nil
}

// Remove removes the file, durably. A missing file is not an error.
func (f *Folder) Remove(name string) error {
	err := f.root.Remove(name)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// A file that is already gone may have been removed by a process that died
	// before its fsync, so the folder is synced in both cases.
	err = SyncDir(f.root, path.Dir(name))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// ensure makes dir and its parents and returns when their names are durable.
// That a folder exists does not prove it: the process that made it may have
// died, or another goroutine may not have come to, its fsync.
func (f *Folder) ensure(dir string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.synced) >= maxSynced {
		clear(f.synced)
	}
	return f.ensureLocked(dir)
}

func (f *Folder) ensureLocked(dir string) error {
	if _, ok := f.synced[dir]; ok || dir == "." {
		return nil
	}
	parent := path.Dir(dir)
	if err := f.ensureLocked(parent); err != nil {
		return err
	}
	if err := f.root.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if err := SyncDir(f.root, parent); err != nil {
		return err
	}
	f.synced[dir] = struct{}{}
	return nil
}

func (f *Folder) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	clear(f.synced)
}
