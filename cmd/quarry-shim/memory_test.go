package main_test

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"unsafe"
)

// maxAnonymous is what a shim may hold, however many reads wait.
const maxAnonymous = 8 << 20

// TestMemoryIsBounded looks at a shim with more than the 128 requests that a loop
// device keeps open, all stalled, and at the same one after much reading.
func TestMemoryIsBounded(t *testing.T) {
	r := newRig(t)
	r.build = buildPlain // the race detector has memory of its own
	r.startShim()
	const readers = 300
	results := r.readBlocks(readers)
	r.waitFor("the loop device to be full", func() bool { return r.inFlight() >= 128 })
	stalled := r.anonymous()
	r.killReader() // every one of them waits in the shim now
	r.startReader(r.image)
	r.waitFor("a read to reach the next reader", func() bool { return r.counts().Readers == 1 })
	replayed := r.anonymous()
	r.unstall()
	r.wantAll(results, readers)
	for range 5 {
		r.compareTree()
	}
	busy := r.anonymous()
	t.Logf("anonymous memory: %d KiB with stalled reads, %d KiB sent again, %d KiB after reading", stalled>>10, replayed>>10, busy>>10)
	if most := max(stalled, replayed, busy); most > maxAnonymous {
		t.Errorf("shim holds %d KiB, at most %d are allowed", most>>10, int64(maxAnonymous)>>10)
	}
}

// readBlocks reads blocks that no two readers share, while the reader is stalled.
func (r *rig) readBlocks(readers int) <-chan error {
	r.t.Helper()
	results := make(chan error, readers)
	begin := make(chan struct{})
	const files, block = 100, 4096
	for i := range readers {
		name, off := fmt.Sprintf("d%d/f%d", i%5, i%files), int64(i/files)*4*block
		f, err := os.OpenFile(r.path(name), os.O_RDONLY|syscall.O_DIRECT, 0) // which reads
		if err != nil {
			r.t.Fatal(err)
		}
		go func() { // ends with the stall
			defer f.Close()
			<-begin
			p := make([]byte, 2*block)
			p = p[block-int(uintptr(unsafe.Pointer(&p[0]))%block):][:block]
			_, err := f.ReadAt(p, off)
			if err == nil && !bytes.Equal(p, r.want[name][off:off+block]) {
				err = fmt.Errorf("%s at %d: wrong bytes", name, off)
			}
			results <- err
		}()
	}
	if err := os.WriteFile(r.stall, nil, 0o600); err != nil {
		r.t.Fatal(err)
	}
	close(begin)
	return results
}

// anonymous returns the shim's anonymous memory in bytes.
func (r *rig) anonymous() int64 {
	r.t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", r.shim.Process.Pid))
	if err != nil {
		r.t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		var kib int64
		if n, _ := fmt.Sscanf(line, "Anonymous: %d kB", &kib); n == 1 {
			return kib << 10
		}
	}
	r.t.Fatal("smaps_rollup has no Anonymous")
	return 0
}

// inFlight returns how many requests the kernel has open on the shim's device.
func (r *rig) inFlight() int {
	r.t.Helper()
	state, err := os.ReadFile(r.dir + "/shim.json")
	if err != nil {
		r.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(state), `"/dev/`)
	device, _, _ := strings.Cut(rest, `"`)
	raw, err := os.ReadFile("/sys/block/" + device + "/inflight")
	if err != nil {
		r.t.Fatal(err)
	}
	var reads, writes int
	fmt.Sscan(string(raw), &reads, &writes)
	return reads
}
