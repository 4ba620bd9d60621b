package main

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"quarry/nbd/attach"
	"quarry/store"
	"quarry/worker/reader"
	"quarry/worker/timeline"
)

// report is the table that explain prints. What of it is of an image or a store
// is escaped.
type report struct{ b strings.Builder }

func (t *report) line(format string, args ...any) {
	for i, a := range args {
		if s, ok := a.(string); ok {
			args[i] = oneLine(s)
		}
	}
	fmt.Fprintf(&t.b, format+"\n", args...)
}

func (t *report) run(r *explainedRun) {
	if r.Name != "" {
		t.line("run %s", r.Name)
	}
	id := r.ImageID.String()
	if r.ImageID.IsZero() {
		id = "(not had)"
	}
	t.line("image %s %s", r.Image, id)
	output := "no output"
	if r.FirstOutputMillis > 0 {
		output = fmt.Sprintf("first output after %.1f ms", r.FirstOutputMillis)
	}
	if r.Started {
		t.line("exit status %d, %s, ended after %.1f ms", r.ExitStatus, output, r.DurationMillis)
	} else {
		t.line("exit status %d: the command did not run, given up after %.1f ms", r.ExitStatus, r.DurationMillis)
	}
	if r.Error != "" {
		t.line("error: %s", r.Error)
	}
	t.steps(r.Steps, r.DurationMillis)
	t.line("  %-46s %10s  %10.1f ms", "in no step", "", r.UnnamedMillis)
	t.line("")
	if r.ReaderRestarts > 0 {
		t.line("the mount had to find another reader %d times", r.ReaderRestarts)
	}
	t.figures(r.Stats, r.Unknown)
}

func (t *report) image(e *explainedImage) {
	t.line("image %s", e.ID.String())
	for _, m := range e.Mounts {
		state := "serves"
		if !m.Serving {
			state = "HAS ENDED: reads get EIO"
		}
		t.line("")
		t.line("mount %s on %s, attached by %s; shim %d %s", m.Root, m.Device, m.Attach, m.PID, state)
		if len(m.Steps) > 0 {
			t.line("began %s", m.Began.Format("2006-01-02 15:04:05.000"))
			t.steps(m.Steps, 0)
		}
		t.line("reads answered with EIO: %d; connections made anew to a reader: %d", m.FailedReads, m.NewReaders)
	}
	if len(e.Mounts) == 0 {
		t.line("not mounted; a reader has it open")
	}
	t.line("")
	if e.Reader == nil {
		t.line("what the reader counts is not known: %s", e.Unknown)
		return
	}
	t.line("since %s, when the reader opened it:", e.Reader.Opened.Format("2006-01-02 15:04:05.000"))
	if e.NoDisk != "" {
		t.line("NOTE: the reader has no disk cache: %s", e.NoDisk)
	}
	t.figures(*e.Reader, e.Unknown)
	t.line("")
	t.line("the network line is the reader's: each command that mounted the image made one more request, for statements and content, which a run counts")
}

// stepText says what a step is.
var stepText = map[string]string{
	timeline.Sweep:       "clean up after killed commands",
	timeline.Store:       "make sure that the store's server runs",
	timeline.Local:       "verify the copy of the image that is here",
	timeline.Start:       "start request: statements and content",
	timeline.Save:        "save the image",
	timeline.Lock:        "wait for others that (un)mount the image",
	timeline.Reader:      "make sure that a reader runs",
	timeline.Shim:        "start a shim, which mounts the image",
	timeline.ShimLink:    "  it connects; the reader opens the image",
	timeline.ShimAttach:  "  it attaches the device",
	timeline.ShimMount:   "    mount(2)",
	timeline.Probe:       "see that the mount answers",
	timeline.Figures:     "ask the reader for its figures",
	timeline.Lookup:      "find command and user in the image",
	timeline.Sandbox:     "make the sandbox's folder",
	timeline.Runsc:       "runsc creates and starts the sandbox",
	timeline.Command:     "the command",
	timeline.FirstOutput: "  its first output",
	timeline.Remove:      "remove the sandbox",
	timeline.Release:     "give the mount back, or unmount",

	attach.StepLink:   "connect; the reader opens the image",
	attach.StepAttach: "attach the device and mount it",
	attach.StepMount:  "  mount(2)",
}

// barWidth is that of the bars, in characters: a line fits 110.
const barWidth = 30

func (t *report) steps(steps []timeline.Step, total float64) {
	for _, s := range steps {
		total = max(total, s.Start+s.Took)
	}
	t.line("")
	t.line("  %-46s %10s  %13s", "step", "begins at", "takes")
	for _, s := range steps {
		t.line("  %-46s %7.1f ms  %10.1f ms  |%s|", cmp.Or(stepText[s.Name], s.Name), s.Start, s.Took, bar(s, total))
	}
}

// bar draws when a step was, of a line for the whole time.
func bar(s timeline.Step, total float64) string {
	if total <= 0 {
		return strings.Repeat(" ", barWidth)
	}
	at := func(ms float64) int { return int(min(max(ms, 0)/total, 1) * barWidth) }
	from := min(at(s.Start), barWidth-1)
	to := max(at(s.Start+s.Took), from+1) // short is shown too
	return strings.Repeat(" ", from) + strings.Repeat("=", to-from) + strings.Repeat(" ", barWidth-to)
}

