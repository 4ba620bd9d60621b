// Package holder is the process that keeps one sandbox, and its client. The
// process starts runsc, is the parent of the Sentry, owns the streams of every
// command and knows how each ended, so that the daemon may end or be killed and
// the next one finds all of it (docs/decisions/holder.md).
//
// In the sandbox's folder the holder has
//
//	holder.sock    where Connect finds it
//	holder.json    what it runs, and since when it runs
//	ended.json     how the sandbox ended
//	execs          the journal of execs, a line when one is to start and when it has ended
//	exec/x<exec>/  the files stdout and stderr with what is kept of one's output
//	init/          the same two files of the sandbox's first process
//	hibernated/    the memory of a sandbox that has no process, and its checksums
//	runsc/         runsc's --root
//	runsc.log      what runsc and the Sentry had to say     holder.log  the holder
//
// FORMAT.md has the bytes.
package holder

import (
	"errors"
	"os"
	"path/filepath"
	"time"

	"quarry/worker/sentry"
)

// Role is the first argument of quarry-shim that makes it a holder. The second is
// the sandbox's folder, with a slash after it, by which the process can be found.
const Role = "holder"

var (
	// ErrLost says that there is no holder: it has ended, or was killed. If ReadEnded
	// knows no end, what is left of the sandbox has to be killed by its cgroup.
	ErrLost = errors.New("the sandbox's holder does not answer")
	// ErrPaused says that the sandbox is paused and the call needs its tasks.
	ErrPaused = errors.New("the sandbox is paused")
	// ErrBusy says that a tool exec runs, or that the guest did not stop in time: the
	// sandbox is not paused.
	ErrBusy = errors.New("the sandbox cannot be paused now")
	// ErrHibernated says that the sandbox is in files alone: Wake restores it.
	ErrHibernated = errors.New("the sandbox is hibernated")
	// ErrNotHibernated says why a sandbox is not hibernated: it stays paused.
	ErrNotHibernated = errors.New("not hibernated")
	// ErrNotRestored says that a hibernated sandbox could not be restored: it has ended.
	ErrNotRestored = errors.New("the hibernated sandbox could not be restored")
)

// Config is what a holder is started with.
type Config struct {
	// Shim is the command line of quarry-shim, without its role.
	Shim []string
	// Dir is the sandbox's folder, absolute, of mode 0700. It has runsc's bundle: the
	// config.json with cgroupsPath and the network namespace.
	Dir string
	// ID is the container's.
	ID string
	// Runsc is the program and its global flags. The holder adds --root, --log,
	// --log-format and --control-rpc-stop-timeout.
	Runsc []string
	// Entrypoint says that the first process is the one in config.json. Without it
	// the first process is a sleeper of the holder's own, whatever args say; they
	// must have one element.
	Entrypoint bool
	// Keep is inherited by the holder and closed when the holder ends, after Release:
	// the lock of what must be there as long, such as the mount of its image, which
	// tells how many reads failed. It may be nil.
	Keep *os.File
	// MaxOutput is kept of each stream of an exec that names no limit; 0 is 16 MiB.
	MaxOutput int64
	// MaxKept is what the output and the journal of all execs may take of the disk: at
	// least MinKept, 0 is DefaultKept. Beyond it the output of the exec that ended first
	// is forgotten, and then what comes is dropped.
	MaxKept int64
}

// Process says as whom and where a command runs, as the node has looked it up.
type Process struct {
	Argv         []string            `json:"argv"`
	Env          []string            `json:"env"` // all of it
	WorkDir      string              `json:"cwd"`
	UID          uint32              `json:"uid"`
	GID          uint32              `json:"gid"`
	Groups       []uint32            `json:"groups"`
	Capabilities sentry.Capabilities `json:"capabilities"`
	NoNewPrivs   bool                `json:"no_new_privs"`
}

