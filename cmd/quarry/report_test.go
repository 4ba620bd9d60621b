package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"quarry/nbd/attach"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/worker"
	"quarry/worker/reader"
	"quarry/worker/timeline"
)

func sampleRun(path, reason string) *explainedRun {
	d := chunk.Sum([]byte("chunk"))
	failed := reader.ReadError{Path: path, Chunk: d, Outcome: store.Corrupt, Err: reason}
	again := failed
	again.When = time.Unix(1, 0)
	return newExplainedRun("20260102T030405.006Z-abcdefgh", worker.Record{
		Image: "t/ok", ImageID: d, DurationMillis: 100, FirstOutputMillis: 60, Started: true, ExitStatus: 1, Error: reason,
		Stats: reader.Stats{
			DeviceBytes: 3000, OwnBytes: 1100, Requests: 4, FailedReads: 5, Failed: map[store.Outcome]int64{store.Corrupt: 3, store.Missing: 2},
			Hedged:  reader.Hedged{Asked: reader.Count{Chunks: 2, Bytes: 30}, Twice: reader.Count{Chunks: 1, Bytes: 20}, Requests: 4, Again: 5},
			Errors:  []reader.ReadError{failed, again, {Path: "/other", Chunk: d, Outcome: store.Missing, Err: "gone"}},
			Tiers:   []reader.Tier{{Tier: reader.TierMemory, Reads: 2, ReadBytes: 1000}, {Tier: reader.TierStore, Reads: 1, ReadBytes: 500}},
			Slowest: []reader.SlowRead{{Path: "/fast", Wait: 1, Tier: reader.TierDisk}, {Path: path, Wait: 9, Tier: ""}},
		},
		Steps: []timeline.Step{{Name: timeline.Runsc, Start: 10, Took: 50}, {Name: "a new step\x1b[2J", Start: 20, Took: 60}},
	})
}

func table(r *explainedRun) string {
	var t report
	t.run(r)
	return t.b.String()
}

func TestExplainAddsUpAndNamesWhatFailed(t *testing.T) {
	text := table(sampleRun("/usr/bin/x", "bad bytes"))
	for _, want := range []string{
		"run 20260102T030405.006Z-abcdefgh\n",
		"exit status 1, first output after 60.0 ms, ended after 100.0 ms\n",
		"error: bad bytes\n",
		"|   ===============            |", // 10 to 60 of 100 ms, of 30 columns
		"in no step                                                       30.0 ms",
		"bootstrap, zeros                      1100 B\n",
		"NOT ANSWERED                           400 B\n",
		"asked for again: 2 chunks of 30 B by reads, 5 by 4 second requests and after failures; 1 chunks of 20 B came twice\n",
		"5 FAILED READS: corrupt 3, missing 2\n",
		"  corrupt      /usr/bin/x  chunk sha256:",
		", 2 times: bad bytes\n",
		"  and 2 more\n",
		"nowhere: EIO     /usr/bin/x (chunk 0)\n",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
	if strings.Index(text, "/usr/bin/x (chunk") > strings.Index(text, "/fast (chunk") {
		t.Errorf("the slowest read is not the first one:\n%s", text)
	}
	if n := strings.Count(text, "bad bytes"); n != 2 {
		t.Errorf("one failure stands %d times in\n%s", n-1, text)
	}
}

func TestExplainWritesNothingOnATerminalButText(t *testing.T) {
	r := sampleRun("/evil\x1b]0;title\a\n\u009b", "reason\r\x1b[31m")
	text := table(r)
	for _, c := range text {
		if isUnprintable(c) && c != '\n' {
			t.Fatalf("control character %q in\n%q", c, text)
		}
	}
	if !strings.Contains(text, `/evil\x1b]0;title\a\n\u009b`) {
		t.Errorf("the path is not shown escaped:\n%s", text)
	}
	doc, err := json.Marshal(explained{Version: explainVersion, Run: r})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range string(printableJSON(doc)) {
		if isUnprintable(c) {
			t.Fatalf("control character %q in JSON", c)
		}
	}
}

func TestAnEmptyRunIsExplained(t *testing.T) {
	text := table(newExplainedRun("", worker.Record{Image: "t/none", Error: "no such image", ExitStatus: 125, DurationMillis: 7}))
	for _, want := range []string{"image t/none (not had)\n", "exit status 125: the command did not run, given up after 7.0 ms\n", "no read failed", "no read waited"} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is missing in\n%s", want, text)
		}
	}
}

