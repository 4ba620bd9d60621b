// Package folder is the private folder of one machine's worker: its layout, and
// the verified images in it. Whoever is given the folder after a crash finds all
// there is to know about them in it.
package folder

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"quarry/internal/durable"
	"quarry/store/chunk"
)

// maxDirPath bounds the length of the worker folder's path: the sockets in it
// must fit the 108 bytes of a unix socket address.
const maxDirPath = 80

// Dir is a worker folder. Its layout:
//
//	images/<id>/     statement, config, bootstrap: verified when read, every time;
//	                 origin.json: the store it came from, and the statement again;
//	                 signed: the statement with its signatures, for when no store answers
//	images/<id>.json the same as that origin.json
//	mounts/<id>/     shim.json, fuse/, root/ (the EROFS mount), refs/; notrace when
//	                 a run that uses it leaves no trace
//	mounts/<id>.lock held while the mount of that image changes
//	mounts/<id>.noacl, mounts/<id>.noacl.lock
//	                 the same for sandboxes of an image with POSIX ACLs
//	sandboxes/<sid>/ bundle, runsc state, upper layer of one sandbox; owner is
//	                 locked by the process that runs it
//	reader.sock      the reader's NBD socket; reader.http its statistics
//	serials.json     highest serial seen of each name; serials.copy.json the same
//	cache/           chunks of all images, which the reader alone uses
//	runs/            what the last runs cost, for quarry explain
//	latest.json      which image each reference was the last time, a hint
type Dir struct{ path string }

// Open makes the folder when missing, with mode 0700, and returns it. An
// existing folder must belong to this user and be closed to others.
func Open(path string) (Dir, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return Dir{}, fmt.Errorf("worker folder %s: %w", path, err)
	}
	if len(abs) > maxDirPath {
		return Dir{}, fmt.Errorf("worker folder %s: the path has %d bytes, at most %d fit a socket address; choose a shorter --worker-dir", abs, len(abs), maxDirPath)
	}
	for _, sub := range []string{"", "images", "mounts", "sandboxes"} {
		if err := os.MkdirAll(filepath.Join(abs, sub), 0o700); err != nil {
			return Dir{}, fmt.Errorf("worker folder: %w", err)
		}
	}
	st, err := os.Stat(abs)
	if err != nil {
		return Dir{}, fmt.Errorf("worker folder: %w", err)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return Dir{}, fmt.Errorf("worker folder %s has mode %04o: sandboxes must not reach it; chmod 0700 it", abs, st.Mode().Perm())
	}
	return Dir{path: abs}, nil
}

// Path returns the folder's absolute path.
func (d Dir) Path() string { return d.path }

// ReaderSocket is where the reader serves NBD.
func (d Dir) ReaderSocket() string { return filepath.Join(d.path, "reader.sock") }

// ReaderControl is where the reader serves its statistics over HTTP.
func (d Dir) ReaderControl() string { return filepath.Join(d.path, "reader.http") }

// SandboxLock is held while a sandbox's folder is made, or dead ones are listed.
func (d Dir) SandboxLock() string { return filepath.Join(d.path, "sandboxes.lock") }

// ReaderLock is held by the reader.
func (d Dir) ReaderLock() string { return filepath.Join(d.path, "reader.lock") }

// ReaderLog is where the reader's log goes.
func (d Dir) ReaderLog() string { return filepath.Join(d.path, "reader.log") }

// KeeperLock is held by the keeper.
func (d Dir) KeeperLock() string { return filepath.Join(d.path, "keeper.lock") }

// KeeperLog is where the keeper's log goes.
func (d Dir) KeeperLog() string { return filepath.Join(d.path, "keeper.log") }

// Mounts has a folder for each mounted image.
func (d Dir) Mounts() string { return filepath.Join(d.path, "mounts") }

// Sandboxes has a folder for each sandbox.
func (d Dir) Sandboxes() string { return filepath.Join(d.path, "sandboxes") }

// Cache is the disk cache's folder.
func (d Dir) Cache() string { return filepath.Join(d.path, "cache") }

// Runs has the records of the last runs.
func (d Dir) Runs() string { return filepath.Join(d.path, "runs") }

// MountDir is the folder of an image's mount.
func (d Dir) MountDir(id chunk.Digest) string { return filepath.Join(d.Mounts(), id.Hex()) }

func (d Dir) imageDir(id chunk.Digest) string { return filepath.Join(d.path, "images", id.Hex()) }

// NoACLDir is MountDir for a mount without POSIX ACLs.
func (d Dir) NoACLDir(id chunk.Digest) string { return d.MountDir(id) + ".noacl" }

// NoTraceMark is the file in a mount's folder that says that a run which must
// leave no trace uses the mount. It goes with the folder.
func NoTraceMark(mountDir string) string { return filepath.Join(mountDir, "notrace") }

// MaxJSON bounds a JSON file of the folder: serials.json has some 200 bytes for
// each name a worker has ever used.
const MaxJSON = 64 << 20

// errDamaged says that a file of the folder cannot be understood.
var errDamaged = errors.New("damaged")

// writeDurable makes path a file with the data.
func writeDurable(path string, data []byte) error {
	return overFolder(path, func() error { return durable.WriteFile(path, data, 0o600) })
}

// writeWhole does not wait for the disk, which would be a part of every cold start
// (docs/decisions/traces.md): what a power cut leaves is found out by verifying.
func writeWhole(path string, data []byte) error {
	return overFolder(path, func() error { return durable.ReplaceFile(path, data, 0o600) })
}

// overFolder writes a file, again when a folder was in its place, which no rename
// replaces: it holds nothing of ours.
func overFolder(path string, write func() error) error {
	err := write()
	if err == nil {
		return nil
	}
	if st, statErr := os.Lstat(path); statErr != nil || !st.IsDir() {
		return err
	}
	if rmErr := os.RemoveAll(path); rmErr != nil {
		return errors.Join(err, rmErr)
	}
	return write()
}

// makeFolder makes a folder, also where something else is in its place.
func makeFolder(path string) error {
	err := os.MkdirAll(path, 0o700)
	if err == nil {
		return nil
	}
	if st, statErr := os.Lstat(path); statErr != nil || st.IsDir() {
		return err
	}
	if rmErr := os.Remove(path); rmErr != nil {
		return errors.Join(err, rmErr)
	}
	return os.MkdirAll(path, 0o700)
}

func writeWholeJSON(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return writeWhole(path, b)
}

// ReadJSON reads a JSON file of the folder. Errors: fs.ErrNotExist.
func ReadJSON(path string, v any) error {
	b, err := ReadBounded(path, MaxJSON)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %w: %w", path, errDamaged, err)
	}
	return nil
}

func logOr(log *slog.Logger) *slog.Logger {
	if log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return log
}
