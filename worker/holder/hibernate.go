package holder

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
	"quarry/worker/sentry"
)

// A hibernated sandbox is a checkpoint in its folder: it has neither Sentry nor gofer,
// and its holder stays, with the lock of the image's mount, the commands' states and
// the pause, which goes on. The Sentry is ended only once the files are on the disk, and
// they are removed only once another Sentry runs what is in them: at each moment one of
// the two is there, and the holder is the one that says which. Without the holder, the
// sandbox has ended as any other one has.

// nap is how far a hibernation has come.
type nap int

const (
	napNone   nap = iota
	napBegun      // the checkpoint is on the disk, the Sentry is being ended
	napAsleep     // nothing of it runs
	napWaking     // a restore is under way
)

const (
	// checkpointTimeout is for a machine's memory to a slow disk. A Sentry that does not
	// answer by then has stopped the guest, and nobody knows for how long.
	checkpointTimeout = 10 * time.Minute
	// restoreTimeout is for the same way back.
	restoreTimeout = 10 * time.Minute
	// roomTimeout bounds a question before a checkpoint.
	roomTimeout = 10 * time.Second
	// readsTimeout is how long a hibernation waits for what reads the guest.
	readsTimeout = 2 * time.Second
	// scarce is left free on the disk beyond what a checkpoint takes: its state, which is
	// some MiB, and what others write meanwhile.
	scarce = 64 << 20
)

func hibernatedDir(dir string) string { return filepath.Join(dir, "hibernated") }

// asking is called before a question to the Sentry that the pause does not hold back, and
// done after it. A Sentry that answers while it writes a checkpoint may not survive that,
// so nobody asks one that is being hibernated: errors are ErrHibernated.
func (b *box) asking() (done func(), err error) {
	if !b.questions.tryEnter() {
		return nil, fmt.Errorf("%w: it is being put to disk", ErrHibernated)
	}
	b.mu.Lock()
	asleep := b.nap != napNone && !b.over
	b.mu.Unlock()
	if asleep {
		b.questions.leave()
		return nil, ErrHibernated
	}
	return b.questions.leave, nil
}

// hibernate puts a paused sandbox to disk and returns how many bytes that took. It stays
// paused when it is refused.
func (b *box) hibernate(ctx context.Context) (int64, error) {
	if err := b.gate.close(ctx); err != nil {
		return 0, err
	}
	defer b.gate.open()
	dir := hibernatedDir(b.dir)
	if done, err := b.mayHibernate(ctx); done || err != nil {
		return b.current().OnDisk, err
	}
	reads, cancel := context.WithTimeout(ctx, readsTimeout)
	defer cancel()
	if err := b.questions.close(reads); err != nil {
		return 0, fmt.Errorf("%w: what reads it takes longer than %v; try again: %w", ErrNotHibernated, readsTimeout, err)
	}
	defer b.questions.open()
	err := os.RemoveAll(dir)
	if err == nil {
		err = os.Mkdir(dir, 0o700)
	}
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrNotHibernated, err)
	}
	if err := b.checkpoint(dir); err != nil {
		if rerr := os.RemoveAll(dir); rerr != nil {
			b.log.Warn("what is left of a checkpoint stays", "err", rerr)
		}
		return 0, err
	}
	size := sizeBelow(dir)
	b.mu.Lock()
	over := b.over
	if !over {
		b.onDisk, b.nap, b.asleep = size, napBegun, make(chan struct{})
		b.state.Hibernated = true
		b.killLocked()
	}
	b.mu.Unlock()
	if over {
		return 0, sandbox.ErrEnded
	}
	b.record()
	return size, b.awaitSleep()
}

