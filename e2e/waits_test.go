package e2e_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
)

// untilSo runs a command again and again until it succeeds, or with ! until it fails, for
// what comes a while after what causes it: until PROGRAM ARG….
func untilSo(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) == 0 {
		ts.Fatalf("usage: [!] until PROGRAM ARG…")
	}
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		err := ts.Exec(args[0], args[1:]...)
		if (err != nil) == neg {
			return
		}
		if time.Now().After(end) {
			ts.Fatalf("not within a minute (%v)", err)
		}
	}
}

// stays returns what is left after a minute: what has been ended may take a moment to be
// taken apart.
func stays(leftNow func() []string) (left []string) {
	for end := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
		if left = leftNow(); len(left) == 0 || time.Now().After(end) {
			return left
		}
	}
}

// stalled waits until reads of the images that are mounted below a folder have been under
// way for a while, as those are that nobody answers: stalled DIR.
func stalled(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: stalled DIR")
	}
	var look stalledReads
	for end := time.Now().Add(time.Minute); !look.seen(ts.MkAbs(args[0])); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			ts.Fatalf("nothing waits for an image below %s", args[0])
		}
	}
}

// stalledReads counts how often in a row reads of images were seen under way.
type stalledReads int

// stalledLooks is how often that has to be for reads that nobody answers: those that are
// answered take a millisecond.
const stalledLooks = 50

// seen looks at the mounts below a folder, every few milliseconds, and reports whether
// their reads are stalled.
func (n *stalledReads) seen(base string) bool {
	if *n++; readsInFlight(base) == 0 {
		*n = 0
	}
	return *n >= stalledLooks
}

// readsInFlight counts the reads that the block devices of mounts below a folder wait for.
func readsInFlight(base string) (n int) {
	raw, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(raw)) {
		const deviceField, pointField = 2, 4
		f := strings.Fields(line)
		if len(f) <= pointField || !strings.HasPrefix(f[pointField], base+"/") {
			continue
		}
		text, _ := os.ReadFile(filepath.Join("/sys/dev/block", f[deviceField], "inflight")) // other file systems have none
		var reads int
		if _, err := fmt.Sscan(string(text), &reads); err == nil {
			n += reads
		}
	}
	return n
}
