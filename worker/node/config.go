// Package node is the daemon that keeps the sandboxes of one machine: it admits and
// makes them, ends them with one record each, and adopts or ends what an earlier
// daemon has left. It implements sandbox.Node.
package node

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/sandbox"
)

// Config says what a node has, and what it may give away. Zero fields have defaults.
type Config struct {
	Dir    folder.Dir
	Worker *worker.Worker // mounts the images; its ShimPath is the holders' program, its Runsc what they start
	// Fetch has an image on this machine, verified. Its errors are sandbox.ErrImage…,
	// wrapped.
	Fetch func(ctx context.Context, ref string) (*folder.Image, error)
	// RunscVersion is the version that runsc must be of, such as release-20260701.0;
	// "" takes any.
	RunscVersion string
	Version      string            // of quarry, for Status
	Guest        string            // the quarry-guest program, which file calls run in the guest; "" refuses those that need it
	Network      Network           // nil gives no sandbox a network
	Shares       map[string]string // name of a share to its folder on this machine

	CgroupParent string // below /sys/fs/cgroup; "" is /quarry

	MaxSandboxes  int           // 0 is 256
	Memory        int64         // bytes that requests may add up to; 0 is nine tenths of the machine's
	Disk          int64         // bytes that disk limits may add up to; 0 is nine tenths of what is free of the folder's disk
	PIDs          int64         // processes that limits may add up to; 0 is half of the machine's
	Creates       int           // sandboxes made at once; 0 is twice the processors
	QueuedCreates int           // creates that wait for their turn; 0 is 256
	CreateTimeout time.Duration // of one create without its wait; 0 is five minutes

	// What a Spec has that says nothing, and the most that it may say.
	Default Sizes // zero fields: 1 processor, 1 GiB of memory, 4 GiB of disk, 1024 processes, a TTL of a day
	Max     Sizes // zero fields: the node's own memory, disk and PIDs, and its processors; no bound of the TTL

	MaxRecords int           // End records that are kept; 0 is 4096
	RecordAge  time.Duration // and how long; 0 is a week

	Log *slog.Logger     // nil = discard
	Now func() time.Time // nil = time.Now
}

// Sizes are limits of a sandbox.
type Sizes struct {
	CPUMilli int64
	MemoryMB int64
	DiskMB   int64
	PIDs     int64
	TTL      time.Duration
}

// Network gives sandboxes their network.
type Network interface {
	// Take gives a sandbox a link on which the policy is in force.
	Take(ctx context.Context, id string, p sandbox.Policy) (Link, error)
	// Adopt finds the link that an earlier daemon gave a sandbox.
	Adopt(ctx context.Context, id string) (Link, error)
	// Release takes the link away; a sandbox that has none is no error.
	Release(ctx context.Context, id string) error
	// Sweep takes away the links of all but the named sandboxes.
	Sweep(ctx context.Context, live []string) error
}

// Link is a sandbox's network.
type Link interface {
	Netns() string // path of its network namespace
	DNS() string   // address of its name server, "" for none
	// Apply puts a policy in force and returns its generation once it is, and flows
	// that it forbids are cut.
	Apply(ctx context.Context, p sandbox.Policy) (generation int64, err error)
	// Denied counts the packets that the policy refused.
	Denied() int64
}

var _ sandbox.Node = (*Node)(nil)

// New opens the worker folder's node: it takes node.lock, checks runsc, and adopts or
// ends every sandbox that an earlier node has left, which it waits for. Errors:
// ErrRunning.
func New(ctx context.Context, c Config) (*Node, error) {
	return nil, fmt.Errorf("%w: not built yet", sandbox.ErrUnsupported)
}

// Close lets the folder go and leaves the sandboxes running, for the next node.
func (n *Node) Close() error { return nil }
