// Package worker is the image path of one machine that runs sandboxes: it
// fetches and verifies images, mounts them through a reader and a shim process,
// and runs commands in them under runsc. It keeps all state in one private
// folder, so that any command can clean up after one that was killed.
package worker

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

// Worker mounts images and runs commands in them on this machine.
type Worker struct {
	Dir           Dir
	ReaderCommand []string     // how to start the reader
	ShimPath      string       // the quarry-shim program
	Runsc         string       // the runsc program, for Run
	ReadAheadKiB  int          // of attached devices; 0 is none
	Log           *slog.Logger // nil = discard
}

func (w *Worker) log() *slog.Logger { return logOr(w.Log) }

func logOr(log *slog.Logger) *slog.Logger {
	if log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return log
}

// Dir is a worker folder. Its layout:
//
//	images/<id>/     statement, config, bootstrap: verified when read, every time;
//	                 origin.json: the store it came from
//	mounts/<id>/     shim.json, fuse/, root/ (the EROFS mount), refs/
//	mounts/<id>.lock held while the mount of that image changes
//	mounts/<id>.noacl, mounts/<id>.noacl.lock
//	                 the same for sandboxes of an image with POSIX ACLs
//	sandboxes/<sid>/ bundle, runsc state, upper layer of one sandbox; owner is
//	                 locked by the process that runs it
//	reader.sock      the reader's NBD socket; reader.http its statistics
//	serials.json     highest serial seen of each name
//	latest.json      which image each reference was the last time, a hint
type Dir struct{ path string }

// OpenDir makes the folder when missing, with mode 0700, and returns it. An
// existing folder must belong to this user and be closed to others.
func OpenDir(path string) (Dir, error) {
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

// sandboxLock is held while a sandbox's folder is made, or dead ones are listed.
func (d Dir) sandboxLock() string { return filepath.Join(d.path, "sandboxes.lock") }

func (d Dir) imageDir(id chunk.Digest) string { return filepath.Join(d.path, "images", id.Hex()) }
func (d Dir) mountDir(id chunk.Digest) string { return filepath.Join(d.path, "mounts", id.Hex()) }

// noACLDir is mountDir for a mount without POSIX ACLs.
func (d Dir) noACLDir(id chunk.Digest) string { return d.mountDir(id) + ".noacl" }

// maxJSON bounds a JSON file of the folder: serials.json has some 200 bytes for
// each name a worker has ever used.
const maxJSON = 64 << 20

// errDamaged says that a file of the folder cannot be understood.
var errDamaged = errors.New("damaged")

func writeJSON(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return durable.WriteFile(path, b, 0o600)
}

func readJSON(path string, v any) error {
	b, err := readBounded(path, maxJSON)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, v); err != nil {
		return fmt.Errorf("%s: %w: %w", path, errDamaged, err)
	}
	return nil
}
