package memory

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Source is a machine or a control group that has so much memory and no more.
type Source interface {
	Name() string     // what kind of thing it is, as a label of metrics
	Pressure() string // the file where the kernel tells how long tasks wait; it need not be there
	// Read reads it. A Total of 0 says that there is no limit now.
	Read() (Reading, error)
}

const (
	// between is how long a watch waits for a trigger, or between readings where the
	// kernel gives none.
	between = time.Second
	// closely is how long it waits when little is left: a guest that begins to use its
	// memory touches 1 GiB in a second, and a reading takes 0.1 ms.
	closely = 100 * time.Millisecond
)

// Watch reads sources every second, more often when little is left, and at once when
// the kernel says that tasks wait for memory, and calls take with what is wanted of the
// one that has least, until ctx ends or a source cannot be read. take is called by one
// goroutine; what it takes long for is not asked again meanwhile.
func Watch(ctx context.Context, sources []Source, marks Marks, m *Metrics, take func(want int64)) error {
	gauges := make([]Gauge, len(sources))
	var triggers []unix.PollFd
	for i, s := range sources {
		gauges[i].Marks = marks
		if fd := openTrigger(s.Pressure()); fd >= 0 {
			defer unix.Close(fd)
			triggers = append(triggers, unix.PollFd{Fd: int32(fd), Events: unix.POLLPRI})
		}
	}
	for ctx.Err() == nil {
		want, pause := int64(0), between
		least := map[string]Reading{}
		for i, s := range sources {
			r, err := s.Read()
			if err != nil {
				return fmt.Errorf("watch the memory of the %s: %w", s.Name(), err)
			}
			if r.Total == 0 {
				continue
			}
			want = max(want, gauges[i].Want(r))
			if r.Available < 2*marks.of(r.Total).High {
				pause = closely
			}
			if have, ok := least[s.Name()]; !ok || r.Available < have.Available {
				least[s.Name()] = r
			}
		}
		m.saw(least)
		m.wants(want)
		if want > 0 {
			take(want)
		}
		if triggers = waitTriggers(ctx, triggers, pause); len(triggers) == 0 {
			select {
			case <-ctx.Done():
			case <-time.After(pause):
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

// waitTriggers waits for one of the triggers, or for a time, and returns those that can
// be waited for. It looks at ctx ten times a second.
func waitTriggers(ctx context.Context, triggers []unix.PollFd, pause time.Duration) []unix.PollFd {
	if len(triggers) == 0 {
		return nil
	}
	for end := time.Now().Add(pause); ctx.Err() == nil && time.Now().Before(end); {
		n, err := unix.Poll(triggers, int(min(100, pause.Milliseconds())))
		if err != nil && err != unix.EINTR {
			return nil
		}
		good := triggers[:0:0]
		for _, t := range triggers {
			if t.Revents&unix.POLLERR == 0 {
				good = append(good, t)
			}
		}
		if n > 0 {
			return good
		}
	}
	return triggers
}
