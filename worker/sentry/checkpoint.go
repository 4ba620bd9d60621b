package sentry

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"quarry/internal/fdpass"
)

// Names that runsc restore looks for in a checkpoint's folder.
const (
	stateFile    = "checkpoint.img"
	pagesMeta    = "pages_meta.img"
	pagesFile    = "pages.img"
	uncompressed = "none" // compressed ones take ten times as long (docs/decisions/hibernate.md)
)

// Checkpoint writes a paused guest into an empty folder, from which the same runsc
// restores it. What it returned without an error is durable. The guest stays paused in
// either case: who keeps the checkpoint ends the Sentry, who does not resumes it. A
// restored guest runs: a Resume would end its Sentry. What Doomed names does not live on.
func (c *Client) Checkpoint(ctx context.Context, dir string) (err error) {
	var files []*os.File
	defer func() { fdpass.Close(files) }()
	for _, name := range []string{stateFile, pagesMeta, pagesFile} {
		f, err := create(filepath.Join(dir, name), name == pagesFile)
		if err != nil {
			return fmt.Errorf("checkpoint: %w", err)
		}
		files = append(files, f)
	}
	arg := struct {
		Metadata      map[string]string `json:"metadata"`
		HavePagesFile bool              `json:"have_pages_file"`
		Resume        bool
	}{map[string]string{"compression": uncompressed}, true, true}
	if _, err := c.call(ctx, "containerManager.Checkpoint", &arg, nil, files...); err != nil {
		return err
	}
	for _, f := range files {
		if err := f.Sync(); err != nil {
			return fmt.Errorf("checkpoint: %w", err)
		}
	}
	d, err := os.Open(dir)
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	return errors.Join(d.Sync(), d.Close())
}

// create makes a file that is not there, past the page cache where that can be: the
// cache would grow by the guest's size when memory is what is wanted.
func create(path string, direct bool) (*os.File, error) {
	const flags = os.O_RDWR | os.O_CREATE | os.O_EXCL
	if !direct {
		return os.OpenFile(path, flags, 0o600)
	}
	f, err := os.OpenFile(path, flags|unix.O_DIRECT, 0o600)
	if errors.Is(err, unix.EINVAL) { // the file system has none; it has made the file
		return os.OpenFile(path, os.O_RDWR, 0o600)
	}
	return f, err
}

// Doomed lists the processes that a restore would kill, or might: those that an exec
// started, and all below them. execs says that there have been execs: a process whose
// parent is the first one may then be what an exec has left behind, which cannot be
// told from the first one's own.
func Doomed(list []Process, execs bool) []Process {
	parents := make(map[int]int, len(list))
	for _, p := range list {
		parents[p.PID] = p.PPID
	}
	var out []Process
	for _, p := range list {
		root, steps := p.PID, 0
		for steps <= len(list) { // the list is the Sentry's: it may go in a circle
			parent, there := parents[root]
			if root == 1 || !there || parent == 0 {
				break
			}
			root = parent
			steps++
		}
		if root != 1 || execs && p.PID != 1 {
			out = append(out, p)
		}
	}
	return out
}
