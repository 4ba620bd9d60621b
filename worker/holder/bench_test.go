package holder_test

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"quarry/worker/sandbox"
)

// BenchmarkExec is the round trip of `true`: start, end, and the state with both.
func BenchmarkExec(b *testing.B) {
	r := newRig(b)
	n := 0
	for b.Loop() {
		n++
		id := fmt.Sprintf("b%d", n)
		if _, err := r.c.Exec(r.ctx, sandbox.ExecSpec{ID: id}, process("/bin/true")); err != nil {
			b.Fatal(err)
		}
		r.want(r.wait(id), 0, sandbox.ExecReasonExited)
	}
	r.memory(b)
}

// BenchmarkState is the round trip of a call that asks the holder alone.
func BenchmarkState(b *testing.B) {
	r := newRig(b)
	for b.Loop() {
		if _, err := r.c.State(r.ctx); err != nil {
			b.Fatal(err)
		}
	}
	r.memory(b)
}

// BenchmarkPause is a pause and its resume.
func BenchmarkPause(b *testing.B) {
	r := newRig(b)
	for b.Loop() {
		if err := r.c.Pause(r.ctx, false); err != nil {
			b.Fatal(err)
		}
		if err := r.c.Resume(r.ctx); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkOutput is how fast the holder takes what a command writes.
func BenchmarkOutput(b *testing.B) {
	r := newRig(b)
	const size = 256 << 20
	b.SetBytes(size)
	n := 0
	for b.Loop() {
		n++
		r.run(sandbox.ExecSpec{ID: fmt.Sprintf("b%d", n)}, fmt.Sprintf("head -c %d /dev/zero", size))
	}
	r.memory(b)
}

// memory reports what the holder has in memory.
func (r *rig) memory(b *testing.B) {
	st, err := r.c.State(r.ctx)
	if err != nil {
		b.Fatal(err)
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", st.PID))
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		var kib float64
		if n, _ := fmt.Sscanf(line, "VmRSS: %f kB", &kib); n == 1 {
			b.ReportMetric(kib, "RSS-KiB")
		}
		if n, _ := fmt.Sscanf(line, "RssAnon: %f kB", &kib); n == 1 {
			b.ReportMetric(kib, "anonymous-KiB")
		}
	}
}
