package attach

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// stateFile is the name of the state record in the folder of an attachment, and
// tmpSuffix follows it while the record is written.
const (
	stateFile = "shim.json"
	tmpSuffix = ".tmp"
)

const (
	stateVersion = 2
	// maxState bounds the record when it is read.
	maxState = 64 << 10
)

// Phase is how far a shim has come.
type Phase string

// The phases, in order.
const (
	PhaseMounted  Phase = "mounted"  // serving
	PhaseStopping Phase = "stopping" // unmounting
)

// State is what a shim writes about itself, once its image is mounted, for the
// processes that manage mounts; Detach and Sweep remove it. PID and Start
// together name a process: numbers are used again.
type State struct {
	Version int    `json:"version"` // 2; a record of version 1 has no attach and no steps
	PID     int    `json:"pid"`
	Start   uint64 `json:"start"` // in clock ticks since boot, as in proc_pid_stat(5)
	Phase   Phase  `json:"phase"`
	Socket  string `json:"socket"` // the reader's
	Export  string `json:"export"`
	Size    int64  `json:"size"`
	Attach  Mode   `json:"attach"`
	Device  string `json:"device"`
	Root    string `json:"root"`
	Steps   []Step `json:"steps,omitempty"` // of its start

	dir string // where it was read
}

// Step is one part of a shim's start.
type Step struct {
	Name  string    `json:"step"`
	Began time.Time `json:"began"`
	Ended time.Time `json:"ended"`
}

// The steps. Mount is a part of attach.
const (
	StepLink   = "link"   // connect to the reader, which opens the image
	StepAttach = "attach" // bind the export to a block device and mount it
	StepMount  = "mount"  // mount(2), which reads the superblock
)

// Write puts s into the folder as a whole: a reader sees the old or the new
// record. It need not survive a power cut, which ends the mount as well.
func (s State) Write(dir string) error {
	s.Version = stateVersion
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	path := filepath.Join(dir, stateFile)
	tmp := path + tmpSuffix
	if err := os.WriteFile(tmp, append(b, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

// openRegular opens a regular file for reading, and waits for nothing else.
func openRegular(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", path)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// ReadState reads the record in a folder. Errors: fs.ErrNotExist.
func ReadState(dir string) (State, error) {
	path := filepath.Join(dir, stateFile)
	f, err := openRegular(path)
	if err != nil {
		return State{}, err
	}
	defer f.Close()
	b := make([]byte, maxState)
	n, err := f.Read(b)
	if err != nil {
		return State{}, fmt.Errorf("read %s: %w", path, err)
	}
	d := json.NewDecoder(bytes.NewReader(b[:n]))
	d.DisallowUnknownFields()
	var s State
	if err := d.Decode(&s); err != nil {
		return State{}, fmt.Errorf("read %s: %w", path, err)
	}
	switch s.Version {
	case 1: // of a shim that was started before this program was installed
		s.Attach = ModeFUSE
	case stateVersion:
	default:
		return State{}, fmt.Errorf("read %s: version %d, this program knows 1 and %d", path, s.Version, stateVersion)
	}
	s.dir = dir
	return s, nil
}

// Alive reports whether the process that wrote s, which ReadState returned,
// still holds the lock of the folder: it serves then, or is about to end.
func (s State) Alive() bool {
	if s.dir == "" {
		return false
	}
	dir, p := folder(s.dir), process{s.PID, s.Start}
	if p.holds(dir.lock()) {
		return true
	}
	// In another PID namespace its number means nothing here. Only who has the
	// lock writes the record, and empties it first.
	if !dir.locked() {
		return false
	}
	got, err := dir.record()
	return err == nil && got == p
}

// ProcessStart returns when a process began, in clock ticks since boot. A
// zombie counts as ended.
func ProcessStart(pid int) (uint64, error) {
	path := filepath.Join("/proc", strconv.Itoa(pid), "stat")
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	// The name, in parentheses, may hold anything; fields are counted behind it.
	_, rest, ok := strings.Cut(string(b[max(bytes.LastIndexByte(b, ')'), 0):]), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 {
		return 0, fmt.Errorf("%s is malformed", path)
	}
	if fields[0] == "Z" || fields[0] == "X" {
		return 0, fmt.Errorf("process %d has ended", pid)
	}
	return strconv.ParseUint(fields[19], 10, 64)
}