// Helper is a program of ours that runs in the guest for one call, which no list
// of execs shows.
type Helper struct {
	Process
	Program *os.File // runs in the place of Argv[0]
	// Stdin, Stdout and Stderr are its streams; nil is none.
	Stdin, Stdout, Stderr *os.File
}

// State is what a holder knows of its sandbox.
type State struct {
	PID        int       `json:"pid"`        // of the holder
	Sentry     int       `json:"sentry_pid"` // on the host
	Gofer      int       `json:"gofer_pid"`  // on the host, 0 without one
	Started    time.Time `json:"started_at"` // when the guest ran
	Paused     bool      `json:"paused"`
	Pauses     int64     `json:"pauses"`
	PausedFor  int64     `json:"paused_ms"`               // until now
	Hibernated bool      `json:"hibernated,omitempty"`    // no process of it runs; it counts as paused
	OnDisk     int64     `json:"on_disk_bytes,omitempty"` // that its hibernation takes
	Execs      int64     `json:"execs"`                   // that were started
	Running    int       `json:"running"`                 // execs that have not ended
	Tools      int       `json:"tools"`                   // those of them that forbid a pause
	Output     int64     `json:"output_bytes"`
	Ended      *Ended    `json:"ended,omitempty"`
}

// Ended is how a sandbox ended.
type Ended struct {
	// Killed says that End was called before the sandbox ended by itself.
	Killed bool `json:"killed"`
	// Init is how the first process ended, as the Sentry told it; nil when it did not
	// end by itself.
	Init *sentry.Status `json:"init,omitempty"`
	// NotRestored says that it ended because a restore of it failed; Message says why.
	NotRestored bool `json:"not_restored,omitempty"`
	// Sentry and Gofer are how these ended, as wait(2) told it; -1 when not known.
	Sentry int       `json:"sentry_status"`
	Gofer  int       `json:"gofer_status"`
	At     time.Time `json:"at"`
	// Message says what runsc or the holder had to say about it; it may be empty.
	Message   string `json:"message"`
	Pauses    int64  `json:"pauses"`
	PausedFor int64  `json:"paused_ms"`
	Execs     int64  `json:"execs"`
}

// Timings are the steps of a start.
type Timings struct {
	Spawn time.Duration // the holder's process answers
	Runsc time.Duration // runsc run, to the start of the first process
}

const (
	// DefaultMaxOutput is kept of a stream when neither exec nor Config say.
	DefaultMaxOutput = 16 << 20
	// MaxOutput is the most that can be kept of a stream.
	MaxOutput = 1 << 30
	// MaxExecs is how many execs a sandbox may have in its life: their ids are known to
	// its end, in 16 bytes each.
	MaxExecs = 100_000
	// MaxRunning is how many may run at once: each has two pipes.
	MaxRunning = 256
	// MaxStdin bounds ExecSpec.Stdin.
	MaxStdin = 1 << 20
)

// maxExecID bounds the id of an exec: it is part of a folder's name.
const maxExecID = 128

// ValidExecID reports whether an exec can have that id: letters, digits, '_', '-'
// and '.'.
func ValidExecID(id string) bool {
	for i := range len(id) {
		c := id[i]
		switch {
		case c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z', c >= '0' && c <= '9', c == '_', c == '-', c == '.':
		default:
			return false
		}
	}
	return id != "" && len(id) <= maxExecID
}

// execDir is an exec's folder. Its name begins with a letter: an id may be "..".
func execDir(dir, exec string) string { return filepath.Join(dir, "exec", "x"+exec) }

// OutputPath returns the file with what is kept of a stream, stdout or stderr, of
// an exec. It is appended to while the exec runs, and is read as far as the
// exec's state says; there is none before the first byte.
func OutputPath(dir, exec, stream string) string { return filepath.Join(execDir(dir, exec), stream) }

// InitOutputPath returns the file with what is kept of a stream of the sandbox's
// first process: its first MiB.
func InitOutputPath(dir, stream string) string { return filepath.Join(dir, "init", stream) }
