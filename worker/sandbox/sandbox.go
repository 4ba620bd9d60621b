// Package sandbox says what a sandbox is to those who use one: what it is made of,
// what runs in it, how it ends, and what can be refused. The HTTP contract
// (api/sandboxes) and the daemon that keeps sandboxes (worker/node) share it, so
// that neither imports the other.
package sandbox

import (
	"time"

	"quarry/store/chunk"
)

// Spec is what a sandbox is made of: the body of a create. Zero fields mean what
// the node or the image says.
type Spec struct {
	Image         string            `json:"image"`                       // REPO[:TAG] or REPO@sha256:…
	CPUMilli      int64             `json:"cpu_milli,omitempty"`         // thousandths of a processor; 0 is the node's default
	MemoryMB      int64             `json:"memory_mb,omitempty"`         // the limit, in MiB: what the guest sees as MemTotal
	MemoryRequest int64             `json:"memory_request_mb,omitempty"` // what admission counts, in MiB; 0 is MemoryMB
	DiskMB        int64             `json:"disk_mb,omitempty"`           // of what the sandbox writes, in MiB
	OutputMB      int64             `json:"output_mb,omitempty"`         // of what the node keeps of its execs' output, in MiB, beside DiskMB
	PIDs          int64             `json:"pids,omitempty"`              // processes and threads of the guest
	Env           []string          `json:"env,omitempty"`               // K=V, over the image's own
	User          string            `json:"user,omitempty"`              // user[:group], names or numbers, looked up inside the image
	WorkDir       string            `json:"workdir,omitempty"`
	Entrypoint    []string          `json:"entrypoint,omitempty"` // the sandbox's first process; without one it is a sleeper, and the image's Entrypoint and Cmd do not run
	Hostname      string            `json:"hostname,omitempty"`
	TTL           int64             `json:"ttl_s,omitempty"`         // seconds until the node ends it
	Idle          int64             `json:"idle_s,omitempty"`        // seconds without exec and file call until the node ends it; 0 is never
	IdlePause     int64             `json:"idle_pause_ms,omitempty"` // milliseconds without exec, written file and use of the processor until it is paused; a command wakes it; 0 is the node's, less is never
	Labels        map[string]string `json:"labels,omitempty"`
	Group         string            `json:"group,omitempty"`
	Role          string            `json:"role,omitempty"` // RoleRollout or RoleGrade; a grade leaves no trace
	Network       Policy            `json:"network"`
	Shares        []Share           `json:"shares,omitempty"` // read-only files and folders of the host
}

// Roles of a sandbox.
const (
	RoleRollout = "rollout"
	RoleGrade   = "grade" // neither recorded in traces nor started by them
)

// Share is a file or folder of the host, read-only in the guest. The node gives
// only what lies below the folders that its operator named.
type Share struct {
	Name   string `json:"name"`   // SHARE/PATH below the operator's folder of that name
	Target string `json:"target"` // absolute path in the guest
}

// Policy says whom the guest may reach. Without a rule it is nobody.
type Policy struct {
	Allow []Rule `json:"allow,omitempty"`
}

// Rule allows one destination. Exactly one of Host and CIDR is set.
type Rule struct {
	Host  string `json:"host,omitempty"` // a name, or *.name for those below it
	CIDR  string `json:"cidr,omitempty"`
	Ports []Port `json:"ports,omitempty"` // none means every TCP and UDP port
}

// Port is one port of one protocol.
type Port struct {
	Protocol string `json:"protocol,omitempty"` // tcp, the default, or udp
	Number   int    `json:"number"`
}

// Network is what holds now. Generation counts the policies a sandbox was given;
// Applied is the last one in force.
type Network struct {
	Policy     Policy `json:"policy"`
	Generation int64  `json:"generation"`
	Applied    int64  `json:"applied"`
	Denied     int64  `json:"denied_packets"` // since the sandbox was made
}

// State of a sandbox.
type State string

// States. A sandbox in StateEnded has an End, and only a record is left of it.
const (
	StateCreating   State = "creating"
	StateRunning    State = "running"
	StatePaused     State = "paused"
	StateHibernated State = "hibernated" // paused, with its memory on the disk and no process left
	StateEnding     State = "ending"
	StateEnded      State = "ended"
)

// Known reports whether there is such a state.
func (s State) Known() bool {
	switch s {
	case StateCreating, StateRunning, StatePaused, StateHibernated, StateEnding, StateEnded:
		return true
	}
	return false
}

// Sandbox is what the node tells of one.
type Sandbox struct {
	ID          string            `json:"id"`
	State       State             `json:"state"`
	Image       string            `json:"image"`        // as asked for
	ImageDigest chunk.Digest      `json:"image_digest"` // the source digest that it was
	ImageID     chunk.Digest      `json:"image_id"`
	CPUMilli    int64             `json:"cpu_milli"`
	MemoryMB    int64             `json:"memory_mb"`
	DiskMB      int64             `json:"disk_mb"`
	OutputMB    int64             `json:"output_mb,omitempty"`
	PIDs        int64             `json:"pids"`
	Labels      map[string]string `json:"labels,omitempty"`
	Group       string            `json:"group,omitempty"`
	Role        string            `json:"role,omitempty"`
	Created     time.Time         `json:"created_at"`
	Expires     *time.Time        `json:"expires_at,omitempty"`
	Network     Network           `json:"network"`
	Timings     map[string]int64  `json:"timings_us,omitempty"` // microseconds of the steps of the create
	PausedFor   int64             `json:"paused_ms"`            // milliseconds paused until now
	Pauses      int64             `json:"pauses"`
	Token       string            `json:"token,omitempty"` // of this sandbox alone, qsb_<id>_<secret>; only in answers to its create
	End         *End              `json:"end,omitempty"`
}

