package holder

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
	"quarry/worker/sentry"
	"quarry/worker/session"
)

// execution is one exec of the sandbox, from its journal entry on.
type execution struct {
	box    *box
	number int64
	spec   sandbox.ExecSpec // without Stdin
	sum    string

	out, err *stream
	stdin    *input   // nil without one
	terminal *os.File // the master, nil without one
	started  chan struct{}
	gone     chan struct{}           // its leader has ended
	ended    chan struct{}           // its state is final
	before   <-chan []sentry.Process // who was there as it began, nil when nobody asked; set before started is closed

	mu      sync.Mutex // guards what follows
	state   sandbox.ExecState
	begun   time.Time     // with the monotonic clock
	paused  time.Duration // of the box when it began
	ran     time.Duration // once it has ended
	timer   *time.Timer   // of its timeout
	wake    chan struct{} // closed when something changes; nil when nobody waits
	why     string        // the reason of a kill under way
	sent    int           // the last signal that a caller sent
	killing chan struct{} // closed when the kill under way is over
	hurry   chan struct{} // closed to end its grace
	hurried bool
	prepare context.CancelFunc // of a session's command: ends what comes before it runs
	session *session.Session   // of a session's command that runs
}

// changed wakes those who wait for the exec.
func (x *execution) changed() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.wakeLocked()
}

func (x *execution) wakeLocked() {
	if x.wake != nil {
		close(x.wake)
		x.wake = nil
	}
}

func (x *execution) final() bool {
	return x.state.State == sandbox.ExecExited || x.state.State == sandbox.ExecUnknown
}

// snapshot returns the state now, and a channel that is closed when it changes.
func (x *execution) snapshot() (sandbox.ExecState, <-chan struct{}) {
	paused := x.box.pausedFor()
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.wake == nil {
		x.wake = make(chan struct{})
	}
	return x.stateLocked(paused), x.wake
}

func (x *execution) stateLocked(paused time.Duration) sandbox.ExecState {
	s := x.state
	s.Ran = x.ranLocked(paused).Milliseconds()
	if x.out != nil {
		s.Stdout, s.Stderr = x.out.state(), x.err.state()
	}
	return s
}

// ranLocked is how long it has run, pauses not counted.
func (x *execution) ranLocked(paused time.Duration) time.Duration {
	if x.begun.IsZero() || x.final() {
		return x.ran
	}
	return max(0, time.Since(x.begun)-(paused-x.paused))
}

// checkExec refuses what cannot be an exec.
func checkExec(s sandbox.ExecSpec, p Process) error {
	switch {
	case !ValidExecID(s.ID):
		return fmt.Errorf("%w: exec id %q", sandbox.ErrInvalid, s.ID[:min(len(s.ID), maxExecID)])
	case len(p.Argv) == 0 && s.Session == "":
		return fmt.Errorf("%w: no command", sandbox.ErrInvalid)
	case len(s.Stdin) > MaxStdin:
		return fmt.Errorf("%w: %d bytes of stdin, at most %d", sandbox.ErrInvalid, len(s.Stdin), MaxStdin)
	case s.MaxOutput < 0 || s.MaxOutput > MaxOutput:
		return fmt.Errorf("%w: max_output_bytes %d, at most %d", sandbox.ErrInvalid, s.MaxOutput, MaxOutput)
	case s.Timeout < 0 || s.KillGrace < 0 || s.Timeout > maxMillis || s.KillGrace > maxMillis:
		return fmt.Errorf("%w: a time that cannot be", sandbox.ErrInvalid)
	case s.Role != "" && s.Role != sandbox.ExecTool && s.Role != sandbox.ExecAgent:
		return fmt.Errorf("%w: role %q", sandbox.ErrInvalid, s.Role[:min(len(s.Role), maxExecID)])
	}
	if s.PTY != nil {
		if err := CheckWindow(*s.PTY); err != nil {
			return err
		}
	}
	for _, list := range [][]string{p.Argv, p.Env, {p.WorkDir}} {
		if err := sentry.CheckText(list); err != nil {
			return fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)
		}
	}
	if s.Session != "" {
		return checkSession(s)
	}
	return nil
}

