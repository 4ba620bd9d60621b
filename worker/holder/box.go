package holder

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
	"quarry/worker/sentry"
)

// box is the sandbox of a holder.
type box struct {
	dir       string
	id        string
	maxOutput int64
	log       *slog.Logger
	keep      *os.File
	journal   *journal
	sentry    *sentry.Client
	socket    string // the Sentry's
	gate      gate
	questions gate      // which a hibernation shuts
	unwritten sync.Once // says that execs are not recorded
	room      room
	tasks     sync.WaitGroup   // everything that follows the sandbox
	init      []*stream        // outputs of the first process
	initEnds  map[int]*os.File // its streams, for who is restored
	runsc     []string
	score     []byte        // oom_score_adj before it was shielded
	bare      bool          // its first process is the sleeper
	ended     chan struct{} // end is set

	mu         sync.Mutex // guards what follows
	state      State      // what changes with a restore alone
	nap        nap
	onDisk     int64              // of a hibernation
	upper      int64              // of that, what a restore writes to the disk again
	asleep     chan struct{}      // closed when the Sentry of a nap is gone
	unwanted   context.CancelFunc // ends a restore under way
	execs      map[string]*execution
	past       map[idSum]struct{} // ids of execs that are forgotten
	order      []*execution       // of execs, as they were started; never changed in place
	begun      int64              // execs that were started
	sessions   map[string]*place
	running    int
	tools      int
	helpers    int
	starting   int          // helpers that are being started
	helping    map[int]bool // PIDs of helpers that run
	isPaused   bool
	pausedAt   time.Time
	paused     time.Duration // not counting a pause that lasts
	pauses     int64
	over       bool           // it ends or has ended
	killed     bool           // by End
	forced     bool           // the holder has killed one of its processes
	reason     string         // why the holder gave it up
	initStatus *sentry.Status // nil until the Sentry told
	sentryPID  int            // 0 once it was waited for
	goferPID   int
	goferLost  bool // it was ended from outside
	end        Ended
}

// config is what the holder's process reads from its stdin.
type config struct {
	Format     string   `json:"format"`
	Dir        string   `json:"dir"`
	ID         string   `json:"id"`
	Runsc      []string `json:"runsc"`
	Entrypoint bool     `json:"entrypoint"`
	MaxOutput  int64    `json:"max_output_bytes"`
	MaxKept    int64    `json:"max_kept_bytes"`
}

const (
	configFormat = "quarry-holder-config/2"
	maxConfig    = 64 << 10
	// maxInitOutput is kept of each stream of the first process.
	maxInitOutput = 1 << 20
)

func newBox(c config, log *slog.Logger, keep *os.File) *box {
	kept := cmp.Or(c.MaxKept, DefaultKept)
	return &box{
		dir: c.Dir, id: c.ID, maxOutput: cmp.Or(c.MaxOutput, DefaultMaxOutput), log: log, keep: keep,
		runsc: c.Runsc, bare: !c.Entrypoint, helping: map[int]bool{}, execs: map[string]*execution{}, past: map[idSum]struct{}{}, ended: make(chan struct{}),
		room: room{left: kept - kept/journalPart},
	}
}

// run starts the sandbox and returns when its first process runs.
func (b *box) run(ctx context.Context, c config) error {
	// The Sentry and the gofer outlive runsc run; they become children of this process.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become subreaper: %w", err)
	}
	var files []*os.File
	argv := []string{"run"}
	if !c.Entrypoint {
		program, err := sleeperFile()
		if err != nil {
			return err
		}
		defer program.Close()
		files = append(files, program)
		argv = append(argv, "--exec-fd", "3") // the first of ExtraFiles
	}
	guest, err := b.initStreams(c.Entrypoint)
	if err != nil {
		return err
	}
	b.initEnds = guest
	for _, s := range b.init {
		b.tasks.Go(s.drain) // ends with finish at the latest
	}
	if err := b.launch(ctx, files, argv...); err != nil {
		return b.abandon(err)
	}
	return nil
}

