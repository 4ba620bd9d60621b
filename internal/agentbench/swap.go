package agentbench

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"quarry/internal/swap"
)

// Swap is what is switched on for a run: a file or a zram of a size, or nothing.
type Swap struct {
	Kind string // "file", "zram", or "none" for what the machine has by itself
	Size int64  // 0 is all that the agents want, and a half more
}

// minSwap is the least that is worth making.
const minSwap = 1 << 20

// ParseSwap reads none, KIND or KIND:SIZE; size reads the latter.
func ParseSwap(text string, size func(string) (int64, error)) (Swap, error) {
	kind, bytes, sized := strings.Cut(text, ":")
	s := Swap{Kind: kind}
	if kind != "file" && kind != "zram" && (kind != "none" || sized) {
		return s, fmt.Errorf("swap %q: want none, file, zram, file:SIZE or zram:SIZE", text)
	}
	if sized {
		var err error
		if s.Size, err = size(bytes); err != nil {
			return s, err
		}
		if s.Size < minSwap {
			return s, fmt.Errorf("swap %q: want 1M or more", text)
		}
	}
	return s, nil
}

// swapArea is one that was made.
type swapArea struct {
	Swap
	path   string
	device string // the number of a zram, "" with a file
	isOn   bool
}

func (s *swapArea) String() string {
	if s.Kind == "none" {
		return "what the machine has"
	}
	return s.Kind + ", " + mib(s.Size)
}

// on makes it and switches it on. Where there is swap already, which pages go where
// could not be told: that is refused.
func (s Swap) on(dir string, wanted int64) (*swapArea, error) {
	a := &swapArea{Swap: s}
	if s.Kind == "none" {
		return a, nil
	}
	raw, err := os.ReadFile("/proc/swaps")
	if err != nil {
		return nil, fmt.Errorf("this machine has no swap to measure with (--swap none does without): %w", err)
	}
	if lines := strings.Split(strings.TrimSpace(string(raw)), "\n"); len(lines) > 1 {
		return nil, fmt.Errorf("this machine has swap already, on %s: --swap none measures with it", strings.Fields(lines[1])[0])
	}
	if a.Size == 0 {
		a.Size = wanted + wanted/2
	}
	a.Size -= a.Size % int64(os.Getpagesize())
	if s.Kind == "zram" {
		err = a.makeZram()
	} else {
		path := filepath.Join(dir, "swap")
		if err = swap.MakeFile(path, a.Size); err == nil {
			a.path = path
		}
	}
	if err == nil {
		err = swap.On(a.path)
	}
	if a.isOn = err == nil; !a.isOn {
		return nil, errors.Join(fmt.Errorf("make swap (--swap none does without): %w", err), a.remove())
	}
	return a, nil
}

// off switches it off, for which what is in it must find room, and removes it. Where it
// stays on it is kept, as the kernel reads it.
func (s *swapArea) off() error {
	if s.Kind == "none" {
		return nil
	}
	if err := swap.Off(s.path); err != nil {
		return fmt.Errorf("swap stays on, and %s is kept: swapoff it when memory is free, then remove it: %w", s.path, err)
	}
	s.isOn = false
	return s.remove()
}

func (s *swapArea) remove() error {
	if s.device != "" {
		os.WriteFile("/sys/block/zram"+s.device+"/reset", []byte("1"), 0) // else it is not removed, which is told
		return os.WriteFile("/sys/class/zram-control/hot_remove", []byte(s.device), 0)
	}
	if s.path != "" {
		return os.Remove(s.path)
	}
	return nil
}

// makeZram adds a device of its own, so that it is nobody else's.
func (s *swapArea) makeZram() error {
	raw, err := os.ReadFile("/sys/class/zram-control/hot_add")
	if err != nil {
		return fmt.Errorf("add a zram (modprobe zram): %w", err)
	}
	s.device = strings.TrimSpace(string(raw))
	sys := "/sys/block/zram" + s.device + "/"
	os.WriteFile(sys+"comp_algorithm", []byte("lz4"), 0) // else the kernel's default
	if err := os.WriteFile(sys+"disksize", []byte(strconv.FormatInt(s.Size, 10)), 0); err != nil {
		return err
	}
	s.path = "/dev/zram" + s.device
	f, err := os.OpenFile(s.path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(swap.Header(s.Size), 0)
	return errors.Join(err, f.Close())
}

// used is what lies in swap, and what a zram takes of the machine's memory for it.
func (s *swapArea) used() (swapped, zram int64) {
	raw, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0
	}
	var total, free int64
	for line := range strings.Lines(string(raw)) {
		fmt.Sscanf(line, "SwapTotal: %d", &total)
		fmt.Sscanf(line, "SwapFree: %d", &free)
	}
	if s.device != "" {
		if raw, err := os.ReadFile("/sys/block/zram" + s.device + "/mm_stat"); err == nil {
			if f := strings.Fields(string(raw)); len(f) > 2 {
				zram, _ = strconv.ParseInt(f[2], 10, 64) // mem_used_total
			}
		}
	}
	return (total - free) << 10, zram
}
