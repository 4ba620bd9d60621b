package memory

import (
	"context"
	"errors"
	"os"
)

// Fetch brings back what is not in memory of the pieces, and returns when it is there, or
// ctx ends.
func Fetch(ctx context.Context, pieces ...Piece) (Fetched, error) {
	got, err := startFetch(ctx, pieces, nil, nil).wait(ctx)
	if got.Rest {
		err = errors.Join(err, context.Cause(ctx))
	}
	return got, err
}

// Lower takes memory by a lower limit, as where the kernel has no other way.
func (g *Group) Lower(ctx context.Context, want int64) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	before, err := g.Held()
	if err != nil {
		return err
	}
	return g.lower(ctx, want, func() int64 {
		now, err := g.Held()
		if err != nil {
			return 0
		}
		return before.Own() - now.Own()
	})
}

// Stat is of the file.
func (f *File) Stat() (os.FileInfo, error) { return f.f.Stat() }

// Mapped is how many bytes of the file processes have mapped, to 64 KiB.
func (f *File) Mapped(ctx context.Context, pids []int) (int64, error) {
	ranges, _, err := f.used(ctx, pids)
	return Bytes(ranges), err
}
