package worker

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"quarry/internal/proc"
	"quarry/nbd/attach"
	"quarry/worker/folder"
	"quarry/worker/reader"
)

// A keeper is a background process that makes up for the death of others: it
// starts the reader again, and cleans up behind a shim. It owns nothing that they
// need: when it dies they go on, and the next command starts another, which finds
// them by their locks and sockets.

const (
	// adoptGrace is how long a new keeper waits for the reader of whoever started
	// the keeper before it starts one itself.
	adoptGrace = 100 * time.Millisecond
	// keeperGrace is how long the keeper that EnsureReader has started may take.
	keeperGrace = 200 * time.Millisecond
	// listenEvery and deafAfter: a reader that answers nothing for so long is
	// killed, so that what it was asked can be asked again well within a read's
	// deadline of 270 s.
	listenEvery = 5 * time.Second
	deafAfter   = time.Minute
	// deafLooks and startLooks: a shim that has not run for so many looks, which are
	// listenEvery apart, is killed: half a minute, and one that has not mounted its
	// image yet, and waits a minute for its reader, 95 s.
	deafLooks  = 6
	startLooks = 19
	// A reader that ends within steady of being up has died at once. The first
	// freeRestarts in a row are replaced at once, and then after a pause that
	// doubles from minBackOff to maxBackOff: at most a twentieth of a processor for
	// one that never comes up.
	steady       = 100 * time.Millisecond
	freeRestarts = 3
	minBackOff   = 50 * time.Millisecond
	maxBackOff   = time.Second
	// scanEvery is how soon a new shim is watched. A shim that dies sooner is found
	// dead by the scan.
	scanEvery = 500 * time.Millisecond
	// sweepPatience is how long a sweep waits for the image's lock. Who holds it for
	// longer may itself wait for a read of the dead mount, which the sweep ends.
	sweepPatience = 2 * time.Second
	// sweepAgain is when a sweep that failed is tried again.
	sweepAgain = 10 * time.Second
	// superviseEvery is how soon a running command sees that there is no keeper.
	superviseEvery = time.Second
)

// Keep supervises the folder's reader and shims until there is neither, or ctx
// ends. Only one keeper runs per folder: a second one returns nil.
func (w *Worker) Keep(ctx context.Context) error {
	for {
		l, err := proc.TakeFree(ctx, w.Dir.KeeperLock())
		if errors.Is(err, proc.ErrLocked) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := l.Sign(); err != nil { // who is frozen and not named is not replaced
			w.log().WarnContext(ctx, "the keeper's lock does not name it", "err", err)
		}
		err = w.keep(ctx, l)
		l.Unlock()
		if err != nil || ctx.Err() != nil {
			return err
		}
		// A command that saw the lock held a moment ago counts on a keeper.
		if _, err := reader.Find(ctx, w.Dir); err != nil && !w.anyShim() {
			return nil
		}
	}
}

// keep does that as long as the lock stands: without it another keeper may run.
func (w *Worker) keep(ctx context.Context, l *proc.Lock) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var g errgroup.Group
	g.Go(func() error {
		defer cancel()
		return w.keepReader(ctx)
	})
	g.Go(func() error {
		defer cancel()
		w.watchShims(ctx, l)
		return nil
	})
	return g.Wait()
}

// keepReader waits for the reader's end and starts the next one, while there is a
// shim that needs it.
func (w *Worker) keepReader(ctx context.Context) error {
	grace, short := adoptGrace, 0
	for {
		p, err := w.upReader(ctx, grace)
		grace = 0
		if ctx.Err() != nil {
			return nil
		}
		up := time.Now()
		if err == nil {
			w.awaitReader(ctx, p, listenEvery, deafAfter)
			p.Close()
			if ctx.Err() != nil {
				return nil
			}
		}
		if errors.Is(err, errReaderLeft) {
			err = nil
		}
		if !w.anyShim() {
			return err
		}
		if err == nil && time.Since(up) > steady {
			short = 0
		} else {
			short++
		}
		pause := backOff(short)
		w.log().WarnContext(ctx, "reader has ended and is started again", "was_up", time.Since(up), "err", err, "pause", pause)
		if !sleep(ctx, pause) {
			return nil
		}
	}
}

func backOff(short int) time.Duration {
	if short <= freeRestarts {
		return 0
	}
	return min(minBackOff<<min(short-freeRestarts-1, 10), maxBackOff)
}

