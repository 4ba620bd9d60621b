package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"quarry/internal/agentbench"
)

const (
	// maxWakeMillis is what the 95th of 100 wakes of the arm that reclaims may take, or
	// maxWakeShare of what it takes to restore, whichever is more.
	maxWakeMillis = 130
	maxWakeShare  = 0.01
)

// measureAgents runs the short form of quarry bench agents: every arm, with half as much
// again wanted as there is.
func measureAgents(ctx context.Context, b *bench) (err error) {
	swap, unlock, err := swapOfTests(b.lab.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	out := b.lab.Path("agents.json")
	args := []string{"bench", "agents", "--memory", "256M", "--agent-memory", "48M", "--demand", "1.5", "--wait-scale", "0.1", "--duration", "6s",
		"--swap", swap, "--temp", b.lab.Dir, "--json", out}
	if dir := os.Getenv("QUARRY_ARTIFACTS"); dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		args = append(args, "--svg", filepath.Join(dir, "agents.svg"))
	}
	table, err := b.lab.Quarry(ctx, args...)
	for line := range strings.Lines(table) {
		fmt.Print("     ", line)
	}
	if err != nil {
		return err
	}
	raw, err := os.ReadFile(out)
	if err != nil {
		return err
	}
	var rep agentbench.Report
	if err := json.Unmarshal(raw, &rep); err != nil {
		return err
	}
	return b.judgeAgents(rep)
}

// judgeAgents fails when an agent was lost or saw a wrong byte, however slow the machine
// is, and judges how soon they ran on.
func (b *bench) judgeAgents(rep agentbench.Report) error {
	p95 := map[agentbench.Arm]float64{}
	var errs []error
	for _, r := range rep.Results {
		p95[r.Arm] = r.P95
		if r.WrongPages > 0 {
			errs = append(errs, fmt.Errorf("arm %s: %d pages had wrong bytes", r.Arm, r.WrongPages))
		}
		if r.Arm == agentbench.ArmReclaim && (r.Live < rep.Agents || r.Failed() > 0 || r.Checked < rep.Agents || r.Steps == 0) {
			errs = append(errs, fmt.Errorf("arm %s: %d of %d sandboxes live, %d agents found their memory right, %d steps, failures %v", r.Arm, r.Live, rep.Agents, r.Checked, r.Steps, r.Failures))
		}
	}
	limit := max(maxWakeMillis, maxWakeShare*p95[agentbench.ArmHibernate])
	b.atMost("agents: wake of those that are paused and reclaimed, p95", p95[agentbench.ArmReclaim], limit, "ms")
	return errors.Join(errs...)
}

// swapOfTests says which swap can be made, and keeps tests that make some away.
func swapOfTests(dir string) (kind string, unlock func(), err error) {
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), "quarry-test-swap.lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", nil, errors.Join(err, lock.Close())
	}
	unlock = func() { lock.Close() }
	swaps, err := os.ReadFile("/proc/swaps")
	if err != nil || bytes.Count(swaps, []byte("\n")) > 1 {
		return "none", unlock, nil
	}
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil || st.Type == unix.TMPFS_MAGIC {
		return "zram", unlock, nil
	}
	return "file", unlock, nil
}
