package catalog

import (
	"context"
	"errors"
	"fmt"

	"quarry/store/chunk"
)

// ErrDiverged says that the journal is not the one that was read before: it was put
// back to an earlier state, or another bucket has the place of this one, or it is
// not there.
var ErrDiverged = errors.New("the journal is not the one that was read before: if it was put back to an earlier state, start this node again")

const (
	// maxTail and maxTailBytes bound what one CatchUp holds in memory. Entries have
	// some 200 bytes, those of names a few KiB.
	maxTail      = 4096
	maxTailBytes = 8 << 20
)

// CatchUp applies what others appended since, and calls fn, which may be nil, after
// each entry with how many are known to follow. It returns false when it has stopped at its bound and
// there is more. Only for a catalog that appends nothing itself. Errors: ErrDamaged,
// ErrNewer, ErrDiverged, those of fn and of the journal; the entries before the
// error are applied, the one that fn failed for included.
func (c *Catalog) CatchUp(ctx context.Context, fn func(e Entry, left int) error) (whole bool, err error) {
	c.appending.Lock()
	defer c.appending.Unlock()
	tail, whole, err := c.tail(ctx)
	for i, raw := range tail {
		e, takeErr := c.take(raw)
		if takeErr == nil && fn != nil {
			takeErr = fn(e, len(tail)-i-1)
		}
		if takeErr != nil {
			return false, fmt.Errorf("follow the journal: %w", takeErr)
		}
	}
	if err != nil {
		return false, fmt.Errorf("follow the journal: %w", err)
	}
	return whole, nil
}

// tail reads the entries from next on, and reads again the one before: a journal
// that lacks it, or has another there, is not the one whose entries are applied. What
// it has read when an error comes is good.
func (c *Catalog) tail(ctx context.Context) (tail [][]byte, whole bool, err error) {
	known, size := c.next == 1, 0
	for raw, err := range c.journal.Read(ctx, max(1, c.next-1)) {
		if err != nil {
			return tail, false, damagedJournal(err)
		}
		if !known {
			if chunk.Sum(raw.Data) != c.last {
				break
			}
			known = true
			continue
		}
		if len(tail) == maxTail || size+len(raw.Data) > maxTailBytes {
			return tail, false, nil
		}
		tail, size = append(tail, raw.Data), size+len(raw.Data)
	}
	if !known {
		return nil, false, fmt.Errorf("entry %d: %w", c.next-1, ErrDiverged)
	}
	return tail, true, nil
}
