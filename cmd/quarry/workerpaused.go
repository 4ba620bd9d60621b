package main

import (
	"fmt"
	"time"

	"github.com/spf13/pflag"

	"quarry/worker/node"
)

// pausedFlags are the flags of worker about sandboxes that are paused.
type pausedFlags struct {
	idle      time.Duration
	memory    string
	low, high byteSize
	sleep     time.Duration
}

func (o *pausedFlags) flags(f *pflag.FlagSet) {
	f.StringVar(&o.memory, "paused-memory", string(node.PausedReclaim), "what becomes of the memory of a paused sandbox: "+node.PausedMemories())
	f.DurationVar(&o.idle, "idle-pause", 0, "pause a sandbox without a first process of its own, that does not say, when no command ran, no file was written and nearly no processor was used for so long; the next one wakes it (default never)")
	f.DurationVar(&o.sleep, "hibernate-after", time.Minute, "where memory is wanted and swap has no room: put the largest sandbox to disk that has been paused for so long; 0 is never")
	f.Var(&o.low, "memory-low", "memory of paused sandboxes is taken while less than this is available (default a tenth of all)")
	f.Var(&o.high, "memory-high", "and until this is available (default half as much again as --memory-low)")
}

// fill puts them into a node's config.
func (o *pausedFlags) fill(c *node.Config) (err error) {
	if c.PausedMemory, err = node.ParsePausedMemory(o.memory); err != nil {
		return fmt.Errorf("%w: --paused-memory: %w", errUsage, err)
	}
	if o.idle != 0 && o.idle < node.MinIdlePause {
		return fmt.Errorf("%w: --idle-pause %v: want 0, or %v or more", errUsage, o.idle, node.MinIdlePause)
	}
	c.IdlePause = o.idle
	if c.HibernateAfter = o.sleep; o.sleep == 0 {
		c.HibernateAfter = -1
	}
	c.MemoryLow, c.MemoryHigh = o.low.bytes, o.high.bytes
	if c.MemoryHigh > 0 && c.MemoryHigh <= c.MemoryLow {
		return fmt.Errorf("%w: --memory-high %s: want more than --memory-low", errUsage, o.high.text)
	}
	return nil
}
