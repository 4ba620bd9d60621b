package memory

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// GroupConfig says where a sandbox's memory is counted.
type GroupConfig struct {
	// Dir is the folder of the sandbox's control group: in the hierarchy of the memory
	// controller, or the only one.
	Dir string
	// Journal is a file, in the sandbox's folder, that names what of the group is set
	// otherwise while memory is taken. Mend reads it after the worker was killed.
	Journal string
	Proc    string // "" = /proc
}

// Group takes memory from one control group. Its methods may be called at once; one
// reclaim runs at a time.
type Group struct {
	dir     string
	journal string
	proc    string
	v2      bool
	mu      sync.Mutex // held by who changes the group
}

// OpenGroup looks at the group and undoes what a worker that was killed left of a
// reclaim. Errors: fs.ErrNotExist.
func OpenGroup(c GroupConfig) (*Group, error) {
	g := &Group{dir: c.Dir, journal: c.Journal, proc: c.Proc}
	_, err := os.Stat(g.path("memory.usage_in_bytes"))
	if errors.Is(err, fs.ErrNotExist) {
		_, err = os.Stat(g.path("memory.current"))
		g.v2 = true
	}
	if err != nil {
		return nil, fmt.Errorf("memory of a control group: %w", err)
	}
	return g, g.Mend()
}

func (g *Group) path(name string) string { return filepath.Join(g.dir, name) }

// Held reads what the group's processes have in memory.
func (g *Group) Held() (Held, error) {
	raw, err := readBounded(g.path("memory.stat"))
	if err != nil {
		return Held{}, err
	}
	h := parseStat(raw, g.v2)
	if g.v2 {
		if raw, err := readBounded(g.path("memory.swap.current")); err == nil {
			h.Swap, _ = strconv.ParseInt(strings.TrimSpace(raw), 10, 64)
		}
	}
	return h, nil
}

// parseStat reads memory.stat. In version 1 a group's own figures begin without
// "total_", and a sandbox's has no group below it. Both count shmem in the page cache.
func parseStat(raw string, v2 bool) (h Held) {
	names := map[string]*int64{"rss": &h.Anon, "shmem": &h.Shmem, "cache": &h.File, "swap": &h.Swap}
	if v2 {
		names = map[string]*int64{"anon": &h.Anon, "shmem": &h.Shmem, "file": &h.File}
	}
	for line := range strings.Lines(raw) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if to := names[name]; to != nil {
			if n, err := strconv.ParseInt(value, 10, 64); err == nil && n >= 0 {
				*to = n
			}
		}
	}
	h.File = max(0, h.File-h.Shmem)
	return h
}

// leave is what stays when all is taken. The Sentry wakes to use as much.
const leave = 1 << 20

// Reclaim has the kernel put memory of the group's processes into swap: want bytes of
// it, or all when want is 0. It returns how much went, which may be less: when swap is
// full, when the memory is in use, and when ctx ended. Errors: ErrUnsupported where the
// kernel has no way, which Limits says.
func (g *Group) Reclaim(ctx context.Context, want int64) (int64, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	before, err := g.Held()
	if err != nil {
		return 0, err
	}
	freed := func() int64 {
		now, err := g.Held()
		if err != nil {
			return 0
		}
		return max(0, before.Own()-now.Own())
	}
	// Not to the last page: the kernel would look for it among the page cache.
	if most := before.Own() - leave; want <= 0 || want > most {
		want = most
	}
	// Without room in swap the kernel would take page cache, which may be of an image
	// that others use.
	if want = min(want, g.swapLeft()); want <= 0 {
		return 0, nil
	}
	if g.v2 {
		err = g.reclaimV2(ctx, want, freed)
	} else {
		err = g.reclaimV1(ctx, want, freed)
	}
	return freed(), err
}

