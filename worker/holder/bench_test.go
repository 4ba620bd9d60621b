package holder_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"quarry/worker/holder"
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

// BenchmarkStart is a sandbox from its folder to its first process, and its end.
func BenchmarkStart(b *testing.B) {
	var spawn, runsc, all, end time.Duration
	n := 0
	for b.Loop() {
		b.StopTimer()
		c := config(b)
		b.StartTimer()
		begun := time.Now()
		cl, t, err := holder.Start(b.Context(), c)
		if err != nil {
			b.Fatal(err)
		}
		ran := time.Now()
		if _, err := cl.End(b.Context()); err != nil {
			b.Fatal(err)
		}
		spawn, runsc, all, end, n = spawn+t.Spawn, runsc+t.Runsc, all+ran.Sub(begun), end+time.Since(ran), n+1
		cl.Release(b.Context())
		cl.Close()
	}
	for name, d := range map[string]time.Duration{"spawn-ms": spawn, "runsc-ms": runsc, "start-ms": all, "end-ms": end} {
		b.ReportMetric(float64(d.Microseconds())/1000/float64(n), name)
	}
}