// maxMillis is ten years, which still can be multiplied.
const maxMillis = 10 * 365 * 24 * 3600 * 1000

// exec starts a command, or finds the one with its id.
func (b *box) exec(ctx context.Context, s sandbox.ExecSpec, p Process) (sandbox.ExecState, error) {
	if err := checkExec(s, p); err != nil {
		return sandbox.ExecState{}, err
	}
	if err := b.gate.enter(ctx); err != nil { // no pause begins while it starts
		return sandbox.ExecState{}, err
	}
	defer b.gate.leave()
	b.retire()
	x, made, err := b.enter(s)
	if err != nil {
		return sandbox.ExecState{}, err
	}
	switch {
	case made && s.Session != "":
		x.startSession(s, p)
	case made:
		x.start(s, p)
	}
	select {
	case <-x.started:
	case <-ctx.Done():
	}
	st, _ := x.snapshot()
	return st, nil
}

// enter finds the exec of a spec, or makes and journals it.
func (b *box) enter(s sandbox.ExecSpec) (x *execution, made bool, err error) {
	sum := specSum(s)
	b.mu.Lock()
	defer b.mu.Unlock()
	if x := b.execs[s.ID]; x != nil {
		if x.sum != sum {
			return nil, false, fmt.Errorf("%w: %s: give each command an id of its own", sandbox.ErrExecConflict, s.ID)
		}
		return x, false, nil
	}
	_, was := b.past[sumOf(s.ID)]
	switch {
	case was:
		return nil, false, fmt.Errorf("%w: %s, and how is forgotten: of the execs of a sandbox the last %d are known", sandbox.ErrExecEnded, s.ID, KeptExecs)
	case b.over:
		return nil, false, sandbox.ErrEnded
	case b.isPaused:
		return nil, false, ErrPaused
	case b.begun >= MaxExecs:
		return nil, false, fmt.Errorf("%w: a sandbox has at most %d execs: make another sandbox", sandbox.ErrInvalid, MaxExecs)
	case b.running >= MaxRunning:
		return nil, false, fmt.Errorf("%w: %d execs run: wait for one to end", sandbox.ErrCapacity, b.running)
	}
	if err := b.claimLocked(s); err != nil {
		return nil, false, err
	}
	role := cmp.Or(s.Role, sandbox.ExecTool)
	x = &execution{box: b, number: b.begun + 1, sum: sum, spec: s, started: make(chan struct{}), gone: make(chan struct{}), ended: make(chan struct{})}
	// What may be large is not kept: a sandbox may have many execs.
	x.spec.Stdin, x.spec.Argv, x.spec.Env, x.spec.Shell = nil, nil, nil, ""
	x.state = sandbox.ExecState{ID: s.ID, State: sandbox.ExecStarting, Role: role, Started: time.Now().UTC().Round(0)}
	b.execs[s.ID] = x
	b.order = append(b.order, x)
	b.begun++
	b.running++
	if role == sandbox.ExecTool {
		b.tools++
	}
	return x, true, nil
}

// journal writes the exec's record. When that cannot be done, as on a full disk, the
// holder itself still knows.
func (x *execution) journal(st sandbox.ExecState) {
	if err := x.box.journal.add(execRecord{execFormat, x.number, x.sum, st}); err != nil {
		x.box.unwritten.Do(func() { // the log has no bound of its own
			x.box.log.Warn("execs are not recorded", "exec", st.ID, "err", err)
		})
	}
}

