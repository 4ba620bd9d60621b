package worker

import (
	"context"
	"fmt"
	"time"

	"quarry/nbd/attach"
	"quarry/store/chunk"
	"quarry/worker/folder"
	"quarry/worker/reader"
	"quarry/worker/timeline"
)

// readWatch compares what a mount's shim and reader have counted before a run
// with what they have after it. The shim answers every read of the mount, so the
// reads that failed are known as long as it lives; the reader, which may be
// replaced meanwhile, knows why, and what the others cost.
type readWatch struct {
	w      *Worker
	id     chunk.Digest
	dir    string // of the mount
	before reader.Stats
	counts attach.CountsValue
	from   time.Time
	shim   attach.State
}

func (w *Worker) watchReads(ctx context.Context, im *folder.Image, mt *Mount, from time.Time) (*readWatch, error) {
	defer timeline.Begin(ctx, timeline.Figures)()
	shim, err := attach.ReadState(mt.dir)
	if err != nil {
		return nil, err
	}
	counts, err := attach.ReadCounts(mt.dir)
	if err != nil {
		return nil, err
	}
	before, err := w.figures(ctx, im.ID)
	if err != nil {
		return nil, err
	}
	if !before.Opened.Before(from) { // opened for this run: all of it counts
		before = reader.Stats{Opening: before.Opening}.WithLists()
	}
	return &readWatch{w: w, id: im.ID, dir: mt.dir, before: before, counts: counts, from: from, shim: shim}, nil
}

// figuresPatience is for a reader that is being replaced.
const figuresPatience = 3 * time.Second

// figures asks the reader what an image has cost.
func (w *Worker) figures(ctx context.Context, id chunk.Digest) (reader.Stats, error) {
	for end := time.Now().Add(figuresPatience); ; {
		st, err := reader.ImageStats(ctx, w.Dir, id)
		if err == nil || time.Now().After(end) || !sleep(ctx, poll) {
			return st, err
		}
	}
}

// end fills in what the run cost, and why that is not known in full, if so. Its
// error says that reads may have failed unseen.
func (r *readWatch) end(ctx context.Context, end *Ended) error {
	defer timeline.Begin(ctx, timeline.Figures)()
	counts, err := attach.ReadCounts(r.dir)
	if !r.shim.Alive() {
		err = fmt.Errorf("the shim %d has ended", r.shim.PID)
	}
	if err != nil {
		end.Unknown = err.Error()
		return fmt.Errorf("reads of the image may have failed during the run: %w", err)
	}
	after, err := r.w.figures(ctx, r.id)
	switch {
	case err != nil:
		end.Stats, end.Unknown = reader.Stats{}.WithLists(), err.Error()
	case after.Opening == r.before.Opening:
		end.Stats = after.Since(r.before, r.from)
	default:
		end.Stats, end.Unknown = after, "the reader was replaced during the run: these are the figures of the last one"
	}
	end.Restarts = int64(counts.Readers - r.counts.Readers)
	end.Stats.FailedReads = max(end.Stats.FailedReads, int64(counts.FailedReads-r.counts.FailedReads))
	return nil
}
