package holder

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"time"

	"crypto/sha256"

	"quarry/worker/sandbox"
	"quarry/worker/sentry"
	"quarry/worker/session"
)

// maxSessions is how many a sandbox may have at once: each is a bash and four pipes.
const maxSessions = 16

// errSessions says that a sandbox has all the sessions that it may have.
var errSessions = errors.New("too many sessions")

// place is where a session of a name stands.
type place struct {
	asked string           // what its first command said of user, folder and environment
	busy  bool             // a command has it
	s     *session.Session // nil until the first command has started it; of that command
}

// asked names what a command says of whom a session is.
func asked(s sandbox.ExecSpec) string {
	if s.User == "" && s.WorkDir == "" && len(s.Env) == 0 {
		return ""
	}
	sum := sha256.Sum256(marshal([]any{s.User, s.WorkDir, s.Env}))
	return hex.EncodeToString(sum[:])
}

// checkSession refuses what cannot be a session's command.
func checkSession(s sandbox.ExecSpec) error {
	switch {
	case !ValidExecID(s.Session):
		return fmt.Errorf("%w: session %q", sandbox.ErrInvalid, s.Session[:min(len(s.Session), maxExecID)])
	case s.PTY != nil || s.OpenStdin || len(s.Stdin) > 0:
		return fmt.Errorf("%w: a session's command has neither a terminal nor a stdin", sandbox.ErrInvalid)
	}
	if err := sentry.CheckText([]string{s.Shell}); err != nil {
		return fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)
	}
	return nil
}

// claimLocked takes a session for a command; drop gives it back. The box's lock is held.
func (b *box) claimLocked(s sandbox.ExecSpec) error {
	if s.Session == "" {
		return nil
	}
	p := b.sessions[s.Session]
	switch {
	case p == nil && len(b.sessions) >= maxSessions:
		return fmt.Errorf("%w: a sandbox has at most %d at once: end one with exit", errSessions, maxSessions)
	case p == nil:
		if b.sessions == nil {
			b.sessions = map[string]*place{}
		}
		p = &place{asked: asked(s)}
		b.sessions[s.Session] = p
	case p.busy:
		return fmt.Errorf("%w: session %s", session.ErrBusy, s.Session)
	case asked(s) != "" && asked(s) != p.asked:
		return fmt.Errorf("%w: user, cwd and env of session %s are those of its first command", sandbox.ErrInvalid, s.Session)
	}
	p.busy = true
	return nil
}

// drop gives a session back, and forgets one that has ended.
func (b *box) drop(name string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	p := b.sessions[name]
	p.busy = false
	if p.s == nil {
		delete(b.sessions, name)
		return
	}
	select {
	case <-p.s.Ended():
		delete(b.sessions, name)
	default:
	}
}

// startSession journals a session's command and begins it. What comes before it runs,
// the check and the start of a bash, is no time of the command's own.
func (x *execution) startSession(s sandbox.ExecSpec, p Process) {
	x.journal(x.state)
	guest, err := x.streams(s)
	if err != nil {
		x.box.drop(s.Session)
		x.finish(func(st *sandbox.ExecState) { lose(st, plain(err.Error())) })
		return
	}
	guest[0].Close() // the session has its own
	delete(guest, 0)
	ctx, cancel := context.WithCancel(context.Background())
	x.mu.Lock()
	x.prepare = cancel
	x.state.State = sandbox.ExecRunning
	x.wakeLocked()
	x.mu.Unlock()
	close(x.started)
	x.box.tasks.Go(x.out.drain)
	x.box.tasks.Go(x.err.drain)
	x.box.tasks.Go(func() { // ends with the command, when it is killed, or with the Sentry
		defer cancel()
		change := x.converse(ctx, s, p, guest)
		closeGuest(guest)
		x.quiet()
		x.box.drop(s.Session) // before anybody hears of the end, and comes with the next
		x.finish(change)
	})
}

