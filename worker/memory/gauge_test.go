package memory_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/worker/memory"
)

const gib = 1 << 30

func TestTheGaugeBeginsAtLowAndEndsAtHigh(t *testing.T) {
	g := memory.Gauge{Marks: memory.Marks{Low: 2 * gib, High: 4 * gib}}
	now := time.Unix(1000, 0)
	for i, step := range []struct {
		available int64
		stalled   time.Duration // more than before
		want      int64
	}{
		{8 * gib, 0, 0},
		{3 * gib, 0, 0},                                 // between the marks: nothing begins
		{2*gib - 1, 0, 2*gib + 1},                       // below Low
		{3 * gib, 0, 1 * gib},                           // between the marks: it goes on
		{4 * gib, 0, 0},                                 // High: it ends
		{3 * gib, 0, 0},                                 // and does not begin again
		{8 * gib, 200 * time.Millisecond, gib / 2},      // tasks wait: a step, whatever is available
		{8 * gib, 50 * time.Millisecond, gib / 2},       // they still do
		{8 * gib, 10 * time.Millisecond, 0},             // no more
		{8 * gib, 90 * time.Millisecond, 0},             // not enough to begin
		{1 * gib, 500 * time.Millisecond, 3 * gib},      // both
		{3*gib + gib/2, 50 * time.Millisecond, gib / 2}, // not less than a step
		{5 * gib, 0, 0},
	} {
		now = now.Add(time.Second)
		r := memory.Reading{Total: 16 * gib, Available: step.available, At: now}
		for j := range i + 1 {
			r.Stalled += []time.Duration{0, 0, 0, 0, 0, 0, 200, 50, 10, 90, 500, 50, 0}[j] * time.Millisecond
		}
		if got := g.Want(r); got != step.want {
			t.Errorf("step %d, %d MiB available: wants %d MiB, should %d", i, step.available>>20, got>>20, step.want>>20)
		}
	}
}

// However often it is asked, tasks that wait are a reason for one step a second: what is
// brought back from swap makes them wait, too.
func TestAStallAsksForOneStepASecond(t *testing.T) {
	g := memory.Gauge{Marks: memory.Marks{Low: 2 * gib, High: 4 * gib}}
	now := time.Unix(1000, 0)
	var all int64
	for i := range 31 {
		r := memory.Reading{Total: 16 * gib, Available: 8 * gib, Stalled: time.Duration(i) * 50 * time.Millisecond, At: now.Add(time.Duration(i) * 100 * time.Millisecond)}
		all += g.Want(r)
	}
	if all != 3*gib/2 {
		t.Errorf("wants %d MiB in 3 s, should three steps of 512", all>>20)
	}
	if got := g.Want(memory.Reading{Total: 16 * gib, Available: gib, At: now.Add(3010 * time.Millisecond)}); got != 3*gib {
		t.Errorf("wants %d MiB of what is missing, should 3072", got>>20)
	}
}

func TestTheGaugeHasMarksOfItsOwnAndDoesWithoutPSI(t *testing.T) {
	var g memory.Gauge
	now := time.Unix(1000, 0)
	for i, c := range []struct{ available, want int64 }{{11 * gib, 0}, {9 * gib, 6 * gib}, {14 * gib, 0}, {15 * gib, 0}} {
		r := memory.Reading{Total: 100 * gib, Available: c.available, NoPSI: true, Stalled: time.Duration(i) * time.Hour, At: now.Add(time.Duration(i) * time.Second)}
		want := c.want
		if i == 2 {
			want = 5 * gib / 4 // a step is a quarter of what lies between the marks
		}
		if got := g.Want(r); got != want {
			t.Errorf("%d GiB available: wants %d, should %d", c.available/gib, got, want)
		}
	}
}

