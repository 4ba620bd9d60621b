package node

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
)

// A full disk of the node is nobody's fault but the node's: what it causes is told as
// that, nothing new is begun before it comes to it, and how sandboxes end is written
// down all the same.

const (
	// reservePart of a disk, and at most maxReserve, is left free for what runs: below
	// it no sandbox is made.
	reservePart = 50
	maxReserve  = 1 << 30
	// recordsReserve is kept allocated for records of ends when nothing else is left:
	// one takes a block or two, and there are a few hundred sandboxes.
	recordsReserve = 4 << 20
	reserveFile    = "reserve"
)

// isFull reports whether an error says that a disk has no room.
func isFull(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT)
}

// diskLow says that a disk of the node has less room than it keeps for what runs; ""
// when it has enough. One that cannot be asked is told of where it is used.
func (n *Node) diskLow() string {
	for _, dir := range []string{n.c.boxesDir(), n.c.recordsDir()} {
		var st unix.Statfs_t
		if unix.Statfs(dir, &st) != nil {
			continue
		}
		free, reserve := int64(st.Bavail)*st.Bsize, n.c.DiskReserve
		if reserve == 0 {
			reserve = min(maxReserve, int64(st.Blocks)*st.Bsize/reservePart)
		}
		if free < reserve {
			return fmt.Sprintf("the disk of %s has %d MiB free, and the node keeps %d for what runs: free some of it", dir, free>>20, reserve>>20)
		}
	}
	return ""
}

// busyDisk is the refusal for want of room on the node's disk.
func busyDisk(why string) *sandbox.Busy {
	return &sandbox.Busy{Err: sandbox.ErrCapacity, What: "disk", Why: why, RetryAfter: retryCapacity}
}

// whoseDisk tells a full disk of the node from a sandbox at its limit.
func (n *Node) whoseDisk(err error) error {
	if !errors.Is(err, sandbox.ErrDiskFull) && !isFull(err) {
		return err
	}
	if low := n.diskLow(); low != "" {
		return fmt.Errorf("%w: %v", busyDisk(low), err) // not one that blames the sandbox
	}
	return err
}

// fullEvery is how often a node looks whether its disk is full: what writes finds that out
// in between, but not often before the node does, and seldom makes room again as soon.
const fullEvery = 200 * time.Millisecond

// watchDisk notes when the disk is full, until Close.
func (n *Node) watchDisk() {
	tick := time.NewTicker(fullEvery)
	defer tick.Stop()
	for {
		n.lookAtDisk()
		select {
		case <-n.life.Done():
			return
		case <-tick.C:
		}
	}
}

// lookAtDisk notes whether a sandbox cannot write now although it may.
func (n *Node) lookAtDisk() {
	now := n.now() // before: whoever begins after this has not seen it full for that
	free, err := freeDisk(n.c.boxesDir())
	n.fullMu.Lock()
	defer n.fullMu.Unlock()
	if err == nil && free < scarceDisk && now.After(n.lastFull) {
		n.lastFull, n.unmarked = now, true
	}
	if !n.unmarked {
		return
	}
	if err := n.markFull(); err != nil {
		n.log.Debug("the next node will not know that the disk was full", "err", err)
	}
}

// recallFull reads when the disk was last full under earlier nodes, and makes the mark of
// it: an empty file of that time, which takes no room to set.
func (n *Node) recallFull() error {
	n.fullMu.Lock()
	defer n.fullMu.Unlock()
	info, err := os.Lstat(n.c.fullPath())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return n.markFull()
	case err != nil || !info.ModTime().After(neverFull):
		return err
	}
	if n.lastFull = info.ModTime(); n.lastFull.After(n.now()) {
		n.lastFull = n.now() // the clock was set back
		return n.markFull()
	}
	return nil
}

// markFull sets the mark, or makes it where it is not there; what fails is tried again at
// the next look. n.fullMu is held.
func (n *Node) markFull() error {
	at, path := neverFull, n.c.fullPath()
	if !n.lastFull.IsZero() {
		at = n.lastFull
	}
	err := os.Chtimes(path, time.Time{}, at)
	if errors.Is(err, fs.ErrNotExist) { // it is there with its time, or not at all
		var f *os.File
		if f, err = os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE, 0o600); err == nil {
			err = errors.Join(f.Close(), os.Chtimes(path+".new", time.Time{}, at))
		}
		if err == nil {
			err = os.Rename(path+".new", path)
		}
	}
	n.unmarked = err != nil
	return err
}

// neverFull is the time of the mark of a disk that was never full.
var neverFull = time.Unix(0, 0)

// wasFull reports whether the disk has been full since a time, as far as this node, or one before it, knows:
// what was written then may have failed, whether or not there is room again.
func (n *Node) wasFull(since time.Time) bool {
	n.lookAtDisk()
	n.fullMu.Lock()
	defer n.fullMu.Unlock()
	return !n.lastFull.IsZero() && !n.lastFull.Before(since)
}

// reserve is the file that keeps room for records.
func (r records) reserve() string { return filepath.Join(r.dir, reserveFile) }

// keepReserve makes the reserve when it is not there.
func (r records) keepReserve() (err error) {
	f, err := os.OpenFile(r.reserve(), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, recordsReserve)
	if errors.Is(err, unix.EOPNOTSUPP) {
		_, err = f.Write(make([]byte, recordsReserve))
	}
	err = errors.Join(err, f.Close())
	if err != nil { // half a reserve would pass for one
		err = errors.Join(err, os.Remove(r.reserve()))
	}
	return err
}

// overwrite writes over a small file where it stands, which a full disk has room for. The
// content is no shorter than what was there, and one sector: a crash leaves either.
func overwrite(path string, raw []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(raw, 0)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}