// tierText says what a tier is.
var tierText = map[string]string{
	reader.TierMemory: "reader's memory", reader.TierDisk: "disk cache",
	reader.TierStart: "start answer", reader.TierStore: "store node",
}

func (t *report) figures(st reader.Stats, unknown string) {
	if unknown != "" {
		t.line("NOTE: %s", unknown)
	}
	t.line("%s were read from the device, of %d chunks", sizeText(st.DeviceBytes), st.Touched.Chunks)
	t.line("  %-20s %10s %12s %14s %12s", "from", "reads", "bytes", "chunks taken", "bytes")
	rest := st.DeviceBytes - st.OwnBytes
	for _, k := range st.Tiers {
		rest -= k.ReadBytes
		taken, bytes := "-", "-"
		if k.Tier != reader.TierMemory {
			taken, bytes = fmt.Sprint(k.Fetched.Chunks), sizeText(k.Fetched.Bytes)
		}
		t.line("  %-20s %10d %12s %14s %12s", cmp.Or(tierText[k.Tier], k.Tier), k.Reads, sizeText(k.ReadBytes), taken, bytes)
	}
	t.line("  %-20s %10s %12s", "bootstrap, zeros", "", sizeText(st.OwnBytes))
	if rest > 0 {
		t.line("  %-20s %10s %12s", "NOT ANSWERED", "", sizeText(rest))
	}
	t.line("network: %d requests, %s on the wire; store nodes read %s from their buckets", st.Requests, sizeText(st.WireBytes), sizeText(st.BucketBytes))
	if st.Pulled.Chunks > 0 {
		t.line("pulled into the disk cache: %d chunks of %s", st.Pulled.Chunks, sizeText(st.Pulled.Bytes))
	}
	p := st.Prefetch
	t.line("fetched ahead: %d chunks of %s; used %d, gone unused %d, failed %d", p.Fetched.Chunks, sizeText(p.Fetched.Bytes), p.Used.Chunks, p.Unused.Chunks, p.Failed)
	if h := st.Hedged; h.Asked.Chunks > 0 || h.Again > 0 {
		t.line("late, so asked for again: %d chunks of %s by reads, %d by %d second requests and after failures; %d chunks of %s came twice",
			h.Asked.Chunks, sizeText(h.Asked.Bytes), h.Again, h.Requests, h.Twice.Chunks, sizeText(h.Twice.Bytes))
	}
	if st.DiskBad > 0 || st.DiskFailed > 0 {
		t.line("disk cache: %d bad copies dropped, %d reads failed by the disk; the store was asked instead", st.DiskBad, st.DiskFailed)
	}
	t.failures(st)
	t.slowest(st.Slowest)
}

func (t *report) failures(st reader.Stats) {
	t.line("")
	if st.FailedReads == 0 {
		t.line("no read failed")
		return
	}
	var parts []string
	unknown := st.FailedReads
	for _, o := range store.Outcomes {
		if n := st.Failed[o]; n > 0 {
			unknown -= n
			parts = append(parts, fmt.Sprintf("%s %d", o, n))
		}
	}
	if unknown > 0 { // the shim has counted what no reader tells of
		parts = append(parts, fmt.Sprintf("not known why %d", unknown))
	}
	t.line("%d FAILED READS: %s", st.FailedReads, strings.Join(parts, ", "))
	times := map[reader.ReadError]int{}
	for _, e := range st.Errors {
		e.When = time.Time{}
		times[e]++
	}
	for _, e := range st.Errors {
		e.When = time.Time{}
		n := times[e]
		delete(times, e)
		switch {
		case n == 1:
			t.line("  %-12s %s  chunk %s: %s", string(e.Outcome), e.Path, e.Chunk.String(), e.Err)
		case n > 1:
			t.line("  %-12s %s  chunk %s, %d times: %s", string(e.Outcome), e.Path, e.Chunk.String(), n, e.Err)
		}
	}
	if more := st.FailedReads - int64(len(st.Errors)); more > 0 {
		t.line("  and %d more", more)
	}
}

// maxSlowest is how many of the slowest reads the table shows.
const maxSlowest = 10

func (t *report) slowest(reads []reader.SlowRead) {
	t.line("")
	if len(reads) == 0 {
		t.line("no read waited for a chunk")
		return
	}
	reads = slices.SortedStableFunc(slices.Values(reads), func(a, b reader.SlowRead) int { return cmp.Compare(b.Wait, a.Wait) })
	t.line("slowest reads")
	t.line("  %12s  %-16s %s", "waited", "from", "file")
	for _, s := range reads[:min(len(reads), maxSlowest)] {
		t.line("  %9.1f ms  %-16s %s (chunk %d)", s.Wait, cmp.Or(tierText[s.Tier], s.Tier, "nowhere: EIO"), s.Path, s.Number)
	}
}

// sizeText writes bytes for people.
func sizeText(n int64) string {
	switch {
	case n < 10<<10:
		return fmt.Sprintf("%d B", n)
	case n < 10<<20:
		return fmt.Sprintf("%.1f KiB", float64(n)/(1<<10))
	}
	return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20))
}
