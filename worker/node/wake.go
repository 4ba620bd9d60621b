package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

// runOn lets the guest go on, or restores it. b.pausing is held.
func (b *box) runOn() error {
	if !b.napping() {
		err := b.alter(settleTime, b.h.Resume)
		if err == nil && b.shut { // for a hibernation that came to nothing
			err = b.reopen()
		}
		if !errors.Is(err, holder.ErrHibernated) {
			return err
		}
		if err := b.noteUnseen(); err != nil {
			return err
		}
	}
	if b.ending() {
		return sandbox.ErrEnded // of what is on the disk nothing is wanted
	}
	if b.n.life.Err() != nil {
		return errLeft
	}
	began := time.Now()
	err := b.restore()
	b.n.c.Naps.woken(time.Since(began), resultOf(err))
	if errors.Is(err, holder.ErrNoRoom) || isFull(err) { // the places of its shares take some, too
		return busyDisk(err.Error())
	}
	if errors.Is(err, errNotBegun) {
		if low := b.n.diskLow(); low != "" {
			return fmt.Errorf("%w: %w", busyDisk(low), err)
		}
		return fmt.Errorf("%w: %w: try again", sandbox.ErrNotReady, err)
	}
	if err != nil {
		if !errors.Is(err, sandbox.ErrEnded) && !errors.Is(err, holder.ErrLost) && !errors.Is(err, errLeft) {
			b.end(cause{Reason: sandbox.ReasonRestore, Message: "it was hibernated and could not be restored: " + err.Error()})
			err = fmt.Errorf("%w: %w", sandbox.ErrEnded, err)
		}
		return err
	}
	b.noteNap(nap{})
	b.tell("woken")
	if err := remove(b.askedPath()); err != nil {
		b.n.log.Warn("when a call pauses a sandbox next, a command may wake it", "sandbox", b.id, "err", err)
	}
	return nil
}

// noteUnseen notes the hibernation of a sandbox that an earlier node asked for just before
// it ended, and that was not to be seen yet when this one took the sandbox for a paused one.
func (b *box) noteUnseen() error {
	var st holder.State
	err := b.alter(settleTime, func(ctx context.Context) (err error) { st, err = b.h.State(ctx); return err })
	b.forgetMemory()
	b.noteNap(nap{now: true, bytes: st.OnDisk})
	return err
}

// errNotBegun says that what a restore wants was not there, so that none was begun: the
// checkpoint is as it was.
var errNotBegun = errors.New("what a restore wants is not there")

// gatherAgain has what the sandbox stands on, as gather does for a new one.
func (b *box) gatherAgain() error {
	b.mu.Lock()
	link := b.link
	b.mu.Unlock()
	if link != nil {
		if err := link.Refill(); err != nil {
			return err
		}
	}
	if err := b.alter(0, b.mountAgain); err != nil {
		return err
	}
	return b.bindAgain()
}

