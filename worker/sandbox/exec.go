package sandbox

import "time"

// ExecSpec is one command in a sandbox. Exactly one of Argv, Shell and Session is
// set; Session with its Shell is a command of a bash session.
type ExecSpec struct {
	ID        string   `json:"exec_id"` // chosen by the client: the same id runs at most once
	Argv      []string `json:"argv,omitempty"`
	Shell     string   `json:"shell,omitempty"` // for /bin/sh -c, or for the bash of Session
	Session   string   `json:"session,omitempty"`
	WorkDir   string   `json:"cwd,omitempty"`
	Env       []string `json:"env,omitempty"` // K=V, over the sandbox's
	User      string   `json:"user,omitempty"`
	Stdin     []byte   `json:"stdin,omitempty"`      // all there is, base64 in JSON
	OpenStdin bool     `json:"open_stdin,omitempty"` // more comes by POST …/stdin, until it is closed
	PTY       *Window  `json:"pty,omitempty"`
	Role      string   `json:"role,omitempty"`             // ExecAgent or ExecTool, the default
	Timeout   int64    `json:"timeout_ms,omitempty"`       // of time not paused; 0 is none
	KillGrace int64    `json:"kill_grace_ms,omitempty"`    // between SIGTERM and SIGKILL at the timeout; 0 kills at once
	MaxOutput int64    `json:"max_output_bytes,omitempty"` // kept of each stream; what comes after is counted and dropped
}

// Roles of an exec.
const (
	ExecAgent = "agent" // may be paused while it waits for its model
	ExecTool  = "tool"  // never paused
)

// Window is the size of a terminal in characters.
type Window struct {
	Rows int `json:"rows"`
	Cols int `json:"cols"`
}

// States of an exec.
const (
	ExecStarting = "starting"
	ExecRunning  = "running"
	ExecExited   = "exited"
	// ExecUnknown is one whose start or status was lost with the Sentry: it may have
	// run, and is never run again.
	ExecUnknown = "unknown"
)

// Reasons of the end of an exec.
const (
	ExecReasonExited   = "exited"
	ExecReasonSignaled = "signaled"
	ExecReasonTimeout  = "cmd_timeout"
	ExecReasonKilled   = "killed_by_user"
	ExecReasonSyntax   = "syntax_error"   // a session's command that bash does not understand; nothing ran
	ExecReasonNotFound = "not_found"      // no such program or working directory; nothing ran
	ExecReasonNoExec   = "not_executable" // it cannot be executed; nothing ran
	ExecReasonProcess  = "pids"           // the sandbox is at its limit of processes; nothing ran
	ExecReasonLost     = "sandbox_ended"  // its sandbox ended under it
)

// ExecState is an exec now.
type ExecState struct {
	ID       string     `json:"exec_id"`
	State    string     `json:"state"`
	PID      int        `json:"pid,omitempty"` // in the guest
	Role     string     `json:"role"`
	Started  time.Time  `json:"started_at"`
	Ended    *time.Time `json:"ended_at,omitempty"`
	ExitCode *int       `json:"exit_code,omitempty"` // 128+n for signal n
	Signal   int        `json:"signal,omitempty"`
	Reason   string     `json:"reason,omitempty"`
	Message  string     `json:"message,omitempty"`
	Infra    string     `json:"infra,omitempty"` // why the node may be to blame for how it ended: the result does not count
	Ran      int64      `json:"ran_ms"`          // milliseconds not paused
	Stdout   Output     `json:"stdout"`
	Stderr   Output     `json:"stderr"` // empty with a pty
}

// Done reports whether nothing more comes of it: its state is final and its output
// is closed.
func (s ExecState) Done() bool {
	return (s.State == ExecExited || s.State == ExecUnknown) && s.Stdout.Closed && s.Stderr.Closed
}

// Output is one stream of an exec.
type Output struct {
	Kept    int64 `json:"kept_bytes"`    // can be read from offset 0
	Dropped int64 `json:"dropped_bytes"` // came after that, and is lost
	Closed  bool  `json:"closed"`        // nothing more comes
	// DroppedBy says why something was dropped, "" when nothing was.
	DroppedBy string `json:"dropped_by,omitempty"`
	Error     string `json:"error,omitempty"` // of the node's disk, when that is why
}

// Why output is dropped.
const (
	DroppedLimit   = "max_output"     // more came than the exec was to keep
	DroppedSandbox = "sandbox_output" // the sandbox's execs keep all that they may together
	DroppedDisk    = "node_disk"      // the node could not write it: that is not the sandbox's doing
	DroppedOld     = "forgotten"      // it was kept until later execs needed the room
)