// mayHibernate says why not, or that it is done already.
func (b *box) mayHibernate(ctx context.Context) (done bool, err error) {
	b.mu.Lock()
	over, isPaused, asleep, busy, pid, execs := b.over, b.isPaused, b.nap == napAsleep, b.running+b.helpers, b.sentryPID, b.begun
	b.mu.Unlock()
	switch {
	case over:
		return false, sandbox.ErrEnded
	case asleep:
		return true, nil
	case !isPaused:
		return false, fmt.Errorf("%w: it is not paused", ErrNotHibernated)
	case busy > 0:
		return false, fmt.Errorf("%w: %d commands run, which a restore would kill", ErrNotHibernated, busy)
	}
	ctx, cancel := context.WithTimeout(ctx, roomTimeout)
	defer cancel()
	list, err := b.sentry.Processes(ctx)
	if err != nil {
		return false, b.lost("list the processes", err)
	}
	if doomed := sentry.Doomed(list, execs > 0); len(doomed) > 0 {
		return false, fmt.Errorf("%w: a restore would kill process %d (%s) and %d others: only what came from the first process lives on, and once there were commands only that one itself",
			ErrNotHibernated, doomed[0].PID, plain(doomed[0].Cmd), len(doomed)-1)
	}
	return false, b.hasRoom(pid)
}

// hasRoom refuses a checkpoint that the disk has no room for, and notes how much of it a
// restore writes to the disk again.
func (b *box) hasRoom(sentryPID int) error {
	need, upper, err := pagesOf(sentryPID)
	if err != nil {
		return fmt.Errorf("%w: how much memory it has is not known: %w", ErrNotHibernated, err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(b.dir, &st); err != nil {
		return fmt.Errorf("%w: %w", ErrNotHibernated, err)
	}
	b.mu.Lock()
	b.upper = upper
	b.mu.Unlock()
	if free := int64(st.Bavail) * st.Bsize; free < need+scarce {
		return fmt.Errorf("%w: it takes %d MiB, and the disk has %d MiB free of which %d are kept", ErrNotHibernated, need>>20, free>>20, scarce>>20)
	}
	return nil
}

// pagesOf is how much a checkpoint has of memory and of the upper layer, which are
// files that the Sentry has open, and how much of that is the upper layer.
func pagesOf(pid int) (sum, upper int64, err error) {
	const block = 512 // of st_blocks, whatever the file system has
	fds := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(fds)
	if err != nil {
		return 0, 0, err
	}
	seen := map[[2]uint64]bool{}
	for _, e := range entries {
		path := filepath.Join(fds, e.Name())
		to, err := os.Readlink(path)
		if err != nil || !strings.Contains(to, "runsc-memory") && !strings.Contains(to, "runsc-filestore-") {
			continue
		}
		var st unix.Stat_t
		if unix.Stat(path, &st) == nil && !seen[[2]uint64{st.Dev, st.Ino}] {
			seen[[2]uint64{st.Dev, st.Ino}] = true
			sum += st.Blocks * block
			if strings.Contains(to, "runsc-filestore-") {
				upper += st.Blocks * block
			}
		}
	}
	if len(seen) == 0 {
		return 0, 0, errors.New("the Sentry has no memory file")
	}
	return sum, upper, nil
}

// checkpoint has the Sentry write the files, and the disk have them.
func (b *box) checkpoint(dir string) error {
	// Not the caller's ctx: the Sentry would go on, and be in the way of a resume.
	ctx, cancel := context.WithTimeout(context.Background(), checkpointTimeout)
	defer cancel()
	err := b.sentry.Checkpoint(ctx, dir)
	switch {
	case err == nil:
		if err := seal(ctx, dir); err != nil {
			return fmt.Errorf("%w: what is on the disk cannot be read back: %w", ErrNotHibernated, err)
		}
		return nil
	case errors.Is(err, sentry.ErrGone):
		return sandbox.ErrEnded
	case ctx.Err() != nil:
		b.giveUp(fmt.Sprintf("the Sentry did not finish a checkpoint within %v", checkpointTimeout))
	}
	said, _, _ := strings.Cut(err.Error(), "\n") // and the stacks of a panic
	if strings.Contains(said, unwritten) {
		said = "its first process has not begun yet: try again"
	}
	return fmt.Errorf("%w: %s", ErrNotHibernated, said)
}

// unwritten is in what the Sentry says of a page that is still the file that the sleeper
// runs from: it was paused before its first instruction.
const unwritten = "non-MemoryFile"

// goesToSleep reports whether processes end because it is hibernated.
func (b *box) goesToSleep() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.nap == napBegun && !b.over
}

// fallAsleep notes that all processes have ended, and reports whether that is no end.
func (b *box) fallAsleep() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.nap != napBegun || b.over {
		return false
	}
	b.nap = napAsleep
	close(b.asleep)
	return true
}

