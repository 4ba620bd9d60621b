package cgroup_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/internal/need"
	"quarry/worker/cgroup"
)

func openTree(t *testing.T) *cgroup.Tree {
	t.Helper()
	need.Root(t)
	tree, err := cgroup.Open(cgroup.Config{Parent: fmt.Sprintf("/quarrytest/%d-%d", os.Getpid(), time.Now().UnixNano())})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tree.Remove(); err != nil {
			t.Error(err)
		}
		// Other tests may have groups below it.
		parents, _ := filepath.Glob("/sys/fs/cgroup/*/quarrytest")
		for _, p := range append(parents, "/sys/fs/cgroup/quarrytest") {
			_ = syscall.Rmdir(p)
		}
	})
	return tree
}

func makeGroup(t *testing.T, tree *cgroup.Tree, id string, l cgroup.Limits) *cgroup.Group {
	t.Helper()
	g, err := tree.Make(id, l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := errors.Join(g.Kill(ctx), g.Remove(ctx)); err != nil {
			t.Error(err)
		}
	})
	return g
}

// inGroup starts a shell that has joined the group before it runs the script.
func inGroup(t *testing.T, tree *cgroup.Tree, g *cgroup.Group, script string) *exec.Cmd {
	t.Helper()
	join := "for d in /sys/fs/cgroup" + g.Path() + " /sys/fs/cgroup/*" + g.Path() + `; do [ -d "$d" ] && { echo $$ > "$d/cgroup.procs" || exit 9; }; done; `
	cmd := exec.Command("/bin/sh", "-c", join+script)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal(what)
		}
	}
}

