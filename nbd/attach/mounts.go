package attach

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// busyGrace is how long a busy file system is asked to unmount before it is
// detached lazily: long enough for a program that is just closing files.
const busyGrace = 2 * time.Second

// stuckAfter is how long one unmount may take.
const stuckAfter = time.Second

// mounted returns how many file systems are mounted on path, one over another.
func mounted(path string) (n int, err error) {
	err = eachMount(func(m MountEntry) {
		if m.Point == path {
			n++
		}
	})
	return n, err
}

// sourceOf returns what the last file system mounted on path, which has no symlink in
// it, was mounted from, as the mount table has it; "" for none.
func sourceOf(path string) (source string, err error) {
	err = eachMount(func(m MountEntry) {
		if m.Point == path {
			source = m.Source
		}
	})
	return source, err
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
