// Package memory takes the memory of sandboxes that wait, so that others can use it,
// and brings it back before they run on. It decides by the machine's pressure how much
// to take, and by how long each waits from whom.
package memory

import (
	"errors"
	"time"
)

// ErrUnsupported says that this machine cannot do what was asked. Limits says why, in
// sentences.
var ErrUnsupported = errors.New("memory cannot be taken from a sandbox here")

// Held is what a sandbox has in memory, by kind, in bytes.
type Held struct {
	Anon  int64 // the Sentry's heap
	Shmem int64 // the guest's memory
	File  int64 // page cache, without Shmem; it may be of an image that others use
	Swap  int64 // what is in swap; 0 where it is not counted
}

// Own is what reclaim frees for others. Page cache is not counted: it may belong to
// an image that others use, and the kernel gives it up without being asked.
func (h Held) Own() int64 { return h.Anon + h.Shmem }

// Freed is what a reclaim gave.
type Freed struct {
	Reduced int64 // bytes that the Sentry could do without
	Swapped int64 // bytes of anonymous and guest memory that the kernel took
	Took    time.Duration
}

// Bytes is all of it.
func (f Freed) Bytes() int64 { return f.Reduced + f.Swapped }

func (f Freed) plus(g Freed) Freed {
	return Freed{f.Reduced + g.Reduced, f.Swapped + g.Swapped, f.Took + g.Took}
}