// sleep reports whether it was not ended by ctx.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// errReaderLeft says that a reader has ended well: it was told to, or had nothing
// to do.
var errReaderLeft = errors.New("the reader has left")

// upReader returns the reader that answers. When none does within grace it starts
// one. Errors: errReaderLeft when that one has ended and there is no other.
func (w *Worker) upReader(ctx context.Context, grace time.Duration) (*proc.Process, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	var child chan error
	start := time.Now().Add(grace)
	for {
		p, err := reader.Find(ctx, w.Dir)
		if err == nil {
			return p, nil
		}
		if child == nil && time.Now().After(start) {
			cmd, err := proc.Start(w.ReaderCommand, w.Dir.ReaderLog(), nil)
			if err != nil {
				return nil, fmt.Errorf("start the reader: %w", err)
			}
			child = make(chan error, 1)
			go func() { child <- cmd.Wait() }() // ends with the reader, or with this process
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("the reader does not answer: %w", ctx.Err())
		case err := <-child:
			if err != nil {
				return nil, fmt.Errorf("the reader ended: %w: %s", err, proc.LastLine(w.Dir.ReaderLog()))
			}
			if !proc.Locked(w.Dir.ReaderLock()) {
				return nil, errReaderLeft
			}
			// It found another reader, which will answer, or is about to end.
			child, start = nil, time.Now().Add(minBackOff)
		case <-time.After(poll):
		}
	}
}

// awaitReader returns when the reader has ended, by itself or because it has been
// deaf for a while.
func (w *Worker) awaitReader(ctx context.Context, p *proc.Process, every, deaf time.Duration) {
	for heard := time.Now(); ; {
		waitCtx, cancel := context.WithTimeout(ctx, every)
		err := p.Wait(waitCtx)
		cancel()
		switch {
		case err == nil, ctx.Err() != nil:
			return
		case answers(ctx, w.Dir, every):
			heard = time.Now()
		case time.Since(heard) > deaf:
			w.log().ErrorContext(ctx, "reader answers nothing and is killed", "for", time.Since(heard))
			p.Signal(unix.SIGKILL)
		}
	}
}

func answers(ctx context.Context, d folder.Dir, within time.Duration) bool {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	return reader.Answers(ctx, d)
}

// anyShim reports whether an image is mounted, or about to be.
func (w *Worker) anyShim() bool {
	for _, name := range w.mountNames() {
		if _, held := attach.Holder(filepath.Join(w.Dir.Mounts(), name)); held {
			return true
		}
	}
	return false
}

// mountNames lists the mounts' folders.
func (w *Worker) mountNames() (names []string) {
	entries, err := os.ReadDir(w.Dir.Mounts())
	if err != nil {
		return nil
	}
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names
}

// shimWatch is what a keeper knows of a mount's folder.
type shimWatch int

const (
	shimUnknown shimWatch = iota
	shimWatched           // a goroutine waits for its end
	shimSwept             // it was dead and is being swept
)

// watchShims sweeps behind every shim that dies, until ctx ends or the lock is lost.
func (w *Worker) watchShims(ctx context.Context, l *proc.Lock) {
	var work sync.WaitGroup
	defer work.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	known := map[string]shimWatch{}
	ended := make(chan string)
	tick := time.NewTicker(scanEvery)
	defer tick.Stop()
	for {
		names := w.mountNames()
		next := make(map[string]shimWatch, len(names))
		for _, name := range names {
			next[name] = w.lookAt(ctx, name, known[name], ended, &work)
		}
		known = next
		select {
		case <-ctx.Done():
			return
		case name := <-ended:
			delete(known, name)
		case <-tick.C:
			if !l.Stands() {
				w.log().WarnContext(ctx, "the keeper's lock was removed; it is taken anew, by this keeper or another", "file", w.Dir.KeeperLock())
				return
			}
		}
	}
}

