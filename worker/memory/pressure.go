package memory

import (
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Reading is how much memory a machine has left, and how much it suffers.
type Reading struct {
	Total     int64         // bytes
	Available int64         // bytes that can be had without swapping
	SwapTotal int64         // bytes; 0 is no swap
	SwapFree  int64         // bytes
	Stalled   time.Duration // how long some task has waited for memory since the machine began
	NoPSI     bool          // Stalled is not told
	At        time.Time     // when it was read
}

// SwapFull reports whether nothing more goes to swap that is worth it; where there is no
// swap it is full.
func (r Reading) SwapFull() bool { return r.SwapFree <= r.SwapTotal/20 }

// Marks say when memory is taken. Between Low and High nothing begins and nothing ends,
// so that what is taken is not given and taken again.
type Marks struct {
	Low   int64   // bytes available at which it begins; 0 = a tenth of all
	High  int64   // bytes available at which it ends; 0 = half as much again as Low
	Stall float64 // share of time that tasks wait for memory, at which it begins too; 0 = 0.1
}

// Gauge says how much memory is to be taken now. It is not for many goroutines.
type Gauge struct {
	Marks Marks
	last  Reading // where the time begins over which tasks are said to wait
	share float64 // of the time before it that they did
	under bool
}

// stallTime is over what time it counts that tasks wait, and how often that asks for a
// step: what is brought back from swap makes tasks wait, too, and taking at once as much
// from others would make them wait more.
const stallTime = 900 * time.Millisecond

// calm is the share of Marks.Stall below which a stall is over.
const calm = 0.25

// of returns the marks for so much memory. Marks in bytes are the machine's, so that of
// a control group with a low limit they would be all: half of it is the most.
func (m Marks) of(total int64) Marks {
	if m.Low <= 0 {
		m.Low = total / 10
	}
	m.Low = min(m.Low, total/2)
	if m.High <= m.Low {
		m.High = m.Low + m.Low/2
	}
	m.High = min(m.High, m.Low+(total-m.Low)/2)
	if m.Stall <= 0 {
		m.Stall = 0.1
	}
	return m
}

// Want looks at a reading and returns how many bytes are to be taken; 0 is none.
func (g *Gauge) Want(r Reading) int64 {
	m := g.Marks.of(r.Total)
	low, high, limit := m.Low, m.High, m.Stall
	stall, fresh := g.stall(r)
	switch {
	case r.Available < low || stall >= limit:
		g.under = true
	case r.Available >= high && stall < limit*calm:
		g.under = false
	}
	if !g.under {
		return 0
	}
	// Tasks wait although there seems to be enough: a step more than that.
	if fresh {
		return max(high-r.Available, (high-low)/4)
	}
	return max(high-r.Available, 0)
}

// stall is the share of time in which some task waited, and whether it is another than
// before.
func (g *Gauge) stall(r Reading) (share float64, fresh bool) {
	over := r.At.Sub(g.last.At)
	switch {
	case r.NoPSI || g.last.NoPSI || g.last.At.IsZero() || over < 0:
		g.share = 0
	case over < stallTime:
		return g.share, false
	default:
		g.share = float64(r.Stalled-g.last.Stalled) / float64(over)
	}
	g.last = r
	return g.share, true
}

// Machine reads the memory of this one.
type Machine struct {
	Proc string // "" = /proc
}

// Name implements Source.
func (Machine) Name() string { return "machine" }

// Pressure implements Source.
func (m Machine) Pressure() string { return m.path("pressure/memory") }

// Read reads it.
func (m Machine) Read() (Reading, error) {
	raw, err := readBounded(m.path("meminfo"))
	if err != nil {
		return Reading{}, err
	}
	r := parseMeminfo(raw)
	r.At = time.Now()
	if r.Total == 0 {
		return Reading{}, fmt.Errorf("%s does not tell the machine's memory", m.path("meminfo"))
	}
	r.Stalled, r.NoPSI = stalled(m.Pressure())
	return r, nil
}

// stalled reads how long tasks have waited, where the kernel tells.
func stalled(path string) (d time.Duration, none bool) {
	raw, err := readBounded(path)
	if err != nil {
		return 0, true
	}
	d, err = parsePressure(raw)
	return d, err != nil
}

func (m Machine) path(name string) string {
	if m.Proc == "" {
		return filepath.Join("/proc", name)
	}
	return filepath.Join(m.Proc, name)
}

func parseMeminfo(raw string) (r Reading) {
	names := map[string]*int64{"MemTotal:": &r.Total, "MemAvailable:": &r.Available, "SwapTotal:": &r.SwapTotal, "SwapFree:": &r.SwapFree}
	for line := range strings.Lines(raw) {
		f := strings.Fields(line)
		if len(f) < 2 || names[f[0]] == nil {
			continue
		}
		if n, err := strconv.ParseInt(f[1], 10, 64); err == nil && n >= 0 && n < 1<<50 {
			*names[f[0]] = n << 10
		}
	}
	return r
}

// parsePressure reads the total of the line "some avg10=0.00 … total=1".
func parsePressure(raw string) (time.Duration, error) {
	for line := range strings.Lines(raw) {
		f := strings.Fields(line)
		if len(f) == 0 || f[0] != "some" {
			continue
		}
		for _, word := range f[1:] {
			if value, ok := strings.CutPrefix(word, "total="); ok {
				n, err := strconv.ParseInt(value, 10, 64)
				if err != nil || n < 0 || n > 1<<50 {
					return 0, fmt.Errorf("pressure: total %q is not a time", value)
				}
				return time.Duration(n) * time.Microsecond, nil
			}
		}
	}
	return 0, errors.New("pressure: no line of some tasks")
}