func proc(t *testing.T, meminfo, pressure string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "pressure"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{"meminfo": meminfo, "pressure/memory": pressure} {
		if content == "" {
			continue
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

const meminfo = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\nSwapTotal:       1048576 kB\nSwapFree:         524288 kB\n"

func TestTheMachineIsRead(t *testing.T) {
	m := memory.Machine{Proc: proc(t, meminfo, "some avg10=0.00 avg60=0.00 avg300=0.00 total=2106\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1598\n")}
	r, err := m.Read()
	r.At = time.Time{}
	want := memory.Reading{Total: 16 * gib, Available: 8 * gib, SwapTotal: gib, SwapFree: gib / 2, Stalled: 2106 * time.Microsecond}
	if err != nil || r != want {
		t.Errorf("got %+v, %v, want %+v", r, err, want)
	}
	for name, text := range map[string]string{"none": "", "no total": "some avg10=0.00\n", "not a number": "some total=x\n", "negative": "some total=-1\n"} {
		m := memory.Machine{Proc: proc(t, meminfo, text)}
		if r, err := m.Read(); err != nil || !r.NoPSI || r.Stalled != 0 {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
	if _, err := (memory.Machine{Proc: proc(t, "MemTotal: x kB\n", "")}).Read(); err == nil {
		t.Error("a machine that does not tell its memory was read")
	}
	if r, err := (memory.Machine{}).Read(); err != nil || r.Available <= 0 || r.Available > r.Total {
		t.Errorf("this machine: %+v, %v", r, err)
	}
}

func TestAWatchAsksUntilItEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var got int64
	little := memory.Machine{Proc: proc(t, strings.Replace(meminfo, "8388608", "1048576", 1), "")}
	err := memory.Watch(ctx, []memory.Source{little}, memory.Marks{Low: 2 * gib, High: 3 * gib}, nil, func(want int64) {
		got = want
		cancel()
	})
	if !errors.Is(err, context.Canceled) || got != 2*gib {
		t.Errorf("wanted %d, %v", got, err)
	}
	// With the kernel's own trigger, where it gives one.
	ctx, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := memory.Watch(ctx, []memory.Source{memory.Machine{}}, memory.Marks{Low: 1, High: 2, Stall: 2}, memory.NewMetrics(), func(int64) {}); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

// Whatever has least is what counts: the machine, or a group with a limit.
func TestAWatchGoesByWhoHasLeast(t *testing.T) {
	dir := fakeGroup(t, map[string]string{
		"cgroup.procs": "0", "memory.limit_in_bytes": "1073741824\n", "memory.usage_in_bytes": "1073741824\n",
		"memory.stat": "total_inactive_file 33554432\ntotal_active_file 67108864\n",
	})
	above := memory.Above(dir)
	if len(above) != 1 {
		t.Fatalf("%d groups above %s", len(above), dir)
	}
	r, err := above[0].Read()
	r.At = time.Time{}
	if want := (memory.Reading{Total: gib, Available: 64 << 20, NoPSI: true}); err != nil || r != want {
		t.Errorf("got %+v, %v, want %+v", r, err, want)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var got int64
	sources := append(above, memory.Machine{Proc: proc(t, meminfo, "")})
	memory.Watch(ctx, sources, memory.Marks{}, nil, func(want int64) {
		got = want
		cancel()
	})
	if want := int64(gib/10 + gib/20 - 64<<20); got != want {
		t.Errorf("wanted %d, should be %d", got, want)
	}
	// Marks of the machine would be more than the group has.
	g := memory.Gauge{Marks: memory.Marks{Low: 4 * gib, High: 6 * gib}}
	if got := g.Want(memory.Reading{Total: gib, Available: gib}); got != 0 {
		t.Errorf("wants %d of a group that uses nothing", got)
	}
}

func TestTheLimitOfAGroupIsRead(t *testing.T) {
	v2 := func(limit, high string) string {
		return fakeGroup(t, map[string]string{
			"cgroup.procs": "0", "memory.usage_in_bytes": "", "memory.current": "100", "memory.max": limit, "memory.high": high,
			"memory.stat": "inactive_file 10\nactive_file 20\n", "memory.pressure": "some avg10=0.00 total=7\n",
		})
	}
	for name, c := range map[string]struct {
		dir  string
		want memory.Reading
	}{
		"none":      {v2("max", "max"), memory.Reading{}},
		"max":       {v2("300", "max"), memory.Reading{Total: 300, Available: 220, Stalled: 7 * time.Microsecond}},
		"high":      {v2("300", "150"), memory.Reading{Total: 150, Available: 70, Stalled: 7 * time.Microsecond}},
		"over":      {v2("60", "max"), memory.Reading{Total: 60, Stalled: 7 * time.Microsecond}},
		"1 of none": {fakeGroup(t, map[string]string{"cgroup.procs": "0", "memory.limit_in_bytes": "9223372036854771712"}), memory.Reading{}},
	} {
		above := memory.Above(c.dir)
		if len(above) != 1 {
			t.Fatalf("%s: %d groups", name, len(above))
		}
		r, err := above[0].Read()
		r.At = time.Time{}
		if err != nil || r != c.want {
			t.Errorf("%s: got %+v, %v, want %+v", name, r, err, c.want)
		}
		if err := os.RemoveAll(c.dir); err != nil {
			t.Fatal(err)
		}
		if r, err := above[0].Read(); err != nil || r.Total != 0 {
			t.Errorf("%s, gone: %+v, %v", name, r, err)
		}
	}
	if list := memory.Above(t.TempDir()); len(list) != 0 {
		t.Errorf("what is no group has %d", len(list))
	}
}

func TestLimitsAreSaid(t *testing.T) {
	v1, v2, old := t.TempDir(), t.TempDir(), t.TempDir()
	for _, path := range []string{v1 + "/memory.usage_in_bytes", v2 + "/memory.reclaim"} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	good := memory.Reading{SwapTotal: gib, SwapFree: gib}
	for _, c := range []struct {
		dir  string
		r    memory.Reading
		want []string // words of each sentence
	}{
		{v2, good, nil},
		{v1, good, []string{"version 1"}},
		{old, good, []string{"memory.reclaim"}},
		{v2, memory.Reading{}, []string{"no swap"}},
		{v2, memory.Reading{SwapTotal: gib, SwapFree: 1}, []string{"Swap is full"}},
		{v1, memory.Reading{NoPSI: true}, []string{"no swap", "version 1", "psi=1"}},
	} {
		got := memory.Limits(c.dir, c.r)
		if len(got) != len(c.want) {
			t.Errorf("got %q, want %q", got, c.want)
			continue
		}
		for i, words := range c.want {
			if !strings.Contains(got[i], words) {
				t.Errorf("got %q, want %q in it", got[i], words)
			}
		}
	}
}
