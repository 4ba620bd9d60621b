package node

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
)

// amount is what a sandbox takes of the node.
type amount struct {
	sandboxes, memory, disk, pids int64
}

func amountOf(s sandbox.Spec) amount {
	return amount{sandboxes: 1, memory: s.MemoryRequest << 20, disk: (s.DiskMB + s.OutputMB) << 20, pids: s.PIDs}
}

// hostPIDs is the host's limit for a guest's. Each thread of the guest may have one on
// the host, and the Sentry has some of its own. The kernel ends a Sentry that is
// refused one, so the guest's own limit, of each of its users, is reached long before.
func hostPIDs(guest int64) int64 { return 2*guest + 256 }

// ledger is what is given away. What a sandbox takes is given back once it has ended.
type ledger struct {
	mu      sync.Mutex // guards what follows
	has     amount
	used    amount
	queued  int
	refused map[string]int64
	free    chan struct{} // has an element for each create that may begin
}

func newLedger(has amount, creates int) *ledger {
	l := &ledger{has: has, refused: map[string]int64{}, free: make(chan struct{}, creates)}
	for range creates {
		l.free <- struct{}{}
	}
	return l
}

// A client that is refused comes again when a sandbox may have ended, or a create.
const (
	retryCapacity = 5 * time.Second
	retryCreates  = time.Second
)

// take takes an amount, or says what there is not enough of. Errors: *sandbox.Busy.
func (l *ledger) take(a amount, maxQueued int) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.queued >= maxQueued+cap(l.free) {
		l.refused["creates"]++
		return &sandbox.Busy{Err: sandbox.ErrRate, What: "creates", RetryAfter: retryCreates,
			Why: fmt.Sprintf("%d wait for their turn: come again, or have the worker started with more --queue", l.queued)}
	}
	for _, n := range []struct {
		what, flag, unit   string
		asked, used, there int64
		scale              int // of what is said
	}{
		{"sandboxes", "--max-sandboxes", "", a.sandboxes, l.used.sandboxes, l.has.sandboxes, 0},
		{"memory", "--memory", " MiB", a.memory, l.used.memory, l.has.memory, 20},
		{"disk", "--disk or --disk-overcommit", " MiB", a.disk, l.used.disk, l.has.disk, 20},
		{"pids", "--pids", "", a.pids, l.used.pids, l.has.pids, 0},
	} {
		if n.used+n.asked > n.there {
			l.refused[n.what]++
			return &sandbox.Busy{Err: sandbox.ErrCapacity, What: n.what, RetryAfter: retryCapacity,
				Why: fmt.Sprintf("%d%s asked for, %d of %d are left: end sandboxes, ask for less, or have the worker started with more %s",
					n.asked>>n.scale, n.unit, (n.there-n.used)>>n.scale, n.there>>n.scale, n.flag)}
		}
	}
	l.add(a)
	l.queued++
	return nil
}

// adopt takes an amount that an earlier node has given.
func (l *ledger) adopt(a amount) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(a)
}

func (l *ledger) add(a amount) {
	l.used.sandboxes += a.sandboxes
	l.used.memory += a.memory
	l.used.disk += a.disk
	l.used.pids += a.pids
}

func (l *ledger) giveBack(a amount) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.add(amount{-a.sandboxes, -a.memory, -a.disk, -a.pids})
}

// hasRoom refuses a create while the disk is nearly full, and one whose disk the machine
// does not have now where limits may add up to more than it has: sandboxes that are there
// may have written theirs. Errors: *sandbox.Busy.
func (n *Node) hasRoom(a amount) error {
	if low := n.diskLow(); low != "" {
		n.ledger.refuse("disk")
		return busyDisk(low)
	}
	if n.c.DiskOvercommit <= 1 {
		return nil
	}
	free, err := freeDisk(n.c.boxesDir())
	if err != nil {
		return fmt.Errorf("%w: %w", sandbox.ErrRuntime, err)
	}
	if free >= a.disk {
		return nil
	}
	n.ledger.refuse("disk")
	return &sandbox.Busy{Err: sandbox.ErrCapacity, What: "disk", RetryAfter: retryCapacity,
		Why: fmt.Sprintf("%d MiB asked for, and the disk has %d free: end sandboxes, ask for less, or free some of it", a.disk>>20, free>>20)}
}

// refuse counts a refusal that take did not make.
func (l *ledger) refuse(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.refused[what]++
}

// leave says that a create which take has let in is over, whatever became of it.
func (l *ledger) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.queued--
}