// swapLeft is how much the group may still put into swap. Its own limit of version 2 is
// lifted while memory is taken; those of the groups above it hold. In version 1 limits
// are of memory and swap together, which a reclaim does not change.
func (g *Group) swapLeft() int64 {
	r, err := Machine{Proc: g.proc}.Read()
	if err != nil {
		return 0
	}
	left := r.SwapFree
	for dir := filepath.Dir(g.dir); g.v2 && dir != filepath.Dir(dir); dir = filepath.Dir(dir) {
		limit, err := readNumber(filepath.Join(dir, "memory.swap.max"))
		if err != nil {
			break // the root has none
		}
		used, err := readNumber(filepath.Join(dir, "memory.swap.current"))
		if err != nil {
			return 0
		}
		left = min(left, limit-used)
	}
	return max(0, left)
}

// arguments of memory.reclaim that keep page cache where it is: of newer kernels first.
var arguments = []string{" swappiness=max", " swappiness=200", ""}

// argument finds the best one that the kernel takes. A request for no bytes is done at
// once, and refused where a word is not known.
func (g *Group) argument() (string, error) {
	var err error
	for _, a := range arguments {
		if err = writeFile(g.path("memory.reclaim"), "0"+a); err == nil {
			return a, nil
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: no memory.reclaim, which is of Linux 5.19: %w", ErrUnsupported, err)
	}
	return "", err
}

func (g *Group) reclaimV2(ctx context.Context, want int64, freed func() int64) (err error) {
	a, err := g.argument()
	if err != nil {
		return err
	}
	// A sandbox that runs may have no swap, so that it is ended instead of slow; one that
	// waits goes there. What is there stays there when the limit is back.
	undo, err := g.change(setting{"memory.swap.max", "max"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, undo()) }()
	// Page cache that went with it is not what was asked for: the rest is asked for again.
	for rest, last := want, int64(0); rest > 0; {
		err := write(ctx, g.path("memory.reclaim"), strconv.FormatInt(rest, 10)+a, func() bool { return freed() >= want })
		if err != nil && !errors.Is(err, unix.EAGAIN) && !errors.Is(err, errEnough) {
			return err
		}
		now := freed()
		if errors.Is(err, errEnough) || now-last < want/64 {
			return nil
		}
		rest, last = want-now, now
	}
	return nil
}

func (g *Group) reclaimV1(ctx context.Context, want int64, freed func() int64) (err error) {
	// With 200 the kernel takes no page cache; kernels before 5.8 know up to 100.
	undo, err := g.change(setting{"memory.swappiness", "200"}, setting{"memory.swappiness", "100"})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, undo()) }()
	// The kernel takes all that it can until it is interrupted.
	err = write(ctx, g.path("memory.force_empty"), "0", func() bool { return freed() >= want })
	if err == nil || errors.Is(err, errEnough) || errors.Is(err, unix.EBUSY) {
		return nil
	}
	if !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EINVAL) {
		return err
	}
	return g.lower(ctx, want, freed)
}

// lowerStep is by how much the limit is lowered at a time: an allocation of the Sentry
// meanwhile has to find as much again.
const lowerStep = 32 << 20

// lower stands in for memory.force_empty: the kernel takes memory until a lower limit
// holds.
func (g *Group) lower(ctx context.Context, want int64, freed func() int64) error {
	for n := int64(0); n < want; n = freed() {
		raw, err := readBounded(g.path("memory.usage_in_bytes"))
		if err != nil {
			return err
		}
		usage, err := strconv.ParseInt(strings.TrimSpace(raw), 10, 64)
		if err != nil {
			return err
		}
		target := max(0, usage-min(want-n, lowerStep))
		undo, err := g.changeBy(func(path, value string) error {
			return write(ctx, path, value, func() bool { return false })
		}, setting{"memory.limit_in_bytes", strconv.FormatInt(target, 10)})
		if errors.Is(err, unix.EBUSY) {
			return nil // no more can go
		}
		if err == nil {
			err = undo()
		}
		if err != nil {
			return err
		}
		if freed() <= n {
			return nil
		}
	}
	return nil
}

func readBounded(path string) (string, error) {
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(bufio.NewReader(f), maxFile))
	return string(b), err
}

// maxFile bounds a file of the kernel's: memory.stat has 2 KiB.
const maxFile = 1 << 20

func writeFile(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	return errors.Join(err, f.Close())
}
