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

// The controllers of version 1 that runsc puts a sandbox into where they are
// mounted. It would make what is missing and leave it behind when it is killed, so
// all are made here. Only the first three limit anything.
var v1Controllers = []string{
	"memory", "cpu", "pids",
	"cpuset", "cpuacct", "blkio", "devices", "freezer", "hugetlb", "net_cls", "net_prio", "perf_event", "rdma", "systemd",
}

// v1Needed are those without which there are no limits.
const v1Needed = 3

func (t *Tree) openV1(root string) error {
	for i, c := range v1Controllers {
		mounted := filepath.Join(root, c)
		var st unix.Statfs_t
		if err := unix.Statfs(mounted, &st); err != nil || st.Type != unix.CGROUP_SUPER_MAGIC {
			if i < v1Needed {
				return fmt.Errorf("the %s controller of version 1 is not mounted on %s", c, mounted)
			}
			continue
		}
		h := hierarchy{controller: c, dir: filepath.Join(mounted, t.parent)}
		if err := os.MkdirAll(h.dir, 0o755); err != nil {
			return err
		}
		t.dirs = append(t.dirs, h)
		if c == "cpuset" {
			if err := fillCPUSets(mounted, t.parent); err != nil {
				return err
			}
		}
	}
	return nil
}

// fillCPUSets gives every group down to path the processors and memory nodes of the
// one above it: nothing can join a group that has none.
func fillCPUSets(mounted, path string) error {
	above := mounted
	for name := range strings.SplitSeq(strings.Trim(path, "/"), "/") {
		dir := filepath.Join(above, name)
		if err := copyCPUSet(above, dir); err != nil {
			return err
		}
		above = dir
	}
	return nil
}

func copyCPUSet(from, to string) error {
	for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
		have, err := readBounded(filepath.Join(to, file))
		if err != nil {
			return err
		}
		if strings.TrimSpace(have) != "" {
			continue
		}
		value, err := readBounded(filepath.Join(from, file))
		if err != nil {
			return err
		}
		if err := writeValue(filepath.Join(to, file), strings.TrimSpace(value)); err != nil {
			return err
		}
	}
	return nil
}

// cpuPeriod is the time within which a quota of processor time is given, the
// kernel's default, in microseconds.
const cpuPeriod = 100_000

// minQuota is the least that the kernel takes, in microseconds.
const minQuota = 1000

func quota(milli int64) int64 { return max(milli*cpuPeriod/1000, minQuota) }

func (g *Group) makeV1(l Limits) error {
	for _, h := range g.t.dirs {
		dir := filepath.Join(h.dir, g.id)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return err
		}
		var err error
		switch h.controller {
		case "cpuset":
			err = copyCPUSet(h.dir, dir)
		case "memory":
			err = limitMemoryV1(dir, l)
		case "pids":
			err = limitUnlessZero(filepath.Join(dir, "pids.max"), l.PIDs)
		case "cpu":
			if l.CPUMilli > 0 {
				err = errors.Join(writeValue(filepath.Join(dir, "cpu.cfs_period_us"), strconv.Itoa(cpuPeriod)),
					limitUnlessZero(filepath.Join(dir, "cpu.cfs_quota_us"), quota(l.CPUMilli)))
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func limitUnlessZero(path string, n int64) error {
	if n <= 0 {
		return nil
	}
	return writeValue(path, strconv.FormatInt(n, 10))
}

// limitMemoryV1 limits memory, and memory with swap to the same where the kernel
// counts swap: a guest that swaps would be slow instead of ended. A shared group's swap
// is left to those below.
func limitMemoryV1(dir string, l Limits) error {
	if err := limitUnlessZero(filepath.Join(dir, "memory.limit_in_bytes"), l.Memory); err != nil || l.Shared {
		return err
	}
	err := limitUnlessZero(filepath.Join(dir, "memory.memsw.limit_in_bytes"), l.Memory)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func (g *Group) readV1() (f Figures, err error) {
	mem, pids := g.dir("memory"), g.dir("pids")
	var cpu, swap int64
	for _, v := range []struct {
		to   *int64
		read func() (int64, error)
	}{
		{&f.Memory, func() (int64, error) { return readInt(filepath.Join(mem, "memory.usage_in_bytes")) }},
		{&f.MemoryLimit, func() (int64, error) { return readInt(filepath.Join(mem, "memory.limit_in_bytes")) }},
		{&f.MemoryPeak, func() (int64, error) { return readInt(filepath.Join(mem, "memory.max_usage_in_bytes")) }},
		{&f.OOMKills, func() (int64, error) { return readKey(filepath.Join(mem, "memory.oom_control"), "oom_kill") }},
		{&f.LimitHits, func() (int64, error) { return readInt(filepath.Join(mem, "memory.failcnt")) }},
		{&swap, func() (int64, error) { return optional(readInt(filepath.Join(mem, "memory.memsw.failcnt"))) }},
		{&f.PIDs, func() (int64, error) { return readInt(filepath.Join(pids, "pids.current")) }},
		{&f.PIDsRefused, func() (int64, error) { return optional(readKey(filepath.Join(pids, "pids.events"), "max")) }},
		{&cpu, func() (int64, error) {
			return optional(readInt(filepath.Join(g.dir("cpuacct"), "cpuacct.usage")))
		}},
	} {
		if *v.to, err = v.read(); err != nil {
			return Figures{}, fmt.Errorf("read control group %s: %w", g.id, err)
		}
	}
	f.LimitHits += swap
	if f.LimitHits == 0 && f.MemoryLimit > 0 && f.MemoryPeak >= f.MemoryLimit {
		f.LimitHits = 1 // newer kernels do not count it any more
	}
	f.CPU = time.Duration(cpu)
	return f, nil
}