// turn waits for the turn of a create, which gives it back with done.
func (l *ledger) turn(ctx context.Context) (done func(), err error) {
	select {
	case <-l.free:
		return func() { l.free <- struct{}{} }, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}

// machine returns what this machine has: bytes of memory, and of the disk of a folder
// what is free, and processes.
func machine(dir string) (memory, disk, pids int64, err error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, 0, 0, err
	}
	memory = int64(info.Totalram) * int64(info.Unit)
	if disk, err = freeDisk(dir); err != nil {
		return 0, 0, 0, err
	}
	raw, err := readBounded("/proc/sys/kernel/pid_max")
	if err == nil {
		pids, err = strconv.ParseInt(strings.TrimSpace(string(raw)), 10, 64)
	}
	if err != nil {
		return 0, 0, 0, fmt.Errorf("how many processes this machine can have: %w", err)
	}
	return memory, disk, pids, nil
}

func freeDisk(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, fmt.Errorf("free room of %s: %w", dir, err)
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// gives is what sandboxes may take together.
func (c Config) gives() amount {
	return amount{int64(c.MaxSandboxes), c.Memory, int64(float64(c.Disk) * max(c.DiskOvercommit, 1)), c.PIDs}
}

// maxOvercommit bounds Config.DiskOvercommit.
const maxOvercommit = 100

func orInt[T int | int64 | time.Duration](v, def T) T {
	if v == 0 {
		return def
	}
	return v
}

// withDefaults fills in what a Config does not say.
func (c Config) withDefaults(dir string) (Config, error) {
	if c.Worker == nil || c.Fetch == nil {
		return c, errors.New("a node needs a worker, and a way to images")
	}
	if err := checkEndpoints(c.ModelEndpoints); err != nil {
		return c, err
	}
	if err := checkIdlePause(c.IdlePause); err != nil {
		return c, err
	}
	var err error
	if c.PausedMemory, err = ParsePausedMemory(string(c.PausedMemory)); err != nil {
		return c, err
	}
	if c.MemoryHigh > 0 && c.MemoryHigh <= c.MemoryLow {
		return c, fmt.Errorf("memory of paused sandboxes is taken below %d bytes until %d are available: want more for the second", c.MemoryLow, c.MemoryHigh)
	}
	if c.DiskOvercommit != 0 && !(c.DiskOvercommit >= 1 && c.DiskOvercommit <= maxOvercommit) {
		return c, fmt.Errorf("disk limits may add up to %v times the disk: want 1 to %d", c.DiskOvercommit, maxOvercommit)
	}
	memory, disk, pids, err := machine(dir)
	if err != nil {
		return c, err
	}
	cpus := runtime.NumCPU()
	c.MaxSandboxes = orInt(c.MaxSandboxes, 256)
	c.Memory = orInt(c.Memory, memory/10*9)
	c.Disk = orInt(c.Disk, disk/10*9)
	c.PIDs = orInt(c.PIDs, pids-pids/8)
	c.Creates = orInt(c.Creates, 2*cpus)
	c.QueuedCreates = orInt(c.QueuedCreates, 256)
	c.CreateTimeout = orInt(c.CreateTimeout, 5*time.Minute)
	c.HibernateAfter = orInt(c.HibernateAfter, time.Minute)
	c.MaxRecords = orInt(c.MaxRecords, 4096)
	c.RecordAge = orInt(c.RecordAge, 7*24*time.Hour)
	c.Max.CPUMilli = orInt(c.Max.CPUMilli, int64(cpus)*1000)
	c.Max.MemoryMB = orInt(c.Max.MemoryMB, c.Memory>>20)
	c.Max.DiskMB = orInt(c.Max.DiskMB, max(c.Disk>>20, 1))
	c.Max.OutputMB = orInt(c.Max.OutputMB, c.Max.DiskMB)
	c.Max.PIDs = orInt(c.Max.PIDs, c.PIDs/4)
	c.Default.CPUMilli = min(orInt(c.Default.CPUMilli, 1000), c.Max.CPUMilli)
	c.Default.MemoryMB = min(orInt(c.Default.MemoryMB, 1024), c.Max.MemoryMB)
	c.Default.DiskMB = min(orInt(c.Default.DiskMB, 4096), c.Max.DiskMB)
	c.Default.OutputMB = min(orInt(c.Default.OutputMB, 256), c.Max.OutputMB)
	c.Default.PIDs = min(orInt(c.Default.PIDs, 512), c.Max.PIDs)
	c.Default.TTL = orInt(c.Default.TTL, 24*time.Hour)
	if c.Max.TTL > 0 {
		c.Default.TTL = min(c.Default.TTL, c.Max.TTL)
	}
	if c.CgroupParent == "" {
		c.CgroupParent = "/quarry"
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	return c, nil
}