// converse has the command checked and run, and returns how it ended.
func (x *execution) converse(ctx context.Context, s sandbox.ExecSpec, p Process, guest map[int]*os.File) func(*sandbox.ExecState) {
	as := sentry.Exec{
		Env: p.Env, WorkDir: p.WorkDir, UID: p.UID, GID: p.GID, Groups: p.Groups, Capabilities: p.Capabilities, NoNewPrivs: p.NoNewPrivs,
	}
	complaint, err := session.Check(ctx, x.box.sentry, as, s.Shell)
	switch {
	case err != nil:
		return x.notRun(err)
	case complaint != "":
		_, _ = guest[2].WriteString(complaint + "\n")
		return func(st *sandbox.ExecState) {
			code := 2 // as bash exits
			st.State, st.Reason, st.Message, st.ExitCode = sandbox.ExecExited, sandbox.ExecReasonSyntax, plain(complaint), &code
		}
	}
	bash, err := x.box.bash(ctx, s.Session, as)
	if err != nil {
		return x.notRun(err)
	}
	paused := x.box.pausedFor()
	x.mu.Lock()
	killed := x.why != ""
	x.state.PID, x.session = bash.PID(), bash
	x.begun, x.paused = time.Now(), paused
	x.armLocked(paused)
	x.mu.Unlock()
	if killed {
		return x.notRun(context.Canceled)
	}
	x.changed()
	r, err := bash.Run(context.Background(), s.Shell, guest[1], guest[2])
	if err != nil {
		return x.notRun(err)
	}
	return func(st *sandbox.ExecState) {
		st.State, st.ExitCode, st.Signal, st.Reason = sandbox.ExecExited, &r.Code, r.Signal, sandbox.ExecReasonExited
		switch {
		case x.why != "":
			st.Reason = x.why
		case r.Signal != 0:
			st.Reason = sandbox.ExecReasonSignaled
		}
		switch {
		case r.Mute:
			st.Message = "bash did not tell how the command ended, as when it redefines builtin or printf: the session was ended, and its folder, variables and jobs are gone"
		case r.Over:
			st.Message = "the session ended with this command: its folder, variables and jobs are gone"
		}
	}
}

// bash returns the session of a name, which the caller has claimed, and starts it
// when it is not there or has ended since.
func (b *box) bash(ctx context.Context, name string, as sentry.Exec) (*session.Session, error) {
	b.mu.Lock()
	p := b.sessions[name]
	s := p.s
	b.mu.Unlock()
	if s != nil {
		select {
		case <-s.Ended():
		default:
			return s, nil
		}
	}
	ctx, cancel := context.WithTimeout(ctx, StartTimeout)
	defer cancel()
	s, err := session.Start(ctx, b.sentry, as)
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	p.s = s
	b.mu.Unlock()
	return s, nil
}

// notRun is the end of a command that did not run, or of which nobody knows.
func (x *execution) notRun(err error) func(*sandbox.ExecState) {
	var no *sentry.RemoteError
	return func(st *sandbox.ExecState) {
		code, reason := 0, ""
		switch {
		case errors.Is(err, session.ErrNoBash):
			code, reason = 127, sandbox.ExecReasonNotFound
		case x.why != "" && errors.Is(err, context.Canceled):
			code, reason = 137, x.why
		case errors.As(err, &no):
			code, reason = whyNot(no)
		case errors.Is(err, session.ErrEnded):
			code, reason = 1, sandbox.ExecReasonNoExec
		default:
			lose(st, plain(err.Error()))
			return
		}
		st.State, st.Reason, st.Message, st.ExitCode = sandbox.ExecExited, reason, plain(err.Error()), &code
	}
}

// stopSession is killAll of a session's command.
func (x *execution) stopSession(grace time.Duration, hurry <-chan struct{}) {
	ctx, cancel := context.WithTimeout(context.Background(), grace+killTimeout)
	defer cancel()
	x.mu.Lock()
	x.prepare()
	bash := x.session
	x.mu.Unlock()
	for bash != nil {
		err := bash.Stop(ctx, grace, hurry)
		if err != nil {
			x.box.log.Warn("processes of an exec may be left", "exec", x.state.ID, "err", err)
		}
		select {
		case <-x.gone:
			return
		case <-ctx.Done():
			return
		case <-time.After(killPoll): // it was about to run
		}
	}
}

// signalSession is deliver of a session's command.
func (x *execution) signalSession(ctx context.Context, sig int) error {
	x.mu.Lock()
	bash := x.session
	x.mu.Unlock()
	if bash == nil {
		return nil // it does not run yet, as when a signal finds a process that begins
	}
	err := bash.Signal(ctx, sig)
	if errors.Is(err, session.ErrEnded) {
		return sandbox.ErrExecEnded
	}
	return err
}
