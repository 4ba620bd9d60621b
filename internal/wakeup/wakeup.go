// Package wakeup asks the kernel to have idle processors ready at once while short
// things follow one another, by PM QoS (Documentation/power/pm_qos_interface.rst).
//
// A read of an image passes several processes, and each of them is woken up. On an idle
// machine the processor that is to run it sleeps: in a guest of a hypervisor, waking it
// takes 10 to 30 µs, which is most of what such a read costs.
package wakeup

import (
	"context"
	"encoding/binary"
	"os"
	"strings"
	"sync/atomic"
	"time"
)

const (
	devicePath = "/dev/cpu_dma_latency"
	driverPath = "/sys/devices/system/cpu/cpuidle/current_driver"

	// shallow is the longest wake-up that is asked for, in µs: processors sleep no
	// deeper than their first states.
	shallow = 10
	// polling is that for the guests whose only state besides polling is to halt.
	polling = 0
	// anything is the kernel's own default, which asks for nothing.
	anything = 2_000_000_000

	// near is how soon one follows another, and streak how many do before the
	// kernel is asked.
	near, streak = time.Millisecond, 8
	// hold is how long the kernel is asked beyond the last.
	hold = 2 * time.Millisecond
)

// Latency is one request to the kernel. The nil one does nothing.
type Latency struct {
	f     *os.File
	value uint32
	now   func() time.Duration // since some moment

	last   atomic.Int64 // Note was called, by now
	near   atomic.Int64 // calls that followed one another
	held   atomic.Bool
	wanted chan struct{}
	took   atomic.Int64 // ns that the kernel was asked for something
}

// Open returns a request that asks for nothing yet. Error: that of the file the
// kernel takes it by, which wants root.
func Open() (*Latency, error) {
	driver, err := os.ReadFile(driverPath)
	value := uint32(shallow)
	if err == nil && strings.TrimSpace(string(driver)) == "haltpoll" {
		value = polling
	}
	begun := time.Now()
	return open(devicePath, value, func() time.Duration { return time.Since(begun) })
}

func open(path string, value uint32, now func() time.Duration) (*Latency, error) {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return nil, err
	}
	l := &Latency{f: f, value: value, now: now, wanted: make(chan struct{}, 1)}
	return l, nil
}

// Note says that one more is done now. It takes some 50 ns.
func (l *Latency) Note() {
	if l == nil {
		return
	}
	now := int64(l.now())
	if now-l.last.Swap(now) > int64(near) {
		l.near.Store(0)
		return
	}
	if l.held.Load() || l.near.Add(1) < streak {
		return
	}
	select {
	case l.wanted <- struct{}{}:
	default:
	}
}

// Run asks the kernel as Note says, until ctx ends, or the kernel takes no request.
func (l *Latency) Run(ctx context.Context) {
	if l == nil {
		return
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-l.wanted:
		}
		begun := l.now()
		l.held.Store(true)
		err := l.ask(l.value)
		for err == nil && l.now()-time.Duration(l.last.Load()) < hold {
			select {
			case <-ctx.Done():
				return // closing the file is the end of it
			case <-time.After(hold):
			}
		}
		// Before it is let go: a Note that comes meanwhile counts for the next time.
		l.near.Store(0)
		l.held.Store(false)
		err = l.ask(anything)
		l.took.Add(int64(l.now() - begun))
		if err != nil {
			return
		}
	}
}

// Held is how long the kernel has been asked for something, all in all.
func (l *Latency) Held() time.Duration {
	if l == nil {
		return 0
	}
	return time.Duration(l.took.Load())
}

// Close takes the request back.
func (l *Latency) Close() error {
	if l == nil {
		return nil
	}
	return l.f.Close()
}

func (l *Latency) ask(micros uint32) error {
	_, err := l.f.WriteAt(binary.NativeEndian.AppendUint32(nil, micros), 0)
	return err
}
