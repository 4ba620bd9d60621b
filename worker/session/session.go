// Package session keeps a bash in a sandbox that runs one command after another, so
// that its folder, variables, functions and background jobs stay between them. Each
// command has its own output and exit status; the status comes over a descriptor of
// its own, and is not read from what the command prints.
package session

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sentry"
)

// Guest is what a session needs of the sandbox: *sentry.Client.
type Guest interface {
	Execute(ctx context.Context, e sentry.Exec) (pid int, err error)
	WaitPID(ctx context.Context, pid int) (sentry.Status, error)
	Signal(ctx context.Context, mode sentry.Mode, pid, signal int) error
	Processes(ctx context.Context) ([]sentry.Process, error)
}

var (
	// ErrNoBash says that the guest has no bash.
	ErrNoBash = errors.New("the image has no bash, which a session needs")
	// ErrBusy says that a command of the session runs.
	ErrBusy = errors.New("the session runs another command")
	// ErrEnded says that the session's bash has ended.
	ErrEnded = errors.New("the session has ended")
)

// Descriptors of bash. Its own stdin are the commands, and what it says by itself goes
// nowhere; a command gets in, out and errs as 0, 1 and 2, and none of the others.
const (
	fdIn     = 59
	fdOut    = 60
	fdErr    = 61
	fdStatus = 63
	streams  = "0<&59 1>&60 2>&61 59<&- 60>&- 61>&- 63>&-"
)

// Bash runs interactively, without a terminal: only so does SIGINT end a command and
// not the session, and so do errors that end a script. What an interactive bash does
// beyond that is switched off: job control, history, and prompts, which are commands too.
const prelude = `PS1= PS2=
\builtin set +m +H
\builtin set +o history
\builtin history -c
\builtin shopt -s execfail
\builtin unset HISTFILE PROMPT_COMMAND TMOUT MAIL MAILPATH MAILCHECK
\builtin trap '\builtin trap - INT; \builtin kill -INT $$' 41
`

// Session is one bash. Run is called by one goroutine at a time; the other methods by
// any number of them.
type Session struct {
	g        Guest
	pid      int
	script   *os.File
	out, err *pump
	ended    chan struct{} // bash has ended; then end and endErr are set
	end      sentry.Status
	endErr   error
	last     int // exit status of the command before; of Run alone

	mu   sync.Mutex
	now  *command // the one that runs
	busy bool     // Run has not returned
}

// command is one under way.
type command struct {
	nonce  string
	done   chan struct{} // its status is known
	status int
	before map[int]bool // processes that were there, by PID
	stops  sync.WaitGroup
}

// Result is how a command ended.
type Result struct {
	Code   int
	Signal int  // of the session's bash, if that ended with a signal
	Over   bool // the session's bash has ended with it
	Mute   bool // it was ended, as it did not tell how the command ended
}

// Start starts a bash as the process says, which has no Argv and no Files, and returns
// when it takes commands. It ends with ctx only until then.
func Start(ctx context.Context, g Guest, as sentry.Exec) (*Session, error) {
	s := &Session{g: g, ended: make(chan struct{})}
	guest, status, err := s.pipes()
	if err != nil {
		closeAll(guest)
		return nil, err
	}
	as.Argv = []string{"bash", "--norc", "--noprofile", "--noediting", "-i"}
	as.Files = guest
	s.pid, err = g.Execute(ctx, as)
	closeAll(guest)
	if err != nil {
		s.script.Close()
		status.Close()
		s.out.from.Close()
		s.err.from.Close()
		return nil, notThere(err)
	}
	s.err.drop.prefix = fmt.Sprintf("bash: [%d: ", s.pid)
	first := &command{nonce: newNonce(), done: make(chan struct{})}
	s.now = first
	go s.out.run() // these three end with the descriptors, which are the guest's
	go s.err.run()
	go s.readStatus(status)
	go s.wait() // ends with bash or the Sentry
	if _, err := s.script.WriteString(prelude + report(first.nonce)); err != nil {
		return nil, s.gone(ctx, err)
	}
	select {
	case <-first.done:
	case <-s.ended:
		return nil, s.gone(ctx, ErrEnded)
	case <-ctx.Done():
		s.Close()
		return nil, context.Cause(ctx)
	}
	s.release(first)
	return s, nil
}

