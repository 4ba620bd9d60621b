package sentry

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unicode/utf8"

	"quarry/internal/fdpass"
)

// Capabilities are sets of bits, one a capability of capabilities(7).
type Capabilities struct {
	Permitted   uint64 `json:"PermittedCaps"`
	Inheritable uint64 `json:"InheritableCaps"`
	Effective   uint64 `json:"EffectiveCaps"`
	Bounding    uint64 `json:"BoundingCaps"`
	Ambient     uint64 `json:"AmbientCaps"`
}

// Exec is a process to start. It gets a session and a process group of its own,
// whose number is its PID.
type Exec struct {
	Argv         []string
	Env          []string
	WorkDir      string // absolute; "" is /
	UID, GID     uint32
	Groups       []uint32
	Capabilities Capabilities
	NoNewPrivs   bool
	Files        map[int]*os.File // by the number that they have in the guest
	PTY          bool             // Files 0, 1 and 2 are a pseudo terminal of the host
	Program      *os.File         // is run in the place of Argv[0], which only names it then
}

type execArgs struct {
	Argv            []string      `json:"argv"`
	Envv            []string      `json:"envv"`
	WorkDir         string        `json:"wd"`
	KUID            uint32        `json:"KUID"`
	KGID            uint32        `json:"KGID"`
	ExtraKGIDs      []uint32      `json:"ExtraKGIDs"`
	NoNewPrivileges bool          `json:"NoNewPrivileges"`
	Capabilities    *Capabilities `json:"Capabilities"`
	StdioIsPty      bool          `json:"StdioIsPty"`
	GuestFDs        []int         `json:"GuestFDs"`
	ContainerID     string        `json:"ContainerID"`
}

// ErrText says that an argument or a variable cannot be given to the Sentry: JSON
// would change it.
var ErrText = errors.New("only UTF-8 without NUL can be given to a sandbox")

// CheckText returns ErrText for what Execute does not take.
func CheckText(list []string) error {
	for _, s := range list {
		if !utf8.ValidString(s) || strings.ContainsRune(s, 0) {
			return fmt.Errorf("%q: %w", s[:min(len(s), 64)], ErrText)
		}
	}
	return nil
}

// Execute starts a process and returns its PID in the guest. A RemoteError means
// that nothing was started, ErrGone that it may have been.
func (c *Client) Execute(ctx context.Context, e Exec) (pid int, err error) {
	for _, list := range [][]string{e.Argv, e.Env, {e.WorkDir}} {
		if err := CheckText(list); err != nil {
			return 0, err
		}
	}
	args := execArgs{
		Argv: e.Argv, Envv: e.Env, WorkDir: folder(e.WorkDir), KUID: e.UID, KGID: e.GID, ExtraKGIDs: e.Groups,
		NoNewPrivileges: e.NoNewPrivs, Capabilities: &e.Capabilities, StdioIsPty: e.PTY, ContainerID: c.container,
	}
	for fd := range e.Files {
		args.GuestFDs = append(args.GuestFDs, fd)
	}
	slices.Sort(args.GuestFDs)
	files := make([]*os.File, 0, len(e.Files)+1)
	for _, fd := range args.GuestFDs {
		files = append(files, e.Files[fd])
	}
	if e.Program != nil {
		files = append(files, e.Program)
	}
	var got int32
	if _, err := c.call(ctx, "containerManager.ExecuteAsync", &args, &got, files...); err != nil {
		return 0, err
	}
	if got <= 0 {
		return 0, fmt.Errorf("containerManager.ExecuteAsync: %w: process %d", errAnswer, got)
	}
	return int(got), nil
}

// folder makes a path one of a folder: the Sentry would start a process in a file too.
func folder(path string) string {
	if path == "" || strings.HasSuffix(path, "/") {
		return path
	}
	return path + "/"
}

// Status is how a process ended.
type Status struct {
	Code   int // 0 to 255, 128+n after signal n
	Signal int // 0 when it ended by itself
}

// statusOf reads a status as wait(2) gives it.
func statusOf(raw uint32) Status {
	if sig := int(raw & 0x7f); sig != 0 {
		return Status{Code: 128 + sig, Signal: sig}
	}
	return Status{Code: int(raw>>8) & 0xff}
}

// WaitPID waits for the end of a process that Execute started. It can be asked
// once: the Sentry forgets the process with its answer.
func (c *Client) WaitPID(ctx context.Context, pid int) (Status, error) {
	arg := struct {
		PID int32
		CID string
	}{int32(pid), c.container}
	var raw uint32
	if _, err := c.call(ctx, "containerManager.WaitPID", arg, &raw); err != nil {
		return Status{}, err
	}
	return statusOf(raw), nil
}

// Wait waits for the end of the container's first process, with which the Sentry
// ends.
func (c *Client) Wait(ctx context.Context) (Status, error) {
	var raw uint32
	if _, err := c.call(ctx, "containerManager.Wait", c.container, &raw); err != nil {
		return Status{}, err
	}
	return statusOf(raw), nil
}

