package node

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"quarry/worker/reader"
	"quarry/worker/sandbox"
)

const (
	// endPatience is how long a sandbox's processes may take to end. One that waits
	// for a read of its image is killed by the kernel when the read is answered, or
	// given up, whichever comes first: its end is recorded without it.
	endPatience = 15 * time.Second
	// killPatience is how long those that are killed may take beyond that, and a holder
	// that is to leave: one that does not is killed too.
	killPatience = 5 * time.Second
	// cleanPatience is how long the end of a sandbox is waited for by those who asked
	// for it, once its record stands.
	cleanPatience = 15 * time.Second
	// figuresPatience bounds a question to the reader about failed reads.
	figuresPatience = 2 * time.Second
	// cleanAgain is how soon what could not be removed is tried again, at first.
	cleanAgain    = 100 * time.Millisecond
	maxCleanAgain = time.Minute
)

// finish ends the sandbox, writes its record and takes it apart. The order is such
// that a node which dies in between leaves to the next one what it needs: the cause
// before anything is killed, the record before what it was read from is gone.
func (b *box) finish() {
	ctx := context.Background()
	b.mu.Lock()
	b.state = sandbox.StateEnding
	why := b.cause
	b.mu.Unlock()
	b.tell("ending")
	b.leaveMemory()
	b.unwatchModel()
	if why != nil {
		// Without a journal the next node ends it all the same, and finds a worse reason.
		if err := b.update(func(j *journal) { j.Phase, j.Cause = phaseEnding, why }); err != nil && !errors.Is(err, fs.ErrNotExist) {
			b.n.log.WarnContext(ctx, "why a sandbox is ended is not written down", "sandbox", b.id, "err", err)
		}
	}
	f := b.stop(ctx, why)
	end := f.ended()
	b.conclude(ctx, end)
	b.clean(ctx)
}

// stop ends all processes of the sandbox and gathers what tells how it ended.
func (b *box) stop(ctx context.Context, why *cause) facts {
	f := facts{asked: why}
	b.mu.Lock()
	f.memoryMB = b.j.Asked.MemoryMB
	f.evidence.WorkerRestarts = b.j.Restarts
	f.own = len(b.j.Asked.Entrypoint) > 0
	since := b.j.Created
	link := b.link
	b.mu.Unlock()
	f.evidence.DiskUsed = b.diskUsed()
	asking, cancel := context.WithTimeout(ctx, endPatience)
	b.endByHolder(asking, &f) // by the holder, which knows how it ended
	cancel()
	ctx, cancel = context.WithTimeout(ctx, killPatience)
	defer cancel()
	if b.group != nil {
		if err := b.group.Kill(ctx); err != nil {
			b.n.log.WarnContext(ctx, "processes of a sandbox do not end", "sandbox", b.id, "err", err)
		}
		if c, err := b.group.Read(); err == nil {
			f.evidence.OOMKills, f.evidence.MemoryPeak, f.evidence.PIDsRefused, f.limitHits = c.OOMKills, c.MemoryPeak, c.PIDsRefused, c.LimitHits
		}
	}
	f.wasFull = b.n.wasFull(since)
	if link != nil {
		if c, err := link.Counters(); err == nil {
			f.evidence.DeniedPackets = c.DeniedPackets
		}
	}
	b.imageErrors(ctx, &f)
	f.at = b.n.now().UTC().Round(0)
	return f
}

// maxImageErrors is how many failed reads a record names.
const maxImageErrors = 8

// imageErrors counts the reads of the image's mount that failed since the sandbox has
// it. Others that use the mount may have caused some: who cannot tell says so.
func (b *box) imageErrors(ctx context.Context, f *facts) {
	b.mu.Lock()
	mt, before, counted, id, from := b.mount, b.j.Served, b.j.FailedReads, b.j.ImageID, b.j.Created
	b.mu.Unlock()
	if mt == nil {
		return
	}
	failed, err := mt.FailedSince(before)
	if err != nil && !b.napping() { // one that is hibernated reads nothing
		f.unserved = "reads of the image may have failed uncounted: " + err.Error()
	}
	f.evidence.ImageIOErrors = max(failed, counted)
	if f.unserved == "" && f.evidence.ImageIOErrors == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, figuresPatience)
	defer cancel()
	st, err := reader.ImageStats(ctx, b.n.c.Dir, id)
	if err != nil {
		return // it is counted all the same
	}
	for _, e := range st.Errors {
		if !e.When.Before(from) && len(f.evidence.ImageErrors) < maxImageErrors {
			f.evidence.ImageErrors = append(f.evidence.ImageErrors, fmt.Sprintf("%s: %s: %s", e.Path, e.Outcome, e.Err))
		}
	}
}