// launch has runsc start the sandbox, and follows its processes. When that fails some may
// be left, for the caller to end.
func (b *box) launch(ctx context.Context, files []*os.File, how ...string) error {
	pidFile := filepath.Join(b.dir, "pid")
	argv := slices.Concat(b.runsc[1:], []string{
		"--root", filepath.Join(b.dir, "runsc"), "--log", b.logPath(), "--log-format", "json",
		"--panic-log", b.panicPath(),
		// Idle connections of ours are no reason for a Sentry that has ended to stay.
		"--control-rpc-stop-timeout", "0",
	}, how, []string{"--detach", "--pid-file", pidFile, "--bundle", b.dir, b.id})
	cmd := exec.CommandContext(ctx, b.runsc[0], argv...)
	cmd.ExtraFiles = files
	cmd.Stdin, cmd.Stdout, cmd.Stderr = b.initEnds[0], b.initEnds[1], b.initEnds[2]
	err := cmd.Run()
	if err == nil {
		err = b.found(pidFile)
	} else {
		err = fmt.Errorf("runsc %s did not start the sandbox: %w: %s", how[0], err, b.said())
	}
	if err != nil {
		return err
	}
	b.mu.Lock() // first: it may end at once, and by itself
	b.nap, b.unwanted, b.state.Hibernated = napNone, nil, false
	b.mu.Unlock()
	b.tasks.Go(b.reap)
	b.tasks.Go(b.waitInit)
	return nil
}

// abandon ends a sandbox that could not be started, or restored, and returns why.
func (b *box) abandon(err error) error {
	b.giveUp(plain(err.Error())) // first: there may be nobody to reap
	b.tasks.Go(b.reap)
	b.clear()
	return err
}

// clear ends what a runsc that failed has left, which no file may name.
func (b *box) clear() {
	for {
		b.killChildren()
		select {
		case <-b.ended:
			return
		case <-time.After(clearPoll):
		}
	}
}

const clearPoll = 10 * time.Millisecond

// initStreams returns the first process's streams: nothing, or its output into files.
func (b *box) initStreams(entrypoint bool) (map[int]*os.File, error) {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	guest := map[int]*os.File{0: null, 1: null, 2: null}
	if !entrypoint {
		return guest, nil
	}
	for fd, name := range []string{1: "stdout", 2: "stderr"} {
		if name == "" {
			continue
		}
		read, write, err := outputPipe()
		if err != nil {
			closeGuest(guest)
			return nil, err
		}
		guest[fd] = write
		b.init = append(b.init, newStream(InitOutputPath(b.dir, name), maxInitOutput, read, func() {}))
	}
	return guest, nil
}

// sleeperFile returns the sleeper as an open file without a name.
func sleeperFile() (*os.File, error) {
	program, err := sleeper(runtime.GOARCH)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", sandbox.ErrUnsupported, err)
	}
	fd, err := unix.MemfdCreate("sleeper", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "sleeper")
	defer f.Close()
	if _, err := f.Write(program); err != nil {
		return nil, err
	}
	return os.Open(fmt.Sprintf("/proc/self/fd/%d", fd)) // the Sentry takes one that can only be read
}