// lookAt begins to watch a mount's shim, or sweeps behind it. What it knows of the
// mount is to be forgotten when ended tells its name.
func (w *Worker) lookAt(ctx context.Context, name string, known shimWatch, ended chan<- string, work *sync.WaitGroup) shimWatch {
	dir := filepath.Join(w.Dir.Mounts(), name)
	// One that was killed with a thread in mount(2) or umount(2) does not end before
	// it is swept, but lets go of its lock.
	if known == shimWatched && attach.Locked(dir) {
		return known
	}
	pid, held := attach.Holder(dir)
	switch {
	case pid > 0:
		p, err := proc.Open(pid)
		if err != nil {
			return shimUnknown
		}
		work.Go(func() {
			defer p.Close()
			if w.awaitShim(ctx, p, listenEvery, func() int { return mayRest(dir) }) {
				select {
				case ended <- name:
				case <-ctx.Done():
				}
			}
		})
		return shimWatched
	case held: // it starts, or cannot be named here
		return shimUnknown
	case known == shimSwept || !attach.Leftovers(dir):
		return known
	}
	work.Go(func() {
		if !w.sweepBehind(ctx, dir) && !sleep(ctx, sweepAgain) {
			return
		}
		select {
		case ended <- name:
		case <-ctx.Done():
		}
	})
	return shimSwept
}

// awaitShim reports whether the shim has ended, by itself or because it was deaf: so
// many looks in a row have found it at rest.
func (w *Worker) awaitShim(ctx context.Context, p *proc.Process, every time.Duration, mayRest func() int) bool {
	for r := (rest{}); ; {
		waitCtx, cancel := context.WithTimeout(ctx, every)
		err := p.Wait(waitCtx)
		cancel()
		switch {
		case err == nil:
			return true
		case ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded):
			return false
		}
		still := r.look(p)
		if still == 0 || still < mayRest() {
			continue
		}
		w.log().ErrorContext(ctx, "shim does not run any more and is killed: reads of its mount get EIO", "pid", p.PID(), "looks", still, "every", every)
		r.looks = 0
		p.Signal(unix.SIGKILL)
	}
}

// mayRest is how many looks may find the shim of a mount at rest: one that serves
// looks after its mount four times a second, whatever it waits for.
func mayRest(dir string) int {
	if mounted(dir) {
		return deafLooks
	}
	return startLooks
}

// sweepBehind takes apart what a dead shim was serving: reads that the kernel
// still waits for end with EIO. It reports whether nothing is left to do.
func (w *Worker) sweepBehind(ctx context.Context, dir string) bool {
	lockCtx, cancel := context.WithTimeout(ctx, sweepPatience)
	defer cancel()
	if l, err := proc.TakeLock(lockCtx, dir+".lock"); err == nil {
		defer l.Unlock()
	}
	err := attach.Sweep(ctx, dir)
	if errors.Is(err, attach.ErrInUse) { // mounted again meanwhile
		return true
	}
	w.log().WarnContext(ctx, "shim has ended; its mount was taken apart", "dir", dir, "err", err)
	return err == nil
}

// startKeeper starts a keeper and returns its end.
func (w *Worker) startKeeper() (<-chan error, error) {
	cmd, err := proc.Start(w.KeeperCommand, w.Dir.KeeperLog(), nil)
	if err != nil {
		return nil, fmt.Errorf("start the keeper: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // ends with the keeper, or with this process
	return ended, nil
}

// awaitKeeper waits until a keeper runs. One is about to; if it does not come,
// another is started.
func (w *Worker) awaitKeeper(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	var ended <-chan error
	for began := time.Now(); !proc.Locked(w.Dir.KeeperLock()); {
		if ended == nil && time.Since(began) > keeperGrace {
			var err error
			if ended, err = w.startKeeper(); err != nil {
				return err
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the keeper does not start: %w", ctx.Err())
		case err := <-ended:
			if err != nil && !proc.Killed(err) {
				return fmt.Errorf("the keeper ended: %w: %s", err, proc.LastLine(w.Dir.KeeperLog()))
			}
			// It was killed, or found another, which may be about to end.
			ended, began = nil, time.Now()
		case <-time.After(poll):
		}
	}
	return nil
}

// supervised makes sure, while a command waits for what a keeper may have to mend, that
// one runs: who waits for the command starts no other that would. The returned function
// ends that.
func (w *Worker) supervised(ctx context.Context) (end func()) {
	ctx, cancel := context.WithCancel(ctx)
	var g sync.WaitGroup
	g.Go(func() {
		k := keeperWatch{w: w}
		for sleep(ctx, superviseEvery) {
			k.look(ctx)
			if err := w.awaitKeeper(ctx); err != nil && ctx.Err() == nil {
				w.log().WarnContext(ctx, "no keeper runs; reads wait if the reader dies", "err", err)
			}
		}
	})
	return func() {
		cancel()
		g.Wait()
	}
}
