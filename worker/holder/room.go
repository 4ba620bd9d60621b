package holder

import (
	"crypto/sha256"
	"os"
	"slices"
	"sync"
)

// What a holder keeps for others is bounded, whatever its sandbox does: the output of
// all execs together, the journal, and how many execs are told of at all.

const (
	// DefaultKept is what the output and the journal of a sandbox's execs may take of
	// the disk when Config does not say.
	DefaultKept = 256 << 20
	// MinKept is the least that can be said there: some 1000 execs, and 768 KiB of output.
	MinKept = 1 << 20
	// journalPart of that is the journal's: two lines of some 400 bytes an exec.
	journalPart = 4
	// KeptExecs is how many execs are known with how they ended; of those before nothing
	// is known but that they were. A state takes a KiB of the holder's memory.
	KeptExecs = 4096
	// block is what a file takes of the disk at least, and a folder.
	block = 4096
)

// room is what the kept output of all execs may take of the disk. When it is used up,
// the output of the exec that ended first is forgotten, so that the last ones are
// there; what runs now has no such place to take from, and is dropped.
type room struct {
	mu    sync.Mutex // guards what follows; held while an exec's and a stream's own lock is
	left  int64
	ended []*execution // whose output may be forgotten, the one that ended first at the front
}

// take returns how much of n there is, in whole blocks.
func (r *room) take(n int64) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i := 0; r.left < n && i < len(r.ended); {
		if freed := r.ended[i].forgetOutput(); freed >= 0 {
			r.left += freed
			r.ended = slices.Delete(r.ended, i, i+1)
		} else {
			i++ // somebody writes to it still
		}
	}
	n = min(n, max(0, r.left)) / block * block
	r.left -= n
	return n
}

// offer says that the output of an exec may be forgotten from now on.
func (r *room) offer(x *execution) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ended = append(r.ended, x)
}

// forget forgets the output of an exec that nobody is told of any more.
func (r *room) forget(x *execution) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if i := slices.Index(r.ended, x); i >= 0 {
		r.ended = slices.Delete(r.ended, i, i+1)
		r.left += max(0, x.forgetOutput())
	}
}

// forgetOutput removes what is kept of an exec that has ended, which its state then
// counts as dropped, and returns what that took of the room; -1 while more may come.
func (x *execution) forgetOutput() (freed int64) {
	x.mu.Lock()
	out, err := x.out, x.err
	x.mu.Unlock()
	if !out.state().Closed || !err.state().Closed {
		return -1
	}
	freed = out.forget() + err.forget()
	if freed > 0 {
		if err := os.RemoveAll(execDir(x.box.dir, x.spec.ID)); err != nil {
			x.box.log.Warn("output that is forgotten stays", "exec", x.spec.ID, "err", err)
		}
	}
	return freed
}

// blame notes why the node may be to blame for how an exec ended.
func (x *execution) blame(why string) {
	paused := x.box.pausedFor()
	x.mu.Lock()
	known := x.state.Infra != ""
	if !known {
		x.state.Infra = plain(why)
	}
	st, final := x.stateLocked(paused), x.final()
	x.mu.Unlock()
	if !known && final {
		x.journal(st)
	}
}

// settled reports whether nothing more comes of an exec.
func (x *execution) settled() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.final() && x.out.state().Closed && x.err.state().Closed
}

// idSum is what is known of the id of an exec that is forgotten.
type idSum [16]byte

func sumOf(id string) (s idSum) {
	full := sha256.Sum256([]byte(id))
	copy(s[:], full[:])
	return s
}

// retire forgets the oldest exec that has ended when there are too many. Its id stays
// known: what ran once is not run again.
func (b *box) retire() {
	b.mu.Lock()
	order := b.order
	b.mu.Unlock()
	if len(order) < KeptExecs {
		return
	}
	i := slices.IndexFunc(order, (*execution).settled)
	if i < 0 {
		return // those that run are bounded
	}
	x := order[i]
	b.mu.Lock()
	if b.execs[x.spec.ID] == x {
		delete(b.execs, x.spec.ID)
		b.past[sumOf(x.spec.ID)] = struct{}{}
		// A new list: others look at the old one.
		b.order = slices.DeleteFunc(slices.Clone(b.order), func(o *execution) bool { return o == x })
	}
	b.mu.Unlock()
	b.room.forget(x)
}
