package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"time"

	"github.com/spf13/cobra"

	"quarry/internal/agentbench"
)

func newBench() *cobra.Command {
	c := &cobra.Command{
		Use:   "bench",
		Short: "measure this machine",
		Args:  cobra.ArbitraryArgs,
		RunE:  noCommand,
	}
	c.AddCommand(newBenchAgents())
	return c
}

type benchAgentsOptions struct {
	c             agentbench.Config
	arms, swap    string
	memory, agent byteSize
	demand        float64
	json, svg     string
}

func newBenchAgents() *cobra.Command {
	o := benchAgentsOptions{memory: byteSize{"2G", 2 << 30}, agent: byteSize{"256M", 256 << 20}}
	c := &cobra.Command{
		Use:   "agents [--memory BYTES] [--agent-memory BYTES] [--demand N] [--swap KIND[:SIZE]]",
		Short: "measure how soon agents run on when their model has answered, with more of them than fit into memory",
		Long: `agents starts agents that hold memory, ask a model over plain HTTP, wait 15 to 25 s for its answer, touch a
working set, say so to the model, work for 3 s and ask again. Together they want more memory than a control group
of their own has. It measures from when the answer is there until the agent has said that it touched its working
set, for three ways to treat agents that wait: left resident, hibernated, and paused with their memory reclaimed
under pressure and prefetched. It checks every byte that an agent reads, and all of them at the end.

Each arm has a worker of its own, in a network namespace of its own; the model is in another. It needs root, runsc,
nftables and control groups with memory, and no image: it makes one. Everything that it makes it removes, also when
it is interrupted. It exits 3 when an agent found a wrong byte.`,
		Args: exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			return runBenchAgents(c.Context(), o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar(&o.arms, "arms", "resident,hibernate,reclaim", "which arms, in this order; paused is one more, with memory kept while paused")
	f.Var(&o.memory, "memory", "memory that all sandboxes have together")
	f.Var(&o.agent, "agent-memory", "memory that an agent holds")
	f.Float64Var(&o.demand, "demand", 1.5, "how often --memory the agents want; it says how many there are")
	f.IntVar(&o.c.Agents, "agents", 0, "how many agents there are, in place of --demand")
	f.Float64Var(&o.c.WaitScale, "wait-scale", 1, "what waits and work are multiplied with")
	f.DurationVar(&o.c.Duration, "duration", time.Minute, "how long each arm is measured, once all agents have begun")
	f.DurationVar(&o.c.Patience, "patience", agentbench.DefaultPatience, "how long an agent that has its answer may take to say so before that is a failure; a restore may take twice as long, and all agents four times to begin and to end")
	f.IntVar(&o.c.Hot, "working-set", 10, "percent of its memory that an agent reads and writes before it says that it is awake, the same at each step")
	f.IntVar(&o.c.Moving, "moving-set", 2, "percent of it that an agent reads besides, another part at each step")
	f.IntVar(&o.c.Cold, "work-set", 2, "percent of it that an agent reads in its work, another part at each step")
	f.StringVar(&o.swap, "swap", "file", "swap that is switched on meanwhile: file or zram, with :SIZE or one and a half times what the agents hold, or none for what the machine has")
	f.Uint64Var(&o.c.Seed, "seed", 1, "of waits and of what is in memory: the same seed, the same waits")
	f.StringVar(&o.c.TempDir, "temp", "", "folder for what is made, swap and checkpoints among it; default is the system's")
	f.StringVar(&o.json, "json", "", "write all figures to this file, too")
	f.StringVar(&o.svg, "svg", "", "draw the distribution of the wakes of each arm into this file")
	return c
}

func (o *benchAgentsOptions) fill() (err error) {
	o.c.Version, o.c.Memory, o.c.AgentMemory = version, o.memory.bytes, o.agent.bytes
	if o.c.Arms, err = agentbench.ParseArms(o.arms); err != nil {
		return fmt.Errorf("%w: --arms: %w", errUsage, err)
	}
	if o.c.Swap, err = agentbench.ParseSwap(o.swap, parseSize); err != nil {
		return fmt.Errorf("%w: --swap: %w", errUsage, err)
	}
	if o.c.Agents == 0 {
		n := math.Ceil(o.demand * float64(o.memory.bytes) / float64(o.agent.bytes))
		if !(n >= 1 && n < 1<<16) {
			return fmt.Errorf("%w: --demand %v: %v agents", errUsage, o.demand, n)
		}
		o.c.Agents = int(n)
	}
	o.c.Quarry, err = os.Executable()
	return err
}

func runBenchAgents(ctx context.Context, o benchAgentsOptions, stdout, stderr io.Writer) error {
	if err := o.fill(); err != nil {
		return err
	}
	o.c.Log = stderr
	rep, err := agentbench.Run(ctx, o.c)
	if len(rep.Results) > 0 { // what was measured is told whatever came after it
		err = errors.Join(err, rep.Write(stdout), o.write(rep))
	}
	for _, r := range rep.Results {
		if r.WrongPages > 0 {
			err = errors.Join(err, fmt.Errorf("%w: arm %s: %d pages of agents had wrong bytes", errDamage, r.Arm, r.WrongPages))
		}
	}
	return err
}

func (o *benchAgentsOptions) write(rep agentbench.Report) error {
	if o.json != "" {
		raw, err := json.MarshalIndent(rep, "", " ")
		if err == nil {
			err = os.WriteFile(o.json, append(raw, '\n'), 0o644)
		}
		if err != nil {
			return err
		}
	}
	if o.svg == "" {
		return nil
	}
	f, err := os.Create(o.svg)
	if err != nil {
		return err
	}
	return errors.Join(rep.WriteSVG(f), f.Close())
}
