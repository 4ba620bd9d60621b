package holder

import (
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
)

// A restore on a full disk fails, and what it was made from is all that there is of the
// sandbox. So it is not begun without room, and one that has failed for that is undone:
// while the sandbox was being restored no packet reached it, so that of what may have run
// of it nothing has left it.

// wakeRoom is what a wake needs of the disk beside the upper layer: runsc's state, which
// has the whole spec and is written twice (maxState of found), its logs, and some for what
// the guest writes first.
const wakeRoom = 16 << 20

// ErrNoRoom says that the disk has no room to restore a hibernated sandbox: it stays
// hibernated.
var ErrNoRoom = errors.New("no room on the disk to restore the hibernated sandbox")

// roomToWake refuses a restore that the disk of the sandbox's folder has no room for.
// Errors: ErrNoRoom.
func (b *box) roomToWake() error {
	b.mu.Lock()
	need := b.upper + wakeRoom
	b.mu.Unlock()
	var st unix.Statfs_t
	if err := unix.Statfs(b.dir, &st); err != nil {
		return nil // the restore meets the same
	}
	if free := int64(st.Bavail) * st.Bsize; free < need {
		return fmt.Errorf("%w: it takes %d MiB, and the disk of %s has %d MiB free: free some of it and wake it again", ErrNoRoom, need>>20, b.dir, free>>20)
	}
	return nil
}

// notRestored makes of a restore that has failed with err the end of the sandbox, or brings
// it back to where it was when the disk has no room. Errors: ErrNoRoom.
func (b *box) notRestored(err error) error {
	low := b.roomToWake()
	b.mu.Lock()
	sleeps := low != nil && !b.over
	if sleeps {
		b.nap, b.unwanted, b.asleep = napBegun, nil, make(chan struct{})
	}
	b.mu.Unlock()
	if !sleeps {
		return b.abandon(err)
	}
	b.tasks.Go(b.reap)
	for {
		kill(children()) // whatever runsc has left
		select {
		case <-b.asleep:
			return fmt.Errorf("%w: %w", low, err)
		case <-b.ended: // somebody asked for that meanwhile
			return sandbox.ErrEnded
		case <-time.After(clearPoll):
		}
	}
}
