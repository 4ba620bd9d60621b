// Package cgroup keeps one control group a sandbox: it makes them with their limits
// before a process joins, reads what they have counted, and ends what is in them.
// It speaks version 2, and version 1 where the machine has that.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
)

// Root is where machines mount their control groups, and where runsc looks.
const Root = "/sys/fs/cgroup"

// ErrUnsupported says that this machine's control groups cannot hold sandboxes.
var ErrUnsupported = errors.New("control groups cannot be used")

// Config says where the groups are.
type Config struct {
	Root   string // "" = Root
	Parent string // the folder of all groups below Root, such as /quarry/<worker>
}

// Tree is the parent of a worker's groups. Its methods may be called at once from
// any number of goroutines.
type Tree struct {
	parent string
	dirs   []hierarchy
	v2     bool
}

// hierarchy is one mounted hierarchy: the only one of version 2, or one of version 1.
type hierarchy struct {
	controller string // "" in version 2
	dir        string // the tree's folder in it
}

// Limits are a group's. Zero is none.
type Limits struct {
	Memory   int64 // bytes; swap is not given on top of it
	PIDs     int64 // processes and threads of the host
	CPUMilli int64 // thousandths of a processor
	// Shared says that the group is the parent of others: swap is given on top of Memory,
	// and when there is no memory left, one of those below ends and not all.
	Shared bool
}

// Figures are what a group has counted.
type Figures struct {
	Memory      int64 // bytes now
	MemoryLimit int64 // 0 is none
	MemoryPeak  int64 // bytes, 0 where the kernel does not tell
	CPU         time.Duration
	PIDs        int64
	PIDsRefused int64 // forks that the limit refused
	OOMKills    int64 // processes that the kernel has killed for want of memory
	LimitHits   int64 // how often the memory limit was reached and something had to give
}

// IsV2 reports whether root is the unified hierarchy alone. A machine that has both
// counts as version 1, as for runsc.
func IsV2(root string) bool {
	var st unix.Statfs_t
	return unix.Statfs(root, &st) == nil && st.Type == unix.CGROUP2_SUPER_MAGIC
}

// Open makes the parent of the groups. Errors: ErrUnsupported.
func Open(c Config) (*Tree, error) {
	root := c.Root
	if root == "" {
		root = Root
	}
	parent := filepath.Clean("/" + c.Parent)
	if parent == "/" {
		return nil, fmt.Errorf("%w: the groups need a parent", ErrUnsupported)
	}
	t := &Tree{parent: parent, v2: IsV2(root)}
	var err error
	if t.v2 {
		err = t.openV2(root)
	} else {
		err = t.openV1(root)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnsupported, err)
	}
	return t, nil
}

// V2 reports whether the groups are of version 2.
func (t *Tree) V2() bool { return t.v2 }

// MemoryDir is the folder of the machine where the memory of all groups is counted.
func (t *Tree) MemoryDir() string {
	for _, h := range t.dirs {
		if h.controller == "memory" || t.v2 {
			return h.dir
		}
	}
	return ""
}

// Make makes a group with its limits, which nothing has joined yet.
func (t *Tree) Make(id string, l Limits) (*Group, error) {
	if id == "" || id != filepath.Base(id) || strings.HasPrefix(id, ".") {
		return nil, fmt.Errorf("control group %q: not a name", id)
	}
	g := t.Group(id)
	var err error
	if t.v2 {
		err = g.makeV2(l)
	} else {
		err = g.makeV1(l)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make control group %s: %w", id, err), g.removeDirs())
	}
	return g, nil
}

// Group returns the group of that name, whether it is there or not.
func (t *Tree) Group(id string) *Group { return &Group{t: t, id: id} }

// List names the groups that are there.
func (t *Tree) List() ([]string, error) {
	names := map[string]bool{}
	for _, h := range t.dirs {
		entries, err := os.ReadDir(h.dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if e.IsDir() {
				names[e.Name()] = true
			}
		}
	}
	out := make([]string, 0, len(names))
	for n := range names {
		out = append(out, n)
	}
	slices.Sort(out)
	return out, nil
}

