package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// v2Controllers are those that a sandbox's group has. cpuset is what runsc counts
// processors with; without it, it takes the machine's.
var v2Controllers = []string{"memory", "pids", "cpu"}

// openV2 makes the tree's folder and hands the controllers down to it.
func (t *Tree) openV2(root string) error {
	dir := root
	for name := range strings.SplitSeq(strings.Trim(t.parent, "/"), "/") {
		if err := enable(dir); err != nil {
			return err
		}
		dir = filepath.Join(dir, name)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
	}
	if err := enable(dir); err != nil {
		return err
	}
	t.dirs = []hierarchy{{dir: dir}}
	return nil
}

// enable hands the controllers of a group down to those in it.
func enable(dir string) error {
	path := filepath.Join(dir, "cgroup.subtree_control")
	have, err := readBounded(path)
	if err != nil {
		return err
	}
	want := missing(have, append(v2Controllers, "cpuset", "io"))
	if err := write(path, want); err == nil {
		return nil
	}
	// One controller that is not there fails all of them.
	for _, c := range want {
		err := write(path, []string{c})
		switch {
		case err == nil || !isNeeded(c):
		case errors.Is(err, unix.EBUSY):
			return fmt.Errorf("%s has processes of its own, so its groups cannot have limits: name another parent: %w", dir, err)
		default:
			return fmt.Errorf("give the %s controller to the groups of %s: %w", c, dir, err)
		}
	}
	return nil
}

func write(path string, controllers []string) error {
	if len(controllers) == 0 {
		return nil
	}
	return writeValue(path, "+"+strings.Join(controllers, " +"))
}

func isNeeded(controller string) bool {
	return len(missing(controller, v2Controllers)) < len(v2Controllers)
}

func missing(have string, want []string) (out []string) {
	fields := map[string]bool{}
	for _, f := range strings.Fields(have) {
		fields[f] = true
	}
	for _, w := range want {
		if !fields[w] {
			out = append(out, w)
		}
	}
	return out
}

// makeV2 makes the group. runsc sets no limit of a group that is there already.
func (g *Group) makeV2(l Limits) error {
	dir := g.dir("")
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	if l.Memory > 0 {
		if err := limitUnlessZero(filepath.Join(dir, "memory.max"), l.Memory); err != nil {
			return err
		}
		// A guest that swaps would be slow instead of ended. Where the kernel counts no
		// swap there is no such file.
		if err := writeUnlessShared(l, filepath.Join(dir, "memory.swap.max"), "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	// The Sentry and its guests die together: one without the other is of no use.
	if err := writeUnlessShared(l, filepath.Join(dir, "memory.oom.group"), "1"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := limitUnlessZero(filepath.Join(dir, "pids.max"), l.PIDs); err != nil {
		return err
	}
	if l.CPUMilli > 0 {
		return writeValue(filepath.Join(dir, "cpu.max"), strconv.FormatInt(quota(l.CPUMilli), 10)+" "+strconv.Itoa(cpuPeriod))
	}
	return nil
}

func writeUnlessShared(l Limits, path, value string) error {
	if l.Shared {
		return nil
	}
	return writeValue(path, value)
}

func (g *Group) readV2() (f Figures, err error) {
	dir := g.dir("")
	if _, err := os.Stat(dir); err != nil {
		return Figures{}, fmt.Errorf("read control group %s: %w", g.id, err)
	}
	file := func(name string) func() (int64, error) {
		return func() (int64, error) { return optional(readInt(filepath.Join(dir, name))) }
	}
	key := func(name, key string) func() (int64, error) {
		return func() (int64, error) { return optional(readKey(filepath.Join(dir, name), key)) }
	}
	var micros int64
	for _, v := range []struct {
		to   *int64
		read func() (int64, error)
	}{
		{&f.Memory, file("memory.current")}, {&f.MemoryLimit, file("memory.max")}, {&f.MemoryPeak, file("memory.peak")},
		{&f.OOMKills, key("memory.events", "oom_kill")}, {&f.LimitHits, key("memory.events", "oom")}, {&f.PIDs, file("pids.current")},
		{&f.PIDsRefused, key("pids.events", "max")}, {&micros, key("cpu.stat", "usage_usec")},
	} {
		if *v.to, err = v.read(); err != nil {
			return Figures{}, fmt.Errorf("read control group %s: %w", g.id, err)
		}
	}
	f.CPU = time.Duration(micros) * time.Microsecond
	return f, nil
}
