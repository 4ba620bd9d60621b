package agentbench

import (
	"context"
	"os"
	"strings"
	"time"
)

// samples is what was held and spent while an arm was measured.
type samples struct {
	count               int64
	memory, swap, zram  int64 // sums
	maxMemory, maxSwap  int64
	boxesCPU, workerCPU time.Duration
	oomKills            int64
}

func (t *trial) sample(ctx context.Context, d time.Duration) (s samples, err error) {
	boxes, err := t.w.boxes.Read()
	if err != nil {
		return s, err
	}
	self, err := t.w.self.Read()
	if err != nil {
		return s, err
	}
	tick := time.NewTicker(sampleEvery)
	defer tick.Stop()
	for end := time.After(d); ; {
		now, err := t.w.boxes.Read()
		if err != nil {
			return s, err
		}
		swap, zram := t.swap.used()
		s.count++
		s.memory += now.Memory
		s.swap += swap
		s.zram += zram
		s.maxMemory, s.maxSwap = max(s.maxMemory, now.Memory), max(s.maxSwap, swap)
		s.boxesCPU, s.oomKills = now.CPU-boxes.CPU, now.OOMKills-boxes.OOMKills
		select {
		case <-tick.C:
			continue
		case <-ctx.Done():
			return s, context.Cause(ctx)
		case <-end:
		}
		then, err := t.w.self.Read()
		s.workerCPU = then.CPU - self.CPU
		return s, err
	}
}

// load is how many tasks wanted a processor in the last minute.
func load() string {
	raw, _ := os.ReadFile("/proc/loadavg")
	one, _, _ := strings.Cut(string(raw), " ")
	return one
}
