package wait

import (
	"context"
	"sync"
	"time"
)

// lastResume bounds the resumption of a sandbox that is watched no more.
const lastResume = 5 * time.Second

// Watched is a sandbox that is watched.
type Watched struct {
	s Sandbox
	w *Watcher

	mu     sync.Mutex // guards what follows
	m      machine
	cancel context.CancelFunc // of the Pause that runs
	wakes  *wakeUp            // the next that comes of a Resume; nil while the sandbox runs
	ended  bool

	kick chan struct{} // the machine has another answer; one is enough
	stop chan struct{} // closed by Close
	once sync.Once
	done chan struct{} // closed when loop has returned
}

// wakeUp is what comes of a Resume.
type wakeUp struct {
	done chan struct{} // closed when it is known
	err  error         // nil: the sandbox runs
}

func newWatched(w *Watcher, s Sandbox) *Watched {
	return &Watched{
		s: s, w: w, m: newMachine(w.cfg),
		kick: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
	}
}

// Use resumes the sandbox if it is paused, and keeps it running until release is
// called: for a command, a file that is written, a call of the API. When it returns
// without an error the sandbox runs, as far as this watcher is concerned. Otherwise the
// error is that of Resume, which is called again all the same, or of ctx.
func (x *Watched) Use(ctx context.Context) (release func(), err error) {
	x.mu.Lock()
	x.m.uses++
	x.change(x.m.toRun(Used, time.Now()))
	wakes := x.wakes
	x.mu.Unlock()
	release = sync.OnceFunc(func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.m.uses--
		x.m.news = time.Now()
		x.change(true)
	})
	if wakes == nil {
		return release, nil
	}
	select {
	case <-wakes.done:
		err = wakes.err
	case <-ctx.Done():
		err = ctx.Err()
	}
	if err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// Asks says whether a request of the sandbox is without an answer, as far as is seen.
func (x *Watched) Asks() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.m.phase != running || x.m.waits()
}

// Close ends the watch. A sandbox that is paused is resumed.
func (x *Watched) Close() {
	x.w.forget(x)
	x.end()
}

func (x *Watched) end() {
	x.once.Do(func() { close(x.stop) })
	<-x.done
}

// change is called with the lock held after the machine changed.
func (x *Watched) change(sooner bool) {
	if x.m.wake != nil && x.cancel != nil {
		x.cancel()
	}
	if sooner {
		select {
		case x.kick <- struct{}{}:
		default:
		}
	}
}

func (x *Watched) packet(p packet, now time.Time) {
	x.mu.Lock()
	x.change(x.m.packet(p, now))
	x.mu.Unlock()
}

// see says whether packets are seen from now on. Either way nothing that was seen
// before counts.
func (x *Watched) see(blind bool, why Reason, now time.Time) {
	x.mu.Lock()
	x.m.blind = blind
	x.change(x.m.doubt(why, now))
	x.mu.Unlock()
}

// doubt forgets what was seen.
func (x *Watched) doubt(why Reason, now time.Time) {
	x.mu.Lock()
	x.change(x.m.doubt(why, now))
	x.mu.Unlock()
}

// loop does what the machine says until Close.
func (x *Watched) loop() {
	defer close(x.done)
	timer := time.NewTimer(time.Hour)
	defer timer.Stop()
	for {
		x.mu.Lock()
		act, at := x.m.next(time.Now())
		x.mu.Unlock()
		switch act {
		case doSample:
			x.sample()
			continue
		case doResume:
			x.resume(context.Background())
			continue
		}
		var due <-chan time.Time
		if !at.IsZero() {
			timer.Reset(time.Until(at))
			due = timer.C
		}
		select {
		case <-x.kick:
		case <-due:
		case <-x.stop:
			x.last()
			return
		}
	}
}

// sample asks what the sandbox has used, which may take its time, and pauses it if
// that is the answer.
func (x *Watched) sample() {
	var f facts
	f.cpu, f.err = x.s.CPU()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	x.mu.Lock()
	act := x.m.sampled(f, time.Now())
	if act == doPause {
		x.cancel, x.wakes = cancel, &wakeUp{done: make(chan struct{})}
	}
	x.mu.Unlock()
	if act != doPause {
		return
	}
	err := x.s.Pause(ctx)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.cancel = nil
	x.m.didPause(err, time.Now())
	if err != nil {
		x.woke(nil)
		x.w.cfg.Metrics.pauses.WithLabelValues(pauseFailed).Inc()
		x.w.cfg.Log.Debug("a sandbox that waits for its model is not paused yet", "sandbox", x.s.ID, "error", err)
		return
	}
	x.w.cfg.Metrics.pauses.WithLabelValues(pauseDone).Inc()
	x.w.cfg.Metrics.paused.Inc()
}

// woke tells who waits for the sandbox that it runs, or why it does not. The lock is held.
func (x *Watched) woke(err error) {
	if x.wakes == nil {
		return
	}
	x.wakes.err = err
	close(x.wakes.done)
	x.wakes = nil
	if err != nil {
		x.wakes = &wakeUp{done: make(chan struct{})}
	}
}

// resume resumes the sandbox, whose machine is in the phase resuming.
func (x *Watched) resume(ctx context.Context) error {
	x.mu.Lock()
	wake := *x.m.wake
	x.mu.Unlock()
	err := x.s.Resume(ctx, wake)
	now := time.Now()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.m.didResume(err, now)
	x.woke(err)
	if err != nil {
		x.w.cfg.Log.Error("a paused sandbox was not resumed, and is tried again", "sandbox", x.s.ID, "error", err)
		return err
	}
	x.w.cfg.Metrics.paused.Dec()
	x.w.cfg.Metrics.woken(wake, now)
	return nil
}

// last resumes the sandbox at the end of the watch.
func (x *Watched) last() {
	x.mu.Lock()
	x.ended = true
	x.m.blind = true
	x.m.doubt(Stopped, time.Now())
	is := x.m.phase == paused
	if is {
		x.m.phase = resuming
	}
	x.mu.Unlock()
	if !is {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), lastResume)
	defer cancel()
	if x.resume(ctx) != nil {
		x.mu.Lock()
		x.woke(nil) // nobody is to wait for ever
		x.mu.Unlock()
		x.w.cfg.Metrics.paused.Dec()
	}
}
