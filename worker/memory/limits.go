package memory

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
)

// Limits says in sentences what this machine cannot do, given the folder of a
// sandbox's group or of the worker's, and a reading. The rest is done.
func Limits(dir string, r Reading) []string {
	var out []string
	if r.SwapTotal == 0 {
		out = append(out, "There is no swap: a sandbox that waits keeps its memory, and only what its Sentry can do without is freed; switch swap on, on zram or on a file.")
	} else if r.SwapFull() {
		out = append(out, "Swap is full: a sandbox that waits keeps its memory, or is written to disk whole.")
	}
	if _, err := os.Stat(filepath.Join(dir, "memory.usage_in_bytes")); err == nil {
		out = append(out, "The control groups are of version 1: memory is taken with memory.force_empty, which is ended when enough is taken, or by a lower limit for a moment; memory.reclaim needs version 2.")
	} else if _, err := os.Stat(filepath.Join(dir, "memory.reclaim")); errors.Is(err, fs.ErrNotExist) {
		out = append(out, "The kernel has no memory.reclaim, which is of Linux 5.19: a sandbox that waits keeps its memory.")
	}
	if r.NoPSI {
		out = append(out, "The kernel does not tell how long tasks wait for memory (psi=1 on its command line): only what is available counts.")
	}
	return out
}
