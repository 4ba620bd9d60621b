package memory

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
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
	last  Reading
	under bool
}

// calm is the share of Marks.Stall below which a stall is over.
const calm = 0.25

// Want looks at a reading and returns how many bytes are to be taken; 0 is none.
func (g *Gauge) Want(r Reading) int64 {
	low, high, limit := g.Marks.Low, g.Marks.High, g.Marks.Stall
	if low <= 0 {
		low = r.Total / 10
	}
	if high <= low {
		high = low + low/2
	}
	if limit <= 0 {
		limit = 0.1
	}
	stall := g.stall(r)
	g.last = r
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
	return max(high-r.Available, (high-low)/4)
}

// stall is the share of the time since the last reading in which some task waited.
func (g *Gauge) stall(r Reading) float64 {
	over := r.At.Sub(g.last.At)
	if r.NoPSI || g.last.NoPSI || g.last.At.IsZero() || over <= 0 {
		return 0
	}
	return float64(r.Stalled-g.last.Stalled) / float64(over)
}

// Machine reads the memory of this one.
type Machine struct {
	Proc   string               // "" = /proc
	Budget int64                // bytes that the sandboxes have together; 0 is all that the machine has
	Groups func() (Held, error) // what all sandboxes hold; needed with Budget
}

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
	if raw, err := readBounded(m.path("pressure/memory")); err == nil {
		r.Stalled, err = parsePressure(raw)
		r.NoPSI = err != nil
	} else {
		r.NoPSI = true
	}
	if m.Budget > 0 && m.Groups != nil {
		held, err := m.Groups()
		if err != nil {
			return Reading{}, err
		}
		r.Total = min(r.Total, m.Budget)
		r.Available = min(r.Available, max(0, m.Budget-held.Own()))
	}
	return r, nil
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

// between is how long a watch waits for a trigger, or between readings where the kernel
// gives none.
const between = time.Second

// Watch reads the machine every second, and at once when the kernel says that tasks
// wait for memory, and calls take with what is wanted, until ctx ends. take is called
// by one goroutine; what it takes long for is not asked again meanwhile.
func (m Machine) Watch(ctx context.Context, marks Marks, take func(want int64)) error {
	g := Gauge{Marks: marks}
	trigger := openTrigger(m.path("pressure/memory"))
	if trigger >= 0 {
		defer unix.Close(trigger)
	}
	for ctx.Err() == nil {
		r, err := m.Read()
		if err != nil {
			return fmt.Errorf("watch the machine's memory: %w", err)
		}
		if want := g.Want(r); want > 0 {
			take(want)
		}
		if trigger < 0 || !waitTrigger(ctx, trigger) {
			select {
			case <-ctx.Done():
			case <-time.After(between):
			}
		}
	}
	return context.Cause(ctx)
}

// openTrigger asks to be told when tasks waited for memory 100 ms of a second; -1 where
// the kernel, or this process's rights, do not allow it.
func openTrigger(path string) int {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1
	}
	if _, err := unix.Write(fd, []byte("some 100000 1000000\x00")); err != nil {
		unix.Close(fd)
		return -1
	}
	return fd
}

// waitTrigger waits for the trigger, or as long as it is waited between readings. It
// looks at ctx ten times a second. False: the trigger cannot be waited for.
func waitTrigger(ctx context.Context, fd int) bool {
	for end := time.Now().Add(between); ctx.Err() == nil && time.Now().Before(end); {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLPRI}}
		n, err := unix.Poll(fds, 100)
		if err != nil && err != unix.EINTR || fds[0].Revents&unix.POLLERR != 0 {
			return false
		}
		if n > 0 {
			return true
		}
	}
	return true
}
