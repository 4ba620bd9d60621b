package e2e_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"quarry/internal/need"
)

// TestBenchAgents has a few small agents measured, and then interrupts that: nothing is
// left of either.
func TestBenchAgents(t *testing.T) {
	need.Root(t)
	need.Tool(t, "runsc")
	dir := need.ShortDir(t)
	bench := func(more ...string) *exec.Cmd {
		args := append([]string{"bench", "agents", "--agents", "2", "--agent-memory", "16M", "--memory", "256M", "--swap", "none", "--wait-scale", "0.02", "--temp", dir}, more...)
		return exec.Command(filepath.Join(os.Getenv("QUARRY_BIN"), "quarry"), args...)
	}
	leftNow := func() []string {
		left, _ := filepath.Glob(filepath.Join(dir, "quarry-agents-*"))
		groups, _ := filepath.Glob("/sys/fs/cgroup/*/quarry-agents-*")
		for _, g := range groups {
			// Others on this machine may measure, too.
			if procs, _ := filepath.Glob(filepath.Join(g, "*", "cgroup.procs")); len(procs) == 0 {
				left = append(left, g)
			}
		}
		procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
		for _, p := range procs {
			if raw, err := os.ReadFile(p); err == nil && bytes.Contains(raw, []byte(dir+"/quarry-agents-")) {
				left = append(left, string(raw))
			}
		}
		return append(left, mountsBelow(dir)...)
	}
	nothingLeft := func() {
		t.Helper()
		if left := stays(leftNow); len(left) > 0 {
			t.Errorf("left: %q", left)
		}
	}

	out, svg := filepath.Join(dir, "out.json"), filepath.Join(dir, "out.svg")
	type arm struct {
		Arm      string
		Steps    int
		Live     int `json:"live_sandboxes"`
		Checked  int
		Pauses   int
		Failures map[string]int
	}
	stood := func(a arm) bool { return a.Steps == 0 || a.Pauses == 0 }
	// A busy machine needs longer for a step, and to pause before the answer is there.
	for n, more := range [][]string{{"--duration", "1s"}, {"--duration", "1m", "--wait-scale", "0.2"}} {
		said, err := bench(append(more, "--arms", "paused,hibernate", "--json", out, "--svg", svg)...).CombinedOutput()
		if err != nil {
			t.Fatalf("%v: %s", err, said)
		}
		var rep struct{ Arms []arm }
		raw, err := os.ReadFile(out)
		check(t, err)
		check(t, json.Unmarshal(raw, &rep))
		if len(rep.Arms) != 2 {
			t.Fatalf("%s", raw)
		}
		for _, a := range rep.Arms {
			if n > 0 && stood(a) || a.Live != 2 || a.Checked != 2 || len(a.Failures) > 0 {
				t.Errorf("%+v\n%s", a, said)
			}
		}
		if !slices.ContainsFunc(rep.Arms, stood) {
			break
		}
	}
	if raw, err := os.ReadFile(svg); err != nil || !bytes.HasPrefix(raw, []byte("<svg ")) {
		t.Errorf("the plot: %.40q, %v", raw, err)
	}
	nothingLeft()

	cmd := bench("--arms", "paused", "--duration", "1h")
	stderr, err := cmd.StderrPipe()
	check(t, err)
	check(t, cmd.Start())
	for lines := bufio.NewScanner(stderr); lines.Scan(); {
		if strings.Contains(lines.Text(), "have begun") {
			check(t, cmd.Process.Signal(syscall.SIGINT))
		}
	}
	if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 1 {
		t.Errorf("interrupted, it ends with %v", err)
	}
	nothingLeft()
}