// awaitSleep returns when no process of the sandbox is left.
func (b *box) awaitSleep() error {
	for {
		select {
		case <-b.asleep:
			return nil
		case <-b.ended:
			return sandbox.ErrEnded
		case <-time.After(endTimeout):
			kill(children()) // what runsc has left beside them
		}
	}
}

// wake restores a hibernated sandbox, which runs then. One that is not hibernated is left
// as it is, and so is one that the disk has no room for: errors are ErrNoRoom.
func (b *box) wake(ctx context.Context) error {
	if err := b.gate.close(ctx); err != nil {
		return err
	}
	defer b.gate.open()
	// Not the caller's ctx: a restore that is given up is the end of the sandbox.
	restoring, cancel := context.WithTimeout(context.Background(), restoreTimeout)
	defer cancel()
	low := b.roomToWake()
	b.mu.Lock()
	over, asleep := b.over, b.nap == napAsleep
	if asleep && !over && low == nil {
		b.nap, b.unwanted = napWaking, cancel
	}
	b.mu.Unlock()
	switch {
	case over:
		return sandbox.ErrEnded
	case !asleep:
		return nil
	case low != nil:
		return low
	}
	if err := b.restore(restoring); errors.Is(err, ErrNoRoom) {
		return err
	} else if err != nil {
		return fmt.Errorf("%w: %w", ErrNotRestored, err)
	}
	b.goOn()
	b.mu.Lock()
	over = b.over
	unwanted := b.killed || b.reason != ""
	b.mu.Unlock()
	b.record()
	if err := os.RemoveAll(hibernatedDir(b.dir)); err != nil {
		b.log.Warn("the files of a hibernation stay", "err", err)
	}
	if unwanted { // somebody asked for its end meanwhile
		b.killProcesses()
	}
	if over {
		return sandbox.ErrEnded
	}
	return nil
}

// restore starts a Sentry from the files. When that fails the sandbox has ended, but for
// ErrNoRoom.
func (b *box) restore(ctx context.Context) error {
	if err := verify(ctx, hibernatedDir(b.dir)); err != nil {
		return b.abandon(err)
	}
	// runsc takes neither a state of the same container nor a socket that is there.
	err := errors.Join(os.RemoveAll(filepath.Join(b.dir, "runsc")), removeIfThere(b.socket), removeIfThere(filepath.Join(b.dir, "pid")))
	if err != nil {
		b.log.Warn("what is left of the Sentry before stays", "err", err)
	}
	// The Sentry inherits how readily the kernel ends it.
	if err := os.WriteFile(oomScore, b.score, 0); err != nil {
		b.log.Warn("the kernel spares the restored sandbox when memory is short", "err", err)
	}
	defer shield(b.log)
	how := []string{"restore", "--image-path", hibernatedDir(b.dir)}
	if readsDirect(filepath.Join(hibernatedDir(b.dir), "pages.img")) {
		how = append(how, "--direct") // several times as fast where nothing is cached
	}
	if err := b.launch(ctx, nil, how...); err != nil {
		return b.notRestored(err)
	}
	return nil
}

func removeIfThere(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// record writes down what runs, or that nothing does.
func (b *box) record() {
	b.mu.Lock()
	st := b.state
	b.mu.Unlock()
	if err := writeRecord(filepath.Join(b.dir, "holder.json"), runRecord{runFormat, b.id, st}); err != nil {
		b.log.Warn("state not recorded", "err", err)
	}
}

// sizeBelow is how long a folder's files are together.
func sizeBelow(dir string) (sum int64) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return 0
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			sum += info.Size()
		}
	}
	return sum
}