// found reads what runsc has left about the sandbox that it started.
func (b *box) found(pidFile string) error {
	raw, err := readBounded(pidFile)
	if err != nil {
		return err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil {
		return fmt.Errorf("%s: %w", pidFile, err)
	}
	states, err := filepath.Glob(filepath.Join(b.dir, "runsc", "*.state"))
	if err != nil || len(states) != 1 {
		return fmt.Errorf("runsc left %d states in %s: %w", len(states), b.dir, err)
	}
	const maxState = 4 << 20 // it has the whole spec
	raw, err = readAtMost(states[0], maxState)
	if err != nil {
		return err
	}
	var st struct {
		Gofer   int `json:"goferPid"`
		Sandbox struct {
			Socket string `json:"controlSocketPath"`
		} `json:"sandbox"`
	}
	if err := json.Unmarshal(raw, &st); err != nil || st.Sandbox.Socket == "" {
		return fmt.Errorf("%s names no control socket: %w", states[0], err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.socket = st.Sandbox.Socket; b.sentry == nil {
		b.sentry = sentry.New(b.socket, b.id)
		b.state.Started = time.Now().UTC().Round(0)
	} else {
		b.sentry.Move(b.socket)
	}
	b.state.PID, b.state.Sentry, b.state.Gofer = os.Getpid(), pid, st.Gofer
	b.sentryPID, b.goferPID = pid, st.Gofer
	return nil
}

func (b *box) logPath() string   { return filepath.Join(b.dir, "runsc.log") }
func (b *box) panicPath() string { return filepath.Join(b.dir, "panic.log") }

// said returns runsc's last error from its log, of JSON lines.
func (b *box) said() string {
	raw, err := readTail(b.logPath())
	if err != nil {
		return "it left no log"
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	var line struct{ Msg string }
	if json.Unmarshal([]byte(lines[len(lines)-1]), &line) == nil && line.Msg != "" {
		said, _, _ := strings.Cut(line.Msg, "\n") // and the stacks of a panic
		return plain(said)
	}
	return plain(lines[len(lines)-1])
}

// panicked returns the first line of what the Sentry's runtime said at its end.
func (b *box) panicked() string {
	raw, err := readTail(b.panicPath())
	if err != nil {
		return ""
	}
	for s := bufio.NewScanner(bytes.NewReader(raw)); s.Scan(); {
		if line := strings.TrimSpace(s.Text()); strings.HasPrefix(line, "panic:") || strings.HasPrefix(line, "fatal error:") {
			return plain(line)
		}
	}
	return ""
}

// waitInit waits for the end of the first process, with which the Sentry ends.
func (b *box) waitInit() {
	status, err := b.sentry.Wait(context.Background()) // ends with the Sentry
	if err != nil {
		return // reap tells
	}
	b.mu.Lock()
	b.initStatus, b.over = &status, true
	b.mu.Unlock()
	b.sentry.Close()
	select {
	case <-b.ended:
	case <-time.After(endTimeout):
		b.killProcesses()
	}
}

// endTimeout is how long the Sentry may take to end after its first process, and
// the gofer after the Sentry.
const endTimeout = 5 * time.Second

// giveUp ends a sandbox that is of no use any more, for a reason that its end tells.
func (b *box) giveUp(reason string) {
	b.mu.Lock()
	if b.reason == "" {
		b.reason = reason
	}
	b.mu.Unlock()
	b.killProcesses()
}

// killProcesses kills the Sentry and the gofer, or a sandbox that has neither. Their
// numbers are their own until reap has waited for them.
func (b *box) killProcesses() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.over, b.forced = true, true
	b.killLocked()
	if b.unwanted != nil {
		b.unwanted()
	}
	if b.nap == napAsleep { // nobody is left to reap
		b.nap = napNone
		b.tasks.Go(func() { b.finish(Ended{Sentry: notKnown, Gofer: notKnown}) })
	}
}

func (b *box) killLocked() {
	for _, pid := range []int{b.sentryPID, b.goferPID} {
		if pid > 0 {
			unix.Kill(pid, unix.SIGKILL)
		}
	}
}

// stop is End: it kills the sandbox and waits for its end.
func (b *box) stop(ctx context.Context) (Ended, error) {
	b.mu.Lock()
	if !b.over {
		b.killed = true
	}
	b.mu.Unlock()
	b.killProcesses()
	return b.waitEnded(ctx)
}

func (b *box) waitEnded(ctx context.Context) (Ended, error) {
	select {
	case <-b.ended:
		b.mu.Lock()
		defer b.mu.Unlock()
		return b.end, nil
	case <-ctx.Done():
		return Ended{}, context.Cause(ctx)
	}
}

// left counts an exec that has ended.
func (b *box) left(x *execution) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running--
	if x.state.Role == sandbox.ExecTool {
		b.tools--
	}
}

// current returns the state now.
func (b *box) current() State {
	paused, isPaused := b.pauseState()
	b.mu.Lock()
	s := b.state
	s.Paused, s.Pauses, s.PausedFor = isPaused, b.pauses, paused.Milliseconds()
	if s.Hibernated = b.nap == napAsleep; s.Hibernated {
		s.Sentry, s.Gofer, s.OnDisk = 0, 0, b.onDisk
	}
	s.Execs, s.Running, s.Tools = b.begun, b.running, b.tools
	order := b.order
	select {
	case <-b.ended:
		end := b.end
		s.Ended = &end
	default:
	}
	b.mu.Unlock()
	for _, x := range order {
		x.mu.Lock()
		out, err := x.out, x.err
		x.mu.Unlock()
		if out != nil {
			s.Output += out.state().Kept + err.state().Kept
		}
	}
	return s
}