func TestWhatIsInAGroupIsCountedKilledAndRemoved(t *testing.T) {
	tree := openTree(t)
	g := makeGroup(t, tree, "one", cgroup.Limits{Memory: 64 << 20, PIDs: 20, CPUMilli: 1500})
	if names, err := tree.List(); err != nil || !slices.Equal(names, []string{"one"}) {
		t.Errorf("List: got %q, %v", names, err)
	}
	cmd := inGroup(t, tree, g, "sleep 1000 & sleep 1000 & wait")
	eventually(t, "the processes are not in the group", func() bool {
		pids, err := g.PIDs()
		return err == nil && len(pids) == 3
	})
	f, err := g.Read()
	if err != nil {
		t.Fatal(err)
	}
	if f.MemoryLimit != 64<<20 || f.Memory <= 0 || f.MemoryPeak < f.Memory/2 || f.PIDs != 3 || f.CPU <= 0 || f.OOMKills != 0 || f.PIDsRefused != 0 {
		t.Errorf("Read: got %+v", f)
	}
	short, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if err := g.Remove(short); err == nil {
		t.Error("a group with processes was removed")
	}
	if err := g.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	for range 2 {
		if err := g.Remove(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := g.Read(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Read of a group that is gone: got %v", err)
	}
	if pids, err := g.PIDs(); err != nil || len(pids) != 0 {
		t.Errorf("PIDs of a group that is gone: got %v, %v", pids, err)
	}
	if err := g.Kill(t.Context()); err != nil {
		t.Errorf("Kill of a group that is gone: %v", err)
	}
}

func TestForksThatTheLimitRefusesAreCounted(t *testing.T) {
	tree := openTree(t)
	g := makeGroup(t, tree, "pids", cgroup.Limits{PIDs: 4})
	cmd := inGroup(t, tree, g, "for i in 1 2 3 4 5 6 7 8; do sleep 1000 & done; wait")
	defer cmd.Wait()
	eventually(t, "no fork was refused", func() bool {
		f, err := g.Read()
		return err == nil && f.PIDsRefused > 0 && f.PIDs <= 4
	})
	if err := g.Kill(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestProcessesThatTheKernelKillsForMemoryAreCounted(t *testing.T) {
	tree := openTree(t)
	g := makeGroup(t, tree, "oom", cgroup.Limits{Memory: 16 << 20})
	told := make(chan error, 1)
	go func() { told <- g.AwaitOOM(t.Context()) }()
	cmd := inGroup(t, tree, g, `x=0123456789; while :; do x=$x$x; done`)
	cmd.Wait()
	if !tree.V2() {
		if err := <-told; err != nil {
			t.Error(err)
		}
		if err := g.AwaitOOM(t.Context()); err != nil { // it has happened before
			t.Error(err)
		}
	}
	f, err := g.Read()
	if err != nil || f.OOMKills == 0 || f.LimitHits == 0 || f.MemoryPeak < 15<<20 {
		t.Errorf("Read: got %+v, %v", f, err)
	}
}

func TestTheWaitForMemoryEndsWithItsContext(t *testing.T) {
	tree := openTree(t)
	g := makeGroup(t, tree, "quiet", cgroup.Limits{Memory: 16 << 20})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if err := g.AwaitOOM(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
}

func TestAGroupBelowAGroupIsRemovedToo(t *testing.T) {
	tree := openTree(t)
	g := makeGroup(t, tree, "outer", cgroup.Limits{})
	for _, pattern := range []string{"/sys/fs/cgroup" + g.Path(), "/sys/fs/cgroup/pids" + g.Path()} {
		if _, err := os.Stat(pattern); err == nil {
			if err := os.MkdirAll(filepath.Join(pattern, "a/b"), 0o755); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := g.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if names, err := tree.List(); err != nil || len(names) != 0 {
		t.Errorf("List: got %q, %v", names, err)
	}
}

func TestANameThatIsNoneIsRefused(t *testing.T) {
	tree := openTree(t)
	for _, id := range []string{"", ".", "..", "a/b", ".hidden"} {
		if _, err := tree.Make(id, cgroup.Limits{}); err == nil {
			t.Errorf("%q was taken", id)
		}
	}
}

func TestNoParentIsRefused(t *testing.T) {
	for _, parent := range []string{"", "/", "/.."} {
		if _, err := cgroup.Open(cgroup.Config{Parent: parent}); !errors.Is(err, cgroup.ErrUnsupported) {
			t.Errorf("%q: got %v", parent, err)
		}
	}
}

func TestAMachineWithoutControllersIsSaid(t *testing.T) {
	_, err := cgroup.Open(cgroup.Config{Root: t.TempDir(), Parent: "/quarry"})
	if !errors.Is(err, cgroup.ErrUnsupported) || !strings.Contains(err.Error(), "memory") {
		t.Errorf("got %v", err)
	}
}

// A group that others are below limits the memory of all of them, and leaves swap to them.
func TestASharedGroupLimitsThoseBelow(t *testing.T) {
	tree := openTree(t)
	g := makeGroup(t, tree, "shared", cgroup.Limits{Memory: 64 << 20, Shared: true})
	below, err := cgroup.Open(cgroup.Config{Parent: g.Path()})
	if err != nil {
		t.Fatal(err)
	}
	one := makeGroup(t, below, "one", cgroup.Limits{Memory: 16 << 20})
	cmd := exec.Command("/bin/sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait() // the group's end is its own
	if err := one.Join(cmd.Process.Pid); err != nil {
		t.Error(err)
	}
	for _, group := range []*cgroup.Group{g, one} {
		if pids, err := group.PIDs(); err != nil || !slices.Equal(pids, []int{cmd.Process.Pid}) {
			t.Errorf("%s has %v, %v", group.Path(), pids, err)
		}
	}
	if f, err := g.Read(); err != nil || f.MemoryLimit != 64<<20 {
		t.Errorf("got %+v, %v", f, err)
	}
	for _, name := range []string{"memory.swap.max", "memory.memsw.limit_in_bytes"} {
		raw, err := os.ReadFile(filepath.Join(g.MemoryDir(), name))
		if n, _ := strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64); err == nil && strings.TrimSpace(string(raw)) != "max" && n < 1<<50 {
			t.Errorf("%s is %s", name, raw)
		}
	}
	if err := one.Kill(t.Context()); err != nil {
		t.Error(err)
	}
}
