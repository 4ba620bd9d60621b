package attach

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// busyGrace is how long a busy file system is asked to unmount before it is
// detached lazily: long enough for a program that is just closing files.
const busyGrace = 2 * time.Second

// stuckAfter is how long one unmount may take.
const stuckAfter = time.Second

// mounted returns how many file systems are mounted on path, one over another.
func mounted(path string) (int, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	return countMounts(f, path)
}

// countMounts reads the form of proc_pid_mountinfo(5): the fifth field is the
// mount point, its odd bytes written in octal.
func countMounts(r io.Reader, path string) (int, error) {
	n := 0
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20) // overlay options can be long
	for lines.Scan() {
		fields := strings.SplitN(lines.Text(), " ", 6)
		if len(fields) == 6 && unescape(fields[4]) == path {
			n++
		}
	}
	return n, lines.Err()
}

// sourceOf returns what the last file system mounted on path, which has no symlink in
// it, was mounted from, as the mount table has it; "" for none.
func sourceOf(path string) (source string, err error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return "", err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		place, kind, _ := strings.Cut(lines.Text(), " - ") // behind any number of fields
		fields, what := strings.SplitN(place, " ", 6), strings.Fields(kind)
		if len(fields) == 6 && len(what) > 1 && unescape(fields[4]) == path {
			source = unescape(what[1])
		}
	}
	return source, lines.Err()
}

func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+4 <= len(s) {
			if v, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(v))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// unmountAll unmounts whatever is mounted on path; nothing is fine too. What
// stays busy for so long is detached: it vanishes from path and lives on for its
// users.
//
// An unmount of the last user waits for the reads under way; when it does so for
// long, stuck, if not nil, is called to fail them: nobody is left to want them.
func unmountAll(ctx context.Context, path string, grace time.Duration, stuck func()) error {
	lazyAt := time.Now().Add(grace)
	for {
		n, err := mounted(path)
		if err != nil || n == 0 {
			return err
		}
		flags := unix.UMOUNT_NOFOLLOW
		if time.Now().After(lazyAt) || ctx.Err() != nil {
			flags |= unix.MNT_DETACH
		}
		err = unmount(path, flags, stuck)
		switch {
		case errors.Is(err, unix.EBUSY) && flags&unix.MNT_DETACH == 0:
			sleep(ctx, 20*time.Millisecond)
		case errors.Is(err, unix.EINVAL) && time.Now().Before(lazyAt.Add(stuckAfter)): // another was faster
			sleep(ctx, 5*time.Millisecond)
		case err != nil:
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
}

func unmount(path string, flags int, stuck func()) error {
	if stuck != nil {
		t := time.AfterFunc(stuckAfter, stuck)
		defer t.Stop()
	}
	return isolated(func() error { return unix.Unmount(path, flags) })
}