// gone says why a bash that was just started is not there.
func (s *Session) gone(ctx context.Context, err error) error {
	select {
	case <-s.ended:
		if s.endErr != nil {
			return s.endErr
		}
		return fmt.Errorf("%w: bash exited with status %d", err, s.end.Code)
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// notThere finds out whether there is no bash.
func notThere(err error) error {
	var no *sentry.RemoteError
	if errors.As(err, &no) && errors.Is(no, sentry.ErrNoFile) {
		return fmt.Errorf("%w: %s", ErrNoBash, no.Message)
	}
	return err
}

// pipes makes bash's descriptors and returns its ends, and where its status comes.
func (s *Session) pipes() (guest map[int]*os.File, status *os.File, err error) {
	guest = map[int]*os.File{}
	var made []*os.File
	pipe := func() (r, w *os.File) {
		if err != nil {
			return nil, nil
		}
		if r, w, err = os.Pipe(); err == nil {
			made = append(made, r, w)
		}
		return r, w
	}
	in, script := pipe()
	out, outGuest := pipe()
	errs, errGuest := pipe()
	status, statusGuest := pipe()
	null, nerr := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err = errors.Join(err, nerr); err != nil {
		for _, f := range made {
			f.Close()
		}
		return nil, nil, fmt.Errorf("pipes of a session: %w", err)
	}
	guest[0], guest[1], guest[2], guest[fdIn] = in, null, null, null
	guest[fdOut], guest[fdErr], guest[fdStatus] = outGuest, errGuest, statusGuest
	for _, f := range guest {
		// What the guest gets is not to be non-blocking, which would be the programs' too.
		_ = unix.SetNonblock(int(f.Fd()), false)
	}
	s.script, s.out, s.err = script, &pump{from: out}, &pump{from: errs, drop: &filter{}}
	return guest, status, nil
}

func closeAll(guest map[int]*os.File) {
	for _, f := range guest {
		f.Close() // one that is there more than once is closed once
	}
}

func newNonce() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// report is the line that tells the status of the one before.
func report(nonce string) string {
	return `\builtin printf '` + nonce + ` %d\n' "$?" >&` + strconv.Itoa(fdStatus) + "\n"
}

// quote makes one word of a text.
func quote(text string) string { return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'" }

// maxStatusLine bounds a line of the status: a nonce and a number.
const maxStatusLine = 256

// readStatus takes in what comes over the status descriptor. Whoever finds that in the
// guest can write to it: without the nonce of the command it says nothing.
func (s *Session) readStatus(f *os.File) {
	defer f.Close()
	r := bufio.NewReaderSize(f, maxStatusLine)
	for {
		line, err := r.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			continue // the rest of it has no nonce either
		}
		if err != nil {
			return
		}
		nonce, number, ok := strings.Cut(strings.TrimSuffix(string(line), "\n"), " ")
		code, err := strconv.ParseUint(number, 10, 8)
		if !ok || err != nil {
			continue
		}
		s.mu.Lock()
		if c := s.now; c != nil && c.nonce == nonce {
			select {
			case <-c.done:
			default:
				c.status = int(code)
				close(c.done)
			}
		}
		s.mu.Unlock()
	}
}

func (s *Session) wait() {
	s.end, s.endErr = s.g.WaitPID(context.Background(), s.pid)
	s.script.Close()
	close(s.ended)
}

// PID is bash's, in the guest.
func (s *Session) PID() int { return s.pid }

// Ended is closed when bash has ended.
func (s *Session) Ended() <-chan struct{} { return s.ended }

// Close kills bash. What it had started goes on.
func (s *Session) Close() {
	_ = s.g.Signal(context.Background(), sentry.ToProcess, s.pid, int(unix.SIGKILL))
}

// Run runs a command and returns when it has ended. What it writes goes to out and
// errs, which somebody must read; what background jobs wrote since the last command
// comes first. The error is that of a session that cannot run it, or of a Sentry that
// ended under it.
func (s *Session) Run(ctx context.Context, text string, out, errs *os.File) (Result, error) {
	c := &command{nonce: newNonce(), done: make(chan struct{})}
	if err := s.claim(c); err != nil {
		return Result{}, err
	}
	defer s.free(c)
	list, err := s.g.Processes(ctx)
	if err != nil {
		return Result{}, err
	}
	s.mu.Lock()
	c.before = map[int]bool{}
	for _, p := range list {
		c.before[p.PID] = true
	}
	s.mu.Unlock()
	s.out.begin(out)
	s.err.begin(errs)
	line := `\builtin eval -- ` + quote(text) + " " + streams + "\n" + report(c.nonce)
	if s.last != 0 {
		// What $? is for the command; nothing that set -e would end bash for.
		line = fmt.Sprintf(`(\builtin exit %d) || %s`, s.last, line)
	}
	// An error is that of a bash that has ended, which the select sees.
	_, _ = s.script.WriteString(line)
	mute := s.await(c)
	s.release(c) // no Stop begins from here on
	c.stops.Wait()
	s.out.settle()
	s.err.settle()
	select {
	case <-c.done:
		s.last = c.status
		return Result{Code: c.status}, nil
	default:
	}
	if s.endErr != nil {
		return Result{Over: true}, s.endErr
	}
	return Result{Code: s.end.Code, Signal: s.end.Signal, Over: true, Mute: mute}, nil
}

// mutePoll is how often a bash is looked at that may have nothing more to do.
const mutePoll = time.Second

// await waits for the end of a command, and ends a bash that has read all lines and
// does not tell: the command may have redefined what tells it. Time alone says nothing,
// as the sandbox may be paused. But bash reads a line when it has done what the one
// before says: once it has read one more report, the first has been told, and a look
// later it has come here.
func (s *Session) await(c *command) (mute bool) {
	t := time.NewTicker(mutePoll)
	defer t.Stop()
	for asked, read := false, false; ; {
		select {
		case <-c.done:
			return false
		case <-s.ended:
			return mute
		case <-t.C:
		}
		switch {
		case mute || !s.allRead():
		case asked && !read:
			read = true
		case asked:
			mute = true
			s.Close()
		default:
			_, _ = s.script.WriteString(report(c.nonce)) // an error is that of a bash that has ended
			asked = true
		}
	}
}

// allRead reports whether bash has read all that it was told.
func (s *Session) allRead() bool {
	left := -1
	raw, err := s.script.SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Control(func(fd uintptr) {
		if n, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil {
			left = n
		}
	})
	return left == 0
}

func (s *Session) claim(c *command) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.ended:
		return ErrEnded
	default:
	}
	if s.busy {
		return ErrBusy
	}
	s.now, s.busy = c, true
	return nil
}

// free lets the next command in.
func (s *Session) free(c *command) {
	s.release(c)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.busy = false
}

// release ends what a Stop or a Signal would be for.
func (s *Session) release(c *command) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.now == c {
		s.now = nil
	}
}
