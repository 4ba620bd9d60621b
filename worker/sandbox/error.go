package sandbox

import (
	"errors"
	"fmt"
	"strings"
	"time"
)

// What callers branch on. Every one has a row in the table of api/sandboxes.
var (
	ErrInvalid       = errors.New("invalid request")
	ErrUnknown       = errors.New("no such sandbox")
	ErrEnded         = errors.New("the sandbox has ended") // see EndedError
	ErrNotReady      = errors.New("the sandbox is not ready for that")
	ErrKeyConflict   = errors.New("the idempotency key was used with another body")
	ErrExecUnknown   = errors.New("no such exec")
	ErrExecConflict  = errors.New("the exec id was used with another command")
	ErrExecEnded     = errors.New("the exec has ended")
	ErrStdinOffset   = errors.New("stdin does not go on there")
	ErrCapacity      = errors.New("the node has no room")   // see Busy
	ErrRate          = errors.New("too many requests")      // see Busy
	ErrDraining      = errors.New("the node is drained")    // another node may have room
	ErrFileNotFound  = errors.New("no such file")           //
	ErrFileType      = errors.New("not of that type")       // a fifo that is read as a file, a file listed as a folder
	ErrFilePath      = errors.New("path cannot be used")    // loops, too long, not absolute
	ErrFileExists    = errors.New("file exists")            //
	ErrFileStuck     = errors.New("the file does not read") // a reader that the guest blocks
	ErrTooLarge      = errors.New("too large")
	ErrDigest        = errors.New("content does not have that digest")
	ErrNoProcess     = errors.New("the sandbox is at its limit of processes")
	ErrDiskFull      = errors.New("no space left in the sandbox")
	ErrShare         = errors.New("not a share of this node")
	ErrImage         = errors.New("image not found")
	ErrImagePending  = errors.New("image is not ready")
	ErrImagePull     = errors.New("image was not had")
	ErrImageVerify   = errors.New("image is not what was signed")
	ErrNotHibernated = errors.New("the sandbox cannot be hibernated now")
	ErrRuntime       = errors.New("the sandbox runtime failed")
	ErrUnsupported   = errors.New("this node cannot do that")
)

// EndedError is ErrEnded with the record.
type EndedError struct {
	ID  string
	End End
}

func (e *EndedError) Error() string {
	return fmt.Sprintf("sandbox %s has ended: %s: %s", e.ID, e.End.Reason, e.End.Message)
}

// Is makes it ErrEnded.
func (e *EndedError) Is(target error) bool { return target == ErrEnded }

// Busy is a refusal that says when to come again. Err is ErrCapacity, ErrRate or
// ErrNotReady.
type Busy struct {
	Err        error
	What       string // memory, disk, pids, sandboxes, creates, execs, pause
	Why        string // how much there is, or what is in the way, and what helps
	RetryAfter time.Duration
}

func (e *Busy) Error() string {
	if e.Why == "" {
		return fmt.Sprintf("%v: %s", e.Err, e.What)
	}
	return fmt.Sprintf("%v: %s: %s", e.Err, e.What, e.Why)
}

// Unwrap returns Err.
func (e *Busy) Unwrap() error { return e.Err }

// MaxMessage bounds the messages of errors, execs and ends. They name what a caller or
// a guest has chosen, however long that is.
const MaxMessage = 4 << 10

// Short is a text of at most MaxMessage bytes: of a longer one the beginning, and the
// end, which says what went wrong.
func Short(text string) string {
	if len(text) <= MaxMessage {
		return text
	}
	const gap = " [...] "
	const half = (MaxMessage - len(gap)) / 2
	return strings.ToValidUTF8(text[:half], "") + gap + strings.ToValidUTF8(text[len(text)-half:], "")
}
