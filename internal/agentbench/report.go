package agentbench

import (
	"context"
	"fmt"
	"io"
	"maps"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
)

// Report is what a run has found.
type Report struct {
	Version     string   `json:"version"`
	Kernel      string   `json:"kernel"`
	Processors  int      `json:"processors"`
	CgroupV2    bool     `json:"cgroup_v2"`
	Memory      int64    `json:"memory_bytes"`
	Agents      int      `json:"agents"`
	AgentMemory int64    `json:"agent_memory_bytes"`
	Demand      float64  `json:"demand"` // of Memory
	Swap        string   `json:"swap"`
	WaitScale   float64  `json:"wait_scale"`
	Hot         int      `json:"hot_percent"`
	Moving      int      `json:"moving_percent"`
	Cold        int      `json:"cold_percent"`
	Results     []Result `json:"arms"`
}

// Result is of one arm. A wake is from when the model has an answer until the agent has
// touched its working set and said so.
type Result struct {
	Arm         Arm            `json:"arm"`
	Seconds     float64        `json:"seconds"` // measured
	P50         float64        `json:"wake_p50_ms"`
	P95         float64        `json:"wake_p95_ms"`
	P99         float64        `json:"wake_p99_ms"`
	Max         float64        `json:"wake_max_ms"`
	Touch       float64        `json:"touch_p50_ms"` // of the wake, in the guest
	Wakes       []float64      `json:"wakes_ms"`     // each, sorted
	Steps       int            `json:"steps"`        // done in that time
	Failures    map[string]int `json:"failures"`
	Told        []string       `json:"failures_told,omitempty"` // the first of them
	WrongPages  int            `json:"wrong_pages"`
	Live        int            `json:"live_sandboxes"` // at the end
	Checked     int            `json:"checked"`        // agents that found all their memory right at the end
	MemoryMean  int64          `json:"memory_mean_bytes"`
	MemoryMax   int64          `json:"memory_max_bytes"`
	SwapMean    int64          `json:"swap_mean_bytes"`
	SwapMax     int64          `json:"swap_max_bytes"`
	ZramMean    int64          `json:"zram_mean_bytes"` // of the machine's memory, for what is in swap
	SandboxCPU  float64        `json:"sandbox_cpu_seconds"`
	WorkerCPU   float64        `json:"worker_cpu_seconds"`
	OOMKills    int64          `json:"oom_kills"`
	Pauses      int64          `json:"pauses"` // of those that live
	PausedShare float64        `json:"paused_share"`
	Load        string         `json:"load"` // of the machine, at the end
}

// Failed reports how many failures there were.
func (r Result) Failed() (n int) {
	for _, c := range r.Failures {
		n += c
	}
	return n
}

func (r *run) report() Report {
	var u unix.Utsname
	unix.Uname(&u)
	return Report{
		Version: r.Version, Kernel: unix.ByteSliceToString(u.Release[:]), Processors: runtime.NumCPU(), CgroupV2: r.tree.V2(), Memory: r.Memory,
		Agents: r.Agents, AgentMemory: r.AgentMemory, Demand: r.Demand(), Swap: r.swap.String(), WaitScale: r.WaitScale, Hot: r.Hot, Moving: r.Moving, Cold: r.Cold,
	}
}

func (t *trial) result(ctx context.Context, s samples, from, to time.Time) Result {
	res := Result{
		Arm: t.arm, Seconds: to.Sub(from).Seconds(), MemoryMean: s.memory / s.count, MemoryMax: s.maxMemory, SwapMean: s.swap / s.count, SwapMax: s.maxSwap,
		ZramMean: s.zram / s.count, SandboxCPU: s.boxesCPU.Seconds(), WorkerCPU: s.workerCPU.Seconds(), OOMKills: s.oomKills, Load: load(),
	}
	t.lookOnce(ctx)
	t.m.mu.Lock()
	var touches []float64
	for _, w := range t.m.wakes {
		if w.at.Before(from) || w.at.After(to) {
			continue
		}
		res.Wakes = append(res.Wakes, millis(w.took))
		touches = append(touches, millis(w.touch))
	}
	res.Failures, res.Told, res.WrongPages = maps.Clone(t.m.failures), slices.Clone(t.m.told), t.m.wrong
	for _, a := range t.m.agents {
		if a.checked {
			res.Checked++
		}
	}
	t.m.mu.Unlock()
	slices.Sort(res.Wakes)
	slices.Sort(touches)
	res.Steps = len(res.Wakes)
	res.P50, res.P95, res.P99, res.Max = quantile(res.Wakes, 0.5), quantile(res.Wakes, 0.95), quantile(res.Wakes, 0.99), quantile(res.Wakes, 1)
	res.Touch = quantile(touches, 0.5)
	live, err := t.w.List(ctx, sandbox.Filter{})
	if err != nil {
		t.say("%s: the worker does not list its sandboxes: %v", t.arm, err)
	}
	res.Live = len(live)
	var paused, lived time.Duration
	for _, sb := range live {
		res.Pauses += sb.Pauses
		paused += time.Duration(sb.PausedFor) * time.Millisecond
		lived += time.Since(sb.Created)
	}
	if lived > 0 {
		res.PausedShare = paused.Seconds() / lived.Seconds()
	}
	return res
}

