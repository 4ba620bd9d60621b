// Package agentbench measures how soon agents run on when their model has answered,
// where they have more memory together than the machine gives them. Each arm treats
// those that wait in its own way, under a worker of its own, with the same agents, the
// same waits and the same measuring points, so that the arms compare.
package agentbench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"quarry/worker/cgroup"
)

// Arm is one way to treat sandboxes that wait for their model.
type Arm string

// Arms. All but ArmResident pause a sandbox that waits.
const (
	ArmResident  Arm = "resident"  // they are left alone; what swaps is the kernel's choice
	ArmPaused    Arm = "paused"    // they are paused, and their memory is left alone
	ArmHibernate Arm = "hibernate" // they go to disk and are restored by POST …/wake
	ArmReclaim   Arm = "reclaim"   // their memory is taken under pressure, and prefetched before they run
)

// Arms are all there are.
var Arms = []Arm{ArmResident, ArmPaused, ArmHibernate, ArmReclaim}

// ParseArms reads a list with commas.
func ParseArms(text string) ([]Arm, error) {
	var out []Arm
	for name := range strings.SplitSeq(text, ",") {
		if !slices.Contains(Arms, Arm(name)) {
			return nil, fmt.Errorf("arm %q: want some of %v", name, Arms)
		}
		out = append(out, Arm(name))
	}
	return out, nil
}

// Waits of agents for their model, before they are scaled, and their work after it:
// they wait 87 % of their life, where real ones wait 74 to 91 %.
const (
	minWait = 15 * time.Second
	maxWait = 25 * time.Second
	work    = 3 * time.Second
)

// DefaultPatience is for a machine that is slow, as others use it too.
const DefaultPatience = 30 * time.Second

// Config says what is measured. All fields but Log must be set.
type Config struct {
	Quarry      string // the program whose workers are measured; quarry-shim and quarry-guest are beside it
	Version     string // of it, for the report
	TempDir     string // where the folder of a run is made; "" is the system's
	Arms        []Arm
	Memory      int64 // bytes that all sandboxes have together
	AgentMemory int64 // bytes that an agent holds
	Agents      int
	WaitScale   float64       // of the waits and the work
	Duration    time.Duration // of the measurement of each arm, from when all agents have begun
	Patience    time.Duration // with an agent that has its answer, before it counts as a failure (DefaultPatience)
	Hot         int           // percent of its memory that an agent reads and writes before it says that it is awake, the same each time
	Moving      int           // percent of it that it reads besides, the next in turn
	Cold        int           // percent of it that it reads in its work, the next in turn
	Swap        Swap
	Seed        uint64
	Log         io.Writer // what happens, for people; nil is nobody
}

// Demand is how often the memory that is given the agents want.
func (c Config) Demand() float64 {
	return float64(c.AgentMemory) * float64(c.Agents) / float64(c.Memory)
}

func (c Config) scaled(d time.Duration) time.Duration {
	return time.Duration(float64(d) * c.WaitScale)
}

func (c Config) check() error {
	switch {
	case os.Geteuid() != 0:
		return errors.New("agents are measured as root: control groups, network namespaces and swap are made for them")
	case c.AgentMemory < 1<<20 || c.Memory < 64<<20:
		return errors.New("want 1 MiB or more an agent, and 64 MiB or more for all")
	case c.Agents < 1 || c.Agents > 4096:
		return fmt.Errorf("%d agents: want 1 to 4096", c.Agents)
	case !(c.WaitScale > 0) || math.IsInf(c.WaitScale, 0) || c.WaitScale > 100:
		return fmt.Errorf("wait scale %v: want more than 0, and 100 at most", c.WaitScale)
	case c.Duration <= 0 || len(c.Arms) == 0:
		return errors.New("want a duration, and one arm or more")
	case c.Patience <= 0 || c.Patience > time.Hour:
		return fmt.Errorf("patience %v: want more than 0, and an hour at most", c.Patience)
	case c.Hot < 0 || c.Hot > 100 || c.Moving < 0 || c.Moving > 100 || c.Cold < 0 || c.Cold > 100:
		return errors.New("parts of an agent's memory are 0 to 100 percent")
	}
	if _, err := exec.LookPath("runsc"); err != nil {
		return fmt.Errorf("runsc is not on the PATH: quarry doctor says how to get it")
	}
	for _, name := range []string{"quarry-shim", "quarry-guest"} {
		if _, err := os.Stat(filepath.Join(filepath.Dir(c.Quarry), name)); err != nil {
			return fmt.Errorf("%s is not beside %s: install all programs together", name, c.Quarry)
		}
	}
	return nil
}

// run is one call of Run.
type run struct {
	Config
	dir  string // everything is below it
	swap *swapArea
	tree *cgroup.Tree
}

func (r *run) path(elem ...string) string { return filepath.Join(append([]string{r.dir}, elem...)...) }

func (r *run) say(format string, args ...any) {
	if r.Log != nil {
		fmt.Fprintf(r.Log, format+"\n", args...)
	}
}

// Run measures each arm and leaves nothing behind, however it ends.
func Run(ctx context.Context, c Config) (rep Report, err error) {
	if err := c.check(); err != nil {
		return Report{}, err
	}
	r := &run{Config: c}
	if r.dir, err = os.MkdirTemp(c.TempDir, "quarry-agents-"); err != nil {
		return Report{}, err
	}
	defer func() { err = errors.Join(err, r.clear()) }()
	if r.tree, err = cgroup.Open(cgroup.Config{Parent: "/" + filepath.Base(r.dir)}); err != nil {
		return Report{}, err
	}
	defer func() { err = errors.Join(err, r.tree.Remove()) }()
	if r.swap, err = c.Swap.on(r.dir, c.AgentMemory*int64(c.Agents)); err != nil {
		return Report{}, err
	}
	defer func() { err = errors.Join(err, r.swap.off()) }()
	r.say("%d agents of %s want %.2f times the %s that they are given; swap: %s", c.Agents, mib(c.AgentMemory), c.Demand(), mib(c.Memory), r.swap)
	if err := r.makeImage(ctx); err != nil {
		return Report{}, err
	}
	rep = r.report()
	for _, a := range c.Arms {
		res, err := r.measure(ctx, a)
		if err != nil {
			return rep, fmt.Errorf("arm %s: %w", a, err)
		}
		rep.Results = append(rep.Results, res)
	}
	return rep, nil
}