// Reasons of an End.
const (
	ReasonDeleted      = "killed_by_user"      // it was deleted
	ReasonExited       = "exited"              // its first process ended by itself
	ReasonTTL          = "ttl"                 // its time was over
	ReasonIdle         = "idle"                // nobody used it for Spec.Idle
	ReasonOOM          = "oom_guest_limit"     // it used more memory than Spec.MemoryMB
	ReasonHostOOM      = "oom_host_pressure"   // the machine had no memory left
	ReasonImageIO      = "image_io_error"      // a read of the image failed, and what it ran may have seen that
	ReasonImage        = "image_pull_failed"   // the image was not had
	ReasonVerify       = "image_verify_failed" // the image is not what was signed
	ReasonNetwork      = "net_policy_failed"   // the policy could not be put in force
	ReasonRuntime      = "runtime_crash"       // the Sentry or its gofer ended under it
	ReasonDiskFull     = "disk_full"           // the node's disk is full
	ReasonCreateFailed = "create_failed"       // it could not be made
	ReasonNodeLost     = "node_lost"           // the machine or the node's holder of it ended
	ReasonDrained      = "evicted"             // the node was drained
	ReasonRestore      = "restore_failed"      // it was hibernated and could not be restored
)

// Blame says who has to act.
const (
	BlameAgent = "agent" // what ran in the sandbox
	BlameUser  = "user"  // who asked for it
	BlameInfra = "infra" // the node, its store or its network: never a zero reward
)

// End is how a sandbox ended, one record each.
type End struct {
	Reason    string    `json:"reason"`
	Message   string    `json:"message"` // a sentence
	Blame     string    `json:"blame"`
	Retryable bool      `json:"retryable"`
	Limit     string    `json:"limit,omitempty"` // which limit fired: memory, ttl, idle, pids, disk
	ExitCode  *int      `json:"exit_code,omitempty"`
	Signal    int       `json:"signal,omitempty"`
	At        time.Time `json:"ended_at"`
	Evidence  Evidence  `json:"evidence"`
}

// Evidence is what the node had counted at the end.
type Evidence struct {
	OOMKills       int64    `json:"oom_kills"`         // of the sandbox's cgroup
	MemoryPeak     int64    `json:"memory_peak_bytes"` // 0 when not known
	ImageIOErrors  int64    `json:"image_io_errors"`   // reads of the image that got EIO while it ran
	ImageErrors    []string `json:"image_errors,omitempty"`
	PIDsRefused    int64    `json:"pids_refused"` // forks that the host's pids limit refused
	DiskUsed       int64    `json:"disk_used_bytes"`
	PausedFor      int64    `json:"paused_ms"`
	Pauses         int64    `json:"pauses"`
	Execs          int64    `json:"execs"`
	DeniedPackets  int64    `json:"denied_packets"`
	WorkerRestarts int64    `json:"worker_restarts"` // how often another worker adopted it
}

// TokenPrefix begins the token of one sandbox, so that it is told from others.
const TokenPrefix = "qsb_"

// Filter chooses sandboxes of a list; without a state, all that have not ended.
type Filter struct {
	Labels map[string]string
	Group  string
	State  State
	After  string // id
	Limit  int
}

// Event is one change of a sandbox, for GET /v1/events.
type Event struct {
	Sequence uint64    `json:"seq"`
	At       time.Time `json:"at"`
	Sandbox  string    `json:"sandbox"`
	Type     string    `json:"type"` // creating, running, paused, hibernated, woken, resumed, exec_started, exec_ended, image_failed, network, ending, ended
	Exec     string    `json:"exec,omitempty"`
	Message  string    `json:"message,omitempty"`
	End      *End      `json:"end,omitempty"`
}

// Usage is what a sandbox uses now.
type Usage struct {
	MemoryBytes  int64 `json:"memory_bytes"`
	MemoryLimit  int64 `json:"memory_limit_bytes"`
	CPUMicros    int64 `json:"cpu_us"`
	PIDs         int64 `json:"pids"`
	DiskBytes    int64 `json:"disk_bytes"`
	OutputBytes  int64 `json:"output_bytes"` // kept of execs
	OOMKills     int64 `json:"oom_kills"`
	ImageErrors  int64 `json:"image_io_errors"`
	DeniedPacket int64 `json:"denied_packets"`
}

// NodeStatus is what the node has, and has given away.
type NodeStatus struct {
	Version      string           `json:"version"`
	Runsc        string           `json:"runsc"`
	CgroupV2     bool             `json:"cgroup_v2"`
	Draining     bool             `json:"draining"`
	NotReady     string           `json:"not_ready,omitempty"` // why no create can succeed now, beside what is given away
	Sandboxes    map[State]int    `json:"sandboxes"`
	MaxSandboxes int              `json:"max_sandboxes"`
	Memory       Amount           `json:"memory_bytes"`
	Disk         Amount           `json:"disk_bytes"`
	PIDs         Amount           `json:"pids"`
	Refused      map[string]int64 `json:"refused"`
	CannotDo     []string         `json:"cannot_do,omitempty"` // what this machine lacks, as sentences
}

// Amount is a total and what is given away of it.
type Amount struct {
	Total int64 `json:"total"`
	Used  int64 `json:"used"`
}