func millis(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// quantile is the least value that q of all are not above; of none it is 0.
func quantile(sorted []float64, q float64) float64 {
	if len(sorted) == 0 {
		return 0
	}
	i := int(q*float64(len(sorted))+0.999999) - 1
	return sorted[min(max(i, 0), len(sorted)-1)]
}

func mib(n int64) string { return fmt.Sprintf("%d MiB", n>>20) }

// Write prints a table, a column an arm, and the failures below it.
func (r Report) Write(w io.Writer) error {
	fmt.Fprintf(w, "%d agents of %s, %.2f times the %s given; swap: %s; waits of 15 to 25 s times %g; %d processors, Linux %s, control groups of version %d\n",
		r.Agents, mib(r.AgentMemory), r.Demand, mib(r.Memory), r.Swap, r.WaitScale, r.Processors, r.Kernel, map[bool]int{false: 1, true: 2}[r.CgroupV2])
	tab := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	row := func(name string, cell func(Result) string) {
		cells := []string{name}
		for _, res := range r.Results {
			cells = append(cells, cell(res))
		}
		fmt.Fprintln(tab, strings.Join(cells, "\t")+"\t")
	}
	row("", func(x Result) string { return string(x.Arm) })
	row("wake p50, ms", func(x Result) string { return ms(x.P50) })
	row("wake p95, ms", func(x Result) string { return ms(x.P95) })
	row("wake p99, ms", func(x Result) string { return ms(x.P99) })
	row("wake max, ms", func(x Result) string { return ms(x.Max) })
	row("  of it in the guest, p50, ms", func(x Result) string { return ms(x.Touch) })
	row("steps done", func(x Result) string { return fmt.Sprintf("%d in %.0f s", x.Steps, x.Seconds) })
	row("failures", func(x Result) string { return fmt.Sprint(x.Failed()) })
	row("pages with wrong bytes", func(x Result) string { return fmt.Sprint(x.WrongPages) })
	row("live sandboxes", func(x Result) string { return fmt.Sprintf("%d of %d", x.Live, r.Agents) })
	row("found all memory right", func(x Result) string { return fmt.Sprint(x.Checked) })
	row("pauses, share of time paused", func(x Result) string { return fmt.Sprintf("%d, %.0f %%", x.Pauses, 100*x.PausedShare) })
	row("memory held, mean, most, MiB", func(x Result) string { return fmt.Sprintf("%d, %d", x.MemoryMean>>20, x.MemoryMax>>20) })
	row("in swap, mean, most, MiB", func(x Result) string { return fmt.Sprintf("%d, %d", x.SwapMean>>20, x.SwapMax>>20) })
	row("memory of zram, mean, MiB", func(x Result) string { return fmt.Sprint(x.ZramMean >> 20) })
	row("processor time, sandboxes, worker, s", func(x Result) string { return fmt.Sprintf("%.1f, %.1f", x.SandboxCPU, x.WorkerCPU) })
	row("killed for want of memory", func(x Result) string { return fmt.Sprint(x.OOMKills) })
	row("load", func(x Result) string { return x.Load })
	err := tab.Flush()
	for _, x := range r.Results {
		for _, kind := range slices.Sorted(maps.Keys(x.Failures)) {
			fmt.Fprintf(w, "%s: %d × %s\n", x.Arm, x.Failures[kind], kind)
		}
		for _, text := range x.Told {
			fmt.Fprintf(w, "%s:   %s\n", x.Arm, text)
		}
	}
	return err
}

func ms(v float64) string {
	if v < 100 {
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.0f", v)
}