// Mode says who gets a signal.
type Mode int

// Modes of Signal, with the numbers of the Sentry.
const (
	ToProcess    Mode = iota // the process PID
	ToAll                    // every process of the container; PID is 0
	ToForeground             // the foreground process group of the terminal of the process PID
	ToGroup                  // the process group PID
)

// Signal sends a signal.
func (c *Client) Signal(ctx context.Context, mode Mode, pid, signal int) error {
	arg := struct {
		CID   string
		Signo int32
		PID   int32
		Mode  Mode
	}{c.container, int32(signal), int32(pid), mode}
	_, err := c.call(ctx, "containerManager.Signal", arg, nil)
	return err
}

// Pause stops every task of the guest; its network stack and timers run on. It
// returns when all have stopped. Pauses nest: each needs one Resume.
func (c *Client) Pause(ctx context.Context) error {
	_, err := c.call(ctx, "containerManager.Pause", struct{}{}, nil)
	return err
}

// Resume undoes one Pause. One more than there were pauses ends the Sentry: who
// calls it counts.
func (c *Client) Resume(ctx context.Context) error {
	_, err := c.call(ctx, "containerManager.Resume", struct{}{}, nil)
	return err
}

// Process is one of the guest.
type Process struct {
	UID  uint32 `json:"uid"`
	PID  int    `json:"pid"`
	PPID int    `json:"ppid"`
	PGID int    `json:"pgid"`
	TTY  string `json:"tty"`
	Cmd  string `json:"cmd"`
}

// Processes lists those of the container. It works while the guest is paused.
func (c *Client) Processes(ctx context.Context) ([]Process, error) {
	var list []Process
	_, err := c.call(ctx, "containerManager.Processes", c.container, &list)
	return list, err
}

// Usage is what the Sentry counts of its guest.
type Usage struct {
	CPUNanos uint64 // of the container's processes
	PIDs     uint64
	Memory   uint64 // bytes of the guest's memory file
}

// Usage asks for it.
func (c *Client) Usage(ctx context.Context) (Usage, error) {
	var out struct {
		Event struct {
			Data struct {
				Memory struct {
					Usage struct {
						Usage uint64 `json:"usage"`
					} `json:"usage"`
				} `json:"memory"`
				Pids struct {
					Current uint64 `json:"current"`
				} `json:"pids"`
			} `json:"data"`
		} `json:"event"`
		ContainerUsage map[string]uint64 `json:"containerUsage"`
	}
	if _, err := c.call(ctx, "containerManager.Event", c.container, &out); err != nil {
		return Usage{}, err
	}
	d := out.Event.Data
	return Usage{CPUNanos: out.ContainerUsage[c.container], PIDs: d.Pids.Current, Memory: d.Memory.Usage.Usage}, nil
}

// MemoryFile returns the memory of the guest as a file. It stays valid while the
// Sentry lives, and is a right to all that the guest has in memory.
func (c *Client) MemoryFile(ctx context.Context) (*os.File, error) {
	arg := struct{ Version uint64 }{1}
	files, err := c.call(ctx, "Usage.UsageFD", arg, nil)
	if err != nil {
		return nil, err
	}
	const accounting, memory = 0, 1 // in that order
	if len(files) != memory+1 {
		fdpass.Close(files)
		return nil, fmt.Errorf("Usage.UsageFD: %w: %d descriptors", errAnswer, len(files))
	}
	return files[memory], files[accounting].Close()
}

// Reduce makes the Sentry give back memory that it can do without; with wait it
// returns when that is done.
func (c *Client) Reduce(ctx context.Context, wait bool) error {
	arg := struct {
		Wait bool `json:"wait"`
	}{wait}
	_, err := c.call(ctx, "Usage.Reduce", arg, nil)
	return err
}

// Cat writes the content of a file of the guest to out, a pipe or file of the
// host, without a task of the guest: it works while the guest is paused. A fifo
// blocks it, and so does an out that nobody reads: ctx ends the wait, and the
// Sentry is left with it until out is closed.
func (c *Client) Cat(ctx context.Context, path string, out *os.File) error {
	arg := struct {
		Files []string `json:"files"`
	}{[]string{path}}
	_, err := c.call(ctx, "Fs.Cat", arg, nil, out)
	return err
}

// Mount mounts an EROFS image file at a folder of the running guest, read-only. The
// Sentry reads plain EROFS only: no chunks, no compression, no second device.
func (c *Client) Mount(ctx context.Context, destination string, image *os.File) error {
	arg := struct {
		ContainerID string
		Source      string
		Destination string
		FsType      string
	}{c.container, "quarry", destination, "erofs"}
	_, err := c.call(ctx, "containerManager.Mount", arg, nil, image)
	return err
}