// Remove removes the parent, when it has no groups.
func (t *Tree) Remove() error {
	var errs []error
	for _, h := range t.dirs {
		if err := os.Remove(h.dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// Group is the control group of one sandbox.
type Group struct {
	t  *Tree
	id string
}

// Path is the group below the mount point, which runsc takes as cgroupsPath.
func (g *Group) Path() string { return filepath.Join(g.t.parent, g.id) }

// MemoryDir is the folder of the machine where the group's memory is counted.
func (g *Group) MemoryDir() string { return g.dir("memory") }

// dir is the group's folder in the hierarchy of a controller.
func (g *Group) dir(controller string) string {
	for _, h := range g.t.dirs {
		if h.controller == controller || g.t.v2 {
			return filepath.Join(h.dir, g.id)
		}
	}
	return ""
}

// Read returns what the group has counted. Errors: fs.ErrNotExist when it is gone.
func (g *Group) Read() (Figures, error) {
	if g.t.v2 {
		return g.readV2()
	}
	return g.readV1()
}

// PIDs lists the processes in the group and below it, in any hierarchy.
func (g *Group) PIDs() ([]int, error) {
	seen := map[int]bool{}
	for _, h := range g.t.dirs {
		err := filepath.WalkDir(filepath.Join(h.dir, g.id), func(path string, e fs.DirEntry, err error) error {
			if errors.Is(err, fs.ErrNotExist) {
				return nil
			}
			if err != nil || !e.IsDir() {
				return err
			}
			pids, err := readPIDs(filepath.Join(path, "cgroup.procs"))
			for _, p := range pids {
				seen[p] = true
			}
			return err
		})
		if err != nil {
			return nil, err
		}
	}
	out := make([]int, 0, len(seen))
	for p := range seen {
		out = append(out, p)
	}
	slices.Sort(out)
	return out, nil
}

// Join moves a process into the group, with its threads.
func (g *Group) Join(pid int) error {
	for _, h := range g.t.dirs {
		if err := writeValue(filepath.Join(h.dir, g.id, "cgroup.procs"), fmt.Sprint(pid)); err != nil {
			return fmt.Errorf("move process %d into control group %s: %w", pid, g.id, err)
		}
	}
	return nil
}

// endPoll is how often a group is looked at whose processes are ending.
const endPoll = 5 * time.Millisecond

// Kill kills every process in the group until there is none, or ctx ends.
func (g *Group) Kill(ctx context.Context) error {
	for {
		pids, err := g.PIDs()
		if err != nil {
			return fmt.Errorf("kill control group %s: %w", g.id, err)
		}
		if len(pids) == 0 {
			return nil
		}
		if !g.killAll() {
			for _, pid := range pids {
				g.killOne(pid)
			}
		}
		if !sleep(ctx, endPoll) {
			return fmt.Errorf("kill control group %s: %d processes do not end: %w", g.id, len(pids), context.Cause(ctx))
		}
	}
}

// killAll has the kernel do it, which also catches who forks meanwhile; false where
// the kernel cannot.
func (g *Group) killAll() bool {
	return g.t.v2 && writeValue(filepath.Join(g.dir(""), "cgroup.kill"), "1") == nil
}

// killOne kills a process if it still is the group's: its number may be another's by
// now, so it is held by a descriptor before that is looked at.
func (g *Group) killOne(pid int) {
	p, err := proc.Open(pid)
	if err != nil {
		return
	}
	defer p.Close()
	raw, err := readBounded(filepath.Join("/proc", fmt.Sprint(pid), "cgroup"))
	if err != nil || !mentions(raw, g.Path()) {
		return
	}
	p.Signal(unix.SIGKILL)
}

// mentions reports whether a process's /proc/<pid>/cgroup says that it is in the
// group, or below it. The path there is relative to the reader's root, so its end
// is what counts.
func mentions(raw, path string) bool {
	for line := range strings.Lines(raw) {
		parts := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(parts) == 3 && strings.Contains(parts[2]+"/", path+"/") {
			return true
		}
	}
	return false
}

// Remove removes a group that has no process, with what was made below it; it is
// tried until ctx ends, as the kernel takes a moment to let go of what has ended. One
// that is not there is removed already.
func (g *Group) Remove(ctx context.Context) error {
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		err := g.removeDirs()
		if err == nil {
			return nil
		}
		if !errors.Is(err, syscall.EBUSY) || !sleep(ctx, pause) {
			return fmt.Errorf("remove control group %s: %w", g.id, err)
		}
	}
}

func (g *Group) removeDirs() error {
	var errs []error
	for _, h := range g.t.dirs {
		if err := removeTree(filepath.Join(h.dir, g.id), 0); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// maxDepth bounds the groups below a sandbox's: runsc makes none, and a guest cannot.
const maxDepth = 8

// removeTree removes a group and those below it: files of control groups cannot be
// removed, so that os.RemoveAll does not do.
func removeTree(dir string, depth int) error {
	err := unix.Rmdir(dir)
	if err == nil || errors.Is(err, fs.ErrNotExist) || depth == maxDepth {
		return err
	}
	entries, readErr := os.ReadDir(dir)
	if readErr != nil {
		return readErr
	}
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if err := removeTree(filepath.Join(dir, e.Name()), depth+1); err != nil {
			return err
		}
	}
	if err := unix.Rmdir(dir); err != nil {
		return &os.PathError{Op: "rmdir", Path: dir, Err: err}
	}
	return nil
}

// sleep reports whether it was not ended by ctx.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// maxFile bounds a file of a control group: pids of 32768 processes are 200 KiB.
const maxFile = 4 << 20

func readBounded(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxFile))
	if errors.Is(err, unix.ENODEV) { // the group was removed while it was open
		err = fmt.Errorf("%s: %w", path, fs.ErrNotExist)
	}
	return string(b), err
}

func writeValue(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
