// Package worker is the image path of one machine that runs sandboxes: it
// mounts verified images through a reader and a shim process, and runs commands
// in them under runsc. It keeps all state in one private folder, so that any
// command can clean up after one that was killed.
package worker

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"quarry/internal/proc"
	"quarry/nbd/attach"
	"quarry/worker/folder"
	"quarry/worker/reader"
	"quarry/worker/timeline"
)

// Worker mounts images and runs commands in them on this machine.
type Worker struct {
	Dir           folder.Dir
	ReaderCommand []string     // how to start the reader
	KeeperCommand []string     // how to start the keeper
	ShimPath      string       // the quarry-shim program
	Runsc         string       // the runsc program, for Run
	ReadAheadKiB  int          // of attached devices; 0 is none
	Attach        attach.Mode  // of new mounts; "" is attach.ModeAuto
	NoTrace       bool         // the store is not told what is touched, see folder.NoTraceMark
	Log           *slog.Logger // nil = discard
}

func (w *Worker) log() *slog.Logger {
	if w.Log == nil {
		return slog.New(slog.DiscardHandler)
	}
	return w.Log
}

// startTimeout bounds the start of a reader or shim; it is longer than what a
// shim gives itself.
const startTimeout = 90 * time.Second

// EnsureReader starts the reader when none answers. It also starts a keeper when
// none runs, and does not wait for it; one that is stopped is replaced.
func (w *Worker) EnsureReader(ctx context.Context) error {
	defer timeline.Begin(ctx, timeline.Reader)()
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	w.killStopped(ctx)
	defer w.supervised(ctx)() // a reader that answers nothing is the keeper's to kill
	if !proc.Locked(w.Dir.KeeperLock()) {
		if _, err := w.startKeeper(); err != nil {
			return err
		}
	}
	probe := func(ctx context.Context) bool { return reader.Ping(ctx, w.Dir) }
	if err := proc.Ensure(ctx, w.ReaderCommand, w.Dir.ReaderLog(), probe); err != nil {
		return fmt.Errorf("the reader of %s: %w", w.Dir.Path(), err)
	}
	return nil
}