// start journals the exec and starts it.
func (x *execution) start(s sandbox.ExecSpec, p Process) {
	x.journal(x.state)
	guest, err := x.streams(s)
	if err != nil {
		x.finish(func(st *sandbox.ExecState) { lose(st, plain(err.Error())) })
		return
	}
	x.lookBefore()
	ctx, cancel := context.WithTimeout(context.Background(), StartTimeout)
	defer cancel()
	pid, err := x.box.sentry.Execute(ctx, sentry.Exec{
		Argv: p.Argv, Env: p.Env, WorkDir: p.WorkDir, UID: p.UID, GID: p.GID, Groups: p.Groups, Capabilities: p.Capabilities,
		NoNewPrivs: p.NoNewPrivs, Files: guest, PTY: x.terminal != nil,
	})
	closeGuest(guest)
	if err != nil {
		x.refused(err)
		return
	}
	x.mu.Lock()
	x.state.State, x.state.PID, x.begun, x.paused = sandbox.ExecRunning, pid, time.Now(), x.box.pausedFor()
	x.armLocked(x.paused)
	x.wakeLocked()
	x.mu.Unlock()
	close(x.started)
	x.box.tasks.Go(x.out.drain)
	if x.terminal == nil {
		x.box.tasks.Go(x.err.drain)
	}
	if x.stdin != nil && len(s.Stdin) > 0 {
		x.box.tasks.Go(func() { x.stdin.feed(s.Stdin, !s.OpenStdin) })
	}
	x.box.tasks.Go(func() { x.wait(pid) })
}

// StartTimeout bounds the Sentry's answer to the start of a command: it may have
// to read the program from an image whose store is away.
const StartTimeout = 2 * time.Minute

// streams makes the exec's own ends and returns those of the guest.
func (x *execution) streams(s sandbox.ExecSpec) (guest map[int]*os.File, err error) {
	limit := cmp.Or(s.MaxOutput, x.box.maxOutput)
	dir := execDir(x.box.dir, s.ID)
	if s.PTY != nil {
		master, end, err := openPTY(*s.PTY)
		if err != nil {
			return nil, err
		}
		x.terminal = master
		x.out, x.err = x.newStream(filepath.Join(dir, "stdout"), limit, master), closedStream()
		x.stdin = newInput(master, x)
		return map[int]*os.File{0: end, 1: end, 2: end}, nil
	}
	guest = map[int]*os.File{}
	defer func() {
		if err != nil {
			closeGuest(guest)
		}
	}()
	if len(s.Stdin) > 0 || s.OpenStdin {
		read, write, err := inputPipe()
		if err != nil {
			return nil, err
		}
		guest[0], x.stdin = read, newInput(write, x)
	} else if guest[0], err = os.Open(os.DevNull); err != nil {
		return nil, err
	}
	for fd, to := range map[int]**stream{1: &x.out, 2: &x.err} {
		read, write, err := outputPipe()
		if err != nil {
			return nil, err
		}
		guest[fd] = write
		*to = x.newStream(filepath.Join(dir, []string{1: "stdout", 2: "stderr"}[fd]), limit, read)
	}
	return guest, nil
}

func closeGuest(guest map[int]*os.File) {
	for _, f := range guest {
		f.Close() // a terminal's is there three times, and closed once
	}
}

// refused ends an exec that the Sentry did not start, or that it may have started
// and did not tell of.
func (x *execution) refused(err error) {
	var no *sentry.RemoteError
	x.finish(func(st *sandbox.ExecState) {
		if !errors.As(err, &no) {
			lose(st, plain(err.Error()))
			return
		}
		code, reason := whyNot(no)
		st.State, st.Reason, st.Message, st.ExitCode = sandbox.ExecExited, reason, plain(no.Message), &code
	})
}

// whyNot says why a program did not start, and what a shell would exit with.
func whyNot(err error) (code int, reason string) {
	const notExecutable, notFound = 126, 127
	switch {
	case errors.Is(err, sentry.ErrProcesses):
		return notExecutable, sandbox.ExecReasonProcess
	case errors.Is(err, sentry.ErrNoFile):
		return notFound, sandbox.ExecReasonNotFound
	}
	return notExecutable, sandbox.ExecReasonNoExec
}

// wait sees the end of the exec's leader and of its output.
func (x *execution) wait(pid int) {
	status, err := x.box.sentry.WaitPID(context.Background(), pid) // ends with the Sentry
	x.quiet()
	x.finish(func(st *sandbox.ExecState) {
		if err != nil {
			lose(st, plain(err.Error()))
			return
		}
		st.State, st.ExitCode, st.Signal = sandbox.ExecExited, &status.Code, status.Signal
		switch {
		case x.why != "":
			st.Reason = x.why
		case status.Signal != 0 && status.Signal == x.sent:
			st.Reason = sandbox.ExecReasonKilled
		case status.Signal != 0:
			st.Reason = sandbox.ExecReasonSignaled
		default:
			st.Reason = sandbox.ExecReasonExited
		}
	})
}

