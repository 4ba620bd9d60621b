// Package node is the daemon that keeps the sandboxes of one machine: it admits and
// makes them, ends them with one record each, and adopts or ends what an earlier
// daemon has left. It implements sandbox.Node.
package node

import (
	"context"
	"log/slog"
	"time"

	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/memory"
	"quarry/worker/network"
	modelwait "quarry/worker/network/wait"
)

// Config says what a node has, and what it may give away. Zero fields have defaults.
type Config struct {
	Dir    folder.Dir
	Worker *worker.Worker // mounts the images; its ShimPath is the holders' program, its Runsc what they start
	// Fetch has an image on this machine, verified. Its errors are sandbox.ErrImage…,
	// wrapped.
	Fetch func(ctx context.Context, ref string) (Fetched, error)
	// RunscVersion is the version that runsc must be of, such as release-20260701.0;
	// "" takes any.
	RunscVersion string
	Version      string            // of quarry, for Status
	Guest        string            // the quarry-guest program, which file calls run in the guest; "" refuses those that need it
	Network      *network.Network  // nil gives no sandbox a network
	Shares       map[string]string // name of a share to its folder on this machine

	// ModelEndpoints are host:port of models, by plain TCP: a sandbox that waits for one
	// of them is paused.
	ModelEndpoints []string
	Waits          *modelwait.Metrics // nil = counted for nobody
	Naps           *NapMetrics        // nil = counted for nobody

	// IdlePause is after what time without a command a sandbox is paused whose Spec does
	// not say; 0 is never.
	IdlePause time.Duration

	// PausedMemory says what becomes of the memory of paused sandboxes; "" is PausedReclaim.
	// It is taken while less than MemoryLow bytes are available on the machine, or below
	// the limit of the control group that the sandboxes are in, until MemoryHigh are; 0 is
	// a tenth of all, and half as much again.
	PausedMemory          PausedMemory
	MemoryLow, MemoryHigh int64
	// HibernateAfter is how long a sandbox must have been paused before it is put to disk
	// because there is no room in swap; 0 is a minute, less is never.
	HibernateAfter time.Duration
	MemoryMetrics  *memory.Metrics // nil = counted for nobody

	CgroupParent string // below /sys/fs/cgroup; "" is /quarry

	MaxSandboxes int   // 0 is 256
	Memory       int64 // bytes that requests may add up to; 0 is nine tenths of the machine's
	Disk         int64 // bytes that limits of disk and of kept output may add up to; 0 is nine tenths of what is free of the folder's disk
	// DiskOvercommit is how many times Disk the limits may add up to, since few sandboxes
	// write all that they may; 0 is once. A create whose own limit is not free on the
	// disk is refused then. What a full disk does: docs/OPERATIONS.md.
	DiskOvercommit float64
	DiskReserve    int64         // bytes of the folder's disk below which no sandbox is made; 0 is a fiftieth of the disk, at most 1 GiB
	PIDs           int64         // processes that limits may add up to; 0 is seven eighths of what the machine can have
	Creates        int           // sandboxes made at once; 0 is twice the processors
	QueuedCreates  int           // creates that wait for their turn; 0 is 256
	CreateTimeout  time.Duration // of one create without its wait; 0 is five minutes

	// What a Spec has that says nothing, and the most that it may say.
	Default Sizes // zero fields: 1 processor, 1 GiB of memory, 4 GiB of disk, 512 processes, a TTL of a day; of output a quarter of the disk, 16 to 256 MiB
	Max     Sizes // zero fields: the node's own memory, disk (of output too) and PIDs, and its processors; no bound of the TTL

	MaxRecords int           // End records that are kept; 0 is 4096
	RecordAge  time.Duration // and how long; 0 is a week

	Log *slog.Logger     // nil = discard
	Now func() time.Time // nil = time.Now
}

// Fetched is an image that is on this machine.
type Fetched struct {
	*folder.Image
	// Ahead tells which chunks the reader has got of those that runs of the image touch
	// first, by number as they come, until there are no more or ctx ends, and closes the
	// channel then, which nobody need read to its end. It is called once at most; nil
	// where that is not known.
	Ahead func(ctx context.Context) <-chan uint32
}

// Sizes are limits of a sandbox.
type Sizes struct {
	CPUMilli int64
	MemoryMB int64
	DiskMB   int64
	OutputMB int64
	PIDs     int64
	TTL      time.Duration
}