// TestARecordHasTheStatusThatTheShellHas, also of a run that did not come to run
// its command, or whose reads failed.
func TestARecordHasTheStatusThatTheShellHas(t *testing.T) {
	failed := errors.New("a read failed")
	for what, tc := range map[string]struct {
		end  worker.Ended
		err  error
		want int
	}{
		"ran":              {worker.Ended{Started: true, Status: 3}, nil, 3},
		"ran well":         {worker.Ended{Started: true}, nil, 0},
		"no image":         {worker.Ended{}, failed, exitRunOurs},
		"no command":       {worker.Ended{}, fmt.Errorf("x: %w", worker.ErrCommandNotFound), exitRunNotFound},
		"not executable":   {worker.Ended{}, fmt.Errorf("x: %w", worker.ErrNotExecutable), exitRunNotExec},
		"ran, with errors": {worker.Ended{Started: true, Status: 3}, failed, exitRunOurs},
	} {
		r := recordOf("t/ok", nil, reader.Stats{}, tc.end, tc.err)
		if r.ExitStatus != tc.want || r.Started != tc.end.Started || (r.Error != "") != (tc.err != nil) {
			t.Errorf("%s: status %d, started %t, error %q; want %d", what, r.ExitStatus, r.Started, r.Error, tc.want)
		}
	}
}

func TestSizesOfACache(t *testing.T) {
	for text, want := range map[string]int64{
		"": 0, "none": -1, "33554432": 32 << 20, "32M": 32 << 20, "20G": 20 << 30, "1T": 1 << 40,
	} {
		if got, err := (cacheSize{text}).bytes(); got != want || err != nil {
			t.Errorf("%q is %d, error %v, want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"1", "-1", "1K", "x", "G", "1GB", "9999999999T", "99999999999999999999", "1.5G", " 1G", "9T"} {
		if n, err := (cacheSize{text}).bytes(); err == nil {
			t.Errorf("%q is taken as %d", text, n)
		} else if exitCode(err) != exitUsage {
			t.Errorf("%q: exit code %d, want usage", text, exitCode(err))
		}
	}
}

func TestReadTimeouts(t *testing.T) {
	for text, want := range map[string]time.Duration{"": 0, "1s": time.Second, "1m30s": 90 * time.Second, "240s": 240 * time.Second} {
		if got, err := (readTimeout{text}).duration(); got != want || err != nil {
			t.Errorf("%q is %s, error %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"0", "10", "999ms", "240.1s", "-5s", "1h", "x", " 5s", "99999999999999h"} {
		if d, err := (readTimeout{text}).duration(); exitCode(err) != exitUsage {
			t.Errorf("%q is %s, error %v, want a usage error", text, d, err)
		}
	}
}

func TestReadAheadHasARange(t *testing.T) {
	for _, n := range []int{-1, attach.MaxReadAhead + 1, 1 << 40} {
		w := workerFlags{readAhead: n, dir: t.TempDir() + "/w"}
		if _, err := w.worker(t.Context(), io.Discard); exitCode(err) != exitUsage || !strings.Contains(err.Error(), "--read-ahead") {
			t.Errorf("%d: %v, want a usage error", n, err)
		}
		if _, err := os.Stat(w.dir); err == nil {
			t.Errorf("%d: the worker folder was made", n)
		}
	}
}

func TestFlagsOfAReaderArePassedOn(t *testing.T) {
	for _, f := range []readerFlags{{}, {cacheSize: cacheSize{"none"}}, {readTimeout: readTimeout{"7s"}}, {sleep: true}, {cacheSize{"1G"}, readTimeout{"7s"}, true}} {
		var got readerFlags
		c := &cobra.Command{}
		got.flags(c)
		if err := c.ParseFlags(f.args()); err != nil || got != f {
			t.Errorf("%+v arrives as %+v, error %v", f, got, err)
		}
	}
}

func TestAPullThatDoesNotFitSaysWhatToDo(t *testing.T) {
	res := reader.PullResult{All: reader.Count{Chunks: 9, Bytes: 90}, Kept: reader.Count{Chunks: 5, Bytes: 50}, Limit: 64 << 20}
	for pinned, beside := range map[int64]bool{0: false, 2: true} {
		res.OthersPinned = pinned
		err := pullError(res)
		if err == nil || !strings.Contains(err.Error(), "4 of 9 chunks did not stay: the disk cache of 64.0 MiB") ||
			!strings.Contains(err.Error(), "--cache-size") || strings.Contains(err.Error(), "pinned of 2 others") != beside {
			t.Errorf("%d others pinned: %v", pinned, err)
		}
	}
	res.Kept = res.All
	if err := pullError(res); err != nil {
		t.Error(err)
	}
}

func TestProgressOfAPullIsALineForEachTenth(t *testing.T) {
	var out strings.Builder
	p := newProgress(&out)
	for i := range int64(101) {
		p.step(pullStep("t/ok", reader.PullProgress{Done: reader.Count{Chunks: i}, All: reader.Count{Chunks: 100, Bytes: 1000}}))
	}
	p.end()
	if n := strings.Count(out.String(), "\n"); n != 11 {
		t.Errorf("%d lines, want 11:\n%s", n, out.String())
	}
}