// quiet is for a command that has ended: nobody kills it any more.
func (x *execution) quiet() {
	close(x.gone)
	x.mu.Lock()
	killing := x.killing
	if x.timer != nil {
		x.timer.Stop()
	}
	x.mu.Unlock()
	if killing != nil {
		<-killing // those of its processes that are left; bounded by killTimeout
	}
}

// finish waits for what the command has written, and makes its state final. The
// change is made with the exec's lock held.
func (x *execution) finish(change func(*sandbox.ExecState)) {
	began := true
	select {
	case <-x.started:
	default:
		began = false
	}
	for _, s := range []*stream{x.out, x.err} {
		switch {
		case s == nil:
		case began:
			s.leave()
			<-s.done
		default:
			s.abandon()
		}
	}
	if x.out == nil {
		x.out, x.err = closedStream(), closedStream()
	}
	if x.stdin != nil {
		x.stdin.close()
	}
	paused, lost := x.box.pausedFor(), x.box.lostGofer()
	x.mu.Lock()
	ran := x.ranLocked(paused)
	x.mu.Unlock()
	// Before anybody hears of the end: who does may pause the sandbox, or run what needs
	// the place of this one or of its output.
	x.box.left(x)
	x.box.room.offer(x)
	x.mu.Lock()
	x.ran = ran
	change(&x.state)
	if x.state.Infra == "" {
		x.state.Infra = lost
	}
	now := time.Now().UTC().Round(0)
	x.state.Ended = &now
	st := x.stateLocked(paused)
	x.mu.Unlock()
	x.journal(st)
	x.changed()
	close(x.ended)
	if !began {
		close(x.started)
	}
}

// arm sets the timer of the exec's timeout to what is left of it.
func (x *execution) arm() {
	paused := x.box.pausedFor()
	x.mu.Lock()
	defer x.mu.Unlock()
	x.armLocked(paused)
}

func (x *execution) armLocked(paused time.Duration) {
	if x.spec.Timeout == 0 || x.final() || x.begun.IsZero() {
		return
	}
	left := time.Duration(x.spec.Timeout)*time.Millisecond - x.ranLocked(paused)
	if x.timer != nil {
		x.timer.Stop()
	}
	x.timer = time.AfterFunc(max(left, 0), x.timedOut)
}

// timedOut kills the exec, unless the time was not its own.
func (x *execution) timedOut() {
	paused, isPaused := x.box.pauseState()
	x.mu.Lock()
	over := x.ranLocked(paused) >= time.Duration(x.spec.Timeout)*time.Millisecond
	if !over && !isPaused {
		x.armLocked(paused)
	}
	x.mu.Unlock()
	if over && !isPaused { // Resume arms it again
		x.kill(sandbox.ExecReasonTimeout, time.Duration(x.spec.KillGrace)*time.Millisecond)
	}
}

// signal is a caller's.
func (x *execution) signal(ctx context.Context, sig int) error {
	if sig < 1 || sig > 64 {
		return fmt.Errorf("%w: signal %d", sandbox.ErrInvalid, sig)
	}
	select {
	case <-x.started:
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	x.mu.Lock()
	over, pid := x.final(), x.state.PID
	x.sent = sig
	x.mu.Unlock()
	if over {
		return sandbox.ErrExecEnded
	}
	if sig == int(unix.SIGKILL) {
		x.kill(sandbox.ExecReasonKilled, 0)
		return nil
	}
	return x.deliver(ctx, pid, sig)
}

// deliver sends a signal to what runs in front on the exec's terminal, or to its
// process group.
func (x *execution) deliver(ctx context.Context, pid, sig int) error {
	if x.spec.Session != "" {
		return x.signalSession(ctx, sig)
	}
	mode := sentry.ToGroup
	if x.terminal != nil {
		mode = sentry.ToForeground
	}
	err := x.box.sentry.Signal(ctx, mode, pid, sig)
	var no *sentry.RemoteError
	if errors.As(err, &no) {
		return fmt.Errorf("%w: %s", sandbox.ErrExecEnded, plain(no.Message))
	}
	return err
}