// wakeAlone has the holder restore the sandbox, one after the other where the disk is
// low: each looks whether there is room for it, and none counts what others take.
func (b *box) wakeAlone(ctx context.Context) error {
	if free, err := freeDisk(b.n.c.boxesDir()); err == nil && free < roomForAll {
		select {
		case b.n.wakes <- struct{}{}:
			defer func() { <-b.n.wakes }()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return b.h.Wake(ctx)
}

// roomForAll is free disk from which on sandboxes are restored side by side.
const roomForAll = 4 << 30

// restore gives the sandbox what runsc takes at each start, and has it started.
func (b *box) restore() error {
	err := b.gatherAgain()
	if err != nil && !errors.Is(err, sandbox.ErrEnded) && !errors.Is(err, errLeft) {
		err = fmt.Errorf("%w: %w", errNotBegun, err)
	}
	if err == nil {
		err = b.alter(0, b.wakeAlone)
	}
	if errors.Is(err, errLeft) {
		return err // the gofer may not have them yet
	}
	if err == nil {
		err = b.reopen()
	}
	if uerr := unmountBelow(b.dir); uerr != nil { // the gofer has its own
		b.n.log.Warn("shares of a restored sandbox stay bound", "sandbox", b.id, "err", uerr)
	}
	return err
}

// reopen lets packets through to a sandbox that has a Sentry again. b.pausing is held.
func (b *box) reopen() error {
	b.mu.Lock()
	link := b.link
	b.mu.Unlock()
	if link == nil {
		return nil
	}
	err := link.Reopen()
	b.shut = b.shut && err != nil
	return err
}

// afterWake does what an earlier node may have left to do.
func (b *box) afterWake() error { return errors.Join(b.reopen(), unmountBelow(b.dir)) }

// mountAgain makes sure that somebody serves the image, which a restore opens anew, and
// notes who does: what served it before has ended for a sandbox that runs, not for this one.
func (b *box) mountAgain(ctx context.Context) error {
	b.mu.Lock()
	mt, id, before, failed, role := b.mount, b.j.ImageID, b.j.Served, b.j.FailedReads, b.j.Asked.Role
	b.mu.Unlock()
	if mt == nil {
		return nil
	}
	now, err := mt.Served()
	if err != nil {
		im, err := b.n.c.Dir.Load(id)
		if err != nil {
			return err
		}
		more, err := b.n.c.Worker.AcquireForSandbox(ctx, im, role == sandbox.RoleGrade)
		if err != nil {
			return err
		}
		now, err = mt.Served()
		// Its holder has the sandbox's own reference.
		if err = errors.Join(err, more.Leave(context.WithoutCancel(ctx))); err != nil {
			return fmt.Errorf("mount of the image: %w", err)
		}
	}
	if now.PID == before.PID && now.Start == before.Start {
		return nil
	}
	now.FailedReads -= uint64(failed) // what had failed before has failed
	return b.update(func(j *journal) { j.Served, j.FailedReads = now, 0 })
}

// bindAgain binds the shares of the bundle where they were.
func (b *box) bindAgain() error {
	b.mu.Lock()
	asked := b.j.Asked.Shares
	b.mu.Unlock()
	if len(asked) == 0 {
		return nil
	}
	if err := unmountBelow(b.dir); err != nil { // of a wake that a node did not live to see
		return err
	}
	raw, err := readBounded(filepath.Join(b.dir, "config.json"))
	if err != nil {
		return err
	}
	var spec specs.Spec
	if err := json.Unmarshal(raw, &spec); err != nil {
		return err
	}
	at := filepath.Join(b.dir, "shares") + "/"
	for _, m := range spec.Mounts {
		if !strings.HasPrefix(m.Source, at) {
			continue
		}
		i := slices.IndexFunc(asked, func(s sandbox.Share) bool { return s.Target == m.Destination })
		if i < 0 {
			return fmt.Errorf("the bundle has a share at %s that nobody asked for", m.Destination)
		}
		if err := os.Remove(m.Source); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
		if err := b.n.bindShare(asked[i], m.Source); err != nil {
			return err
		}
	}
	return nil
}

// askedPath is an empty file that stands while a sandbox is hibernated because a call has
// asked for that, and not only for a pause.
func (b *box) askedPath() string { return filepath.Join(b.dir, "asked") }

// awaken has a sandbox run that a call has put to disk, for a command or a file that is
// written. One that a call has paused is for a call to resume, wherever its memory is by
// now; who else has paused it is for rouse, which comes before.
func (b *box) awaken(ctx context.Context) error {
	if !b.napping() {
		return nil
	}
	b.pausing.Lock()
	defer b.pausing.Unlock()
	if _, err := os.Lstat(b.askedPath()); err != nil || !b.napping() {
		return nil
	}
	return b.explain(ctx, b.letGo(byCall))
}

// stir is rouse for what is to wake a hibernated sandbox too, whoever has paused it. The
// call is the last to let go of it, so that it holds one still that cannot be restored.
func (b *box) stir(ctx context.Context) (release func(), err error) {
	if release, err = b.rouse(ctx); err != nil {
		return nil, err
	}
	if err := b.awaken(ctx); err != nil {
		release()
		return nil, err
	}
	return release, nil
}