// conclude writes the sandbox's record, after which it has ended for everybody, and
// gives back what it took.
func (b *box) conclude(ctx context.Context, end sandbox.End) {
	v := b.view()
	v.State, v.End, v.Token = sandbox.StateEnded, &end, ""
	r := record{Version: recordVersion, Key: b.j.Key, Body: b.j.Body, Failed: b.failed() != nil, Sandbox: v}
	n := b.n
	if err := n.records.save(r); err != nil {
		// The disk may be full. What is removed now makes room, and the journal stays until
		// the record is written: should this node end before, the next one writes another.
		n.log.ErrorContext(ctx, "the record of a sandbox's end is not written yet", "sandbox", b.id, "reason", end.Reason, "err", err)
		b.unsaved = &r
	}
	b.mu.Lock()
	b.state = sandbox.StateEnded
	b.mu.Unlock()
	n.mu.Lock()
	n.ended[b.id] = r
	if r.Failed && n.keys[r.Key].id == b.id {
		delete(n.keys, r.Key)
	}
	n.mu.Unlock()
	n.ledger.giveBack(amountOf(b.j.Asked))
	b.noteNap(nap{})
	n.events.add(sandbox.Event{At: end.At, Sandbox: b.id, Type: "ended", End: &end})
	close(b.over)
}

// clean removes everything of the sandbox until nothing is left, or the node is
// closed: the next one goes on.
func (b *box) clean(ctx context.Context) {
	patience := time.AfterFunc(cleanPatience, func() { b.markGone() })
	defer patience.Stop()
	for pause := cleanAgain; ; pause = min(2*pause, maxCleanAgain) {
		err := b.removeAll(ctx)
		if err == nil {
			break
		}
		b.n.log.WarnContext(ctx, "what is left of a sandbox cannot be removed yet", "sandbox", b.id, "err", err, "again_in", pause)
		select {
		case <-time.After(pause):
		case <-b.n.life.Done():
			b.markGone()
			return
		}
	}
	b.n.mu.Lock()
	delete(b.n.boxes, b.id)
	b.n.mu.Unlock()
	b.markGone()
}

func (b *box) markGone() {
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case <-b.gone:
	default:
		close(b.gone)
	}
}

// removeAll removes everything of the sandbox once. Each step may have been done
// before; the folder, by which the next node would know of the rest, goes last.
func (b *box) removeAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, cleanPatience)
	defer cancel()
	if err := b.endHolder(ctx); err != nil {
		return err
	}
	if b.group != nil {
		if err := b.group.Kill(ctx); err != nil {
			return err
		}
	}
	if err := b.killStrays(ctx); err != nil {
		return err
	}
	var errs []error
	if b.n.c.Network != nil {
		errs = append(errs, b.n.c.Network.Release(ctx, b.id))
	}
	errs = append(errs, unmountBelow(b.dir))
	b.mu.Lock()
	mt := b.mount
	b.mu.Unlock()
	if mt != nil {
		err := mt.Leave(ctx)
		b.n.mountsLeft()
		errs = append(errs, err)
		if err == nil {
			b.mu.Lock()
			b.mount = nil
			b.mu.Unlock()
		}
	}
	if b.group != nil {
		errs = append(errs, b.group.Remove(ctx))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return removeFolder(b.dir, b.saveEnd)
}

// saveEnd writes the record of the end that could not be written before.
func (b *box) saveEnd() error {
	if b.unsaved == nil {
		return nil
	}
	if err := b.n.records.save(*b.unsaved); err != nil {
		return fmt.Errorf("record of its end: %w", err)
	}
	b.unsaved = nil
	return nil
}

// removeFolder removes a sandbox's folder, the journal last, once before has succeeded:
// without it the next node would know nothing of what is left.
func removeFolder(dir string, before func() error) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return before()
	}
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() == journalFile {
			continue
		}
		if err := os.RemoveAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	if err := before(); err != nil {
		return err
	}
	return os.RemoveAll(dir)
}
