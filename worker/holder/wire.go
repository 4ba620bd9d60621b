package holder

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"quarry/internal/fdpass"
	"quarry/worker/sandbox"
	"quarry/worker/sentry"
	"quarry/worker/session"
)

// A message on holder.sock is a header and a body of JSON; descriptors go with the
// header. FORMAT.md has the bytes.
const (
	magic       = "qhld"
	wireVersion = 1
	headerSize  = 12
	// maxBody is for the largest request, an exec with all of MaxStdin in base64 and
	// arguments and variables of 2 MiB, and for the largest answer, 10,000 processes.
	maxBody = 8 << 20
	// maxPassed is how many descriptors a message can have: the streams of a helper and
	// its program.
	maxPassed = 4
)

var (
	errWire    = errors.New("not a message of a holder")
	errVersion = errors.New("the holder speaks another version")
)

type header struct {
	fds  int
	size int
}

func (h header) encode() []byte {
	b := append(make([]byte, 0, headerSize), magic...)
	b = binary.BigEndian.AppendUint16(b, wireVersion)
	b = binary.BigEndian.AppendUint16(b, uint16(h.fds))
	return binary.BigEndian.AppendUint32(b, uint32(h.size))
}

func decodeHeader(b []byte) (header, error) {
	if len(b) != headerSize || string(b[:4]) != magic {
		return header{}, errWire
	}
	if v := binary.BigEndian.Uint16(b[4:]); v != wireVersion {
		return header{}, fmt.Errorf("%w: %d, this is %d", errVersion, v, wireVersion)
	}
	h := header{int(binary.BigEndian.Uint16(b[6:])), int(binary.BigEndian.Uint32(b[8:]))}
	if h.fds > maxPassed || h.size > maxBody {
		return header{}, fmt.Errorf("%w: %d descriptors and %d bytes, at most %d and %d", errWire, h.fds, h.size, maxPassed, maxBody)
	}
	return h, nil
}

// send writes a message.
func send(c *net.UnixConn, body []byte, files []*os.File) error {
	if len(body) > maxBody || len(files) > maxPassed {
		return fmt.Errorf("%w: %d descriptors and %d bytes, at most %d and %d", errWire, len(files), len(body), maxPassed, maxBody)
	}
	return fdpass.Write(c, append(header{len(files), len(body)}.encode(), body...), files)
}

// receive reads a message. The files are the caller's to close.
func receive(c *net.UnixConn) (body []byte, files []*os.File, err error) {
	head := make([]byte, headerSize)
	n, files, all, err := fdpass.Read(c, head, maxPassed)
	defer func() {
		if err != nil {
			fdpass.Close(files)
			files = nil
		}
	}()
	if err != nil {
		return nil, files, err
	}
	if n == 0 {
		return nil, files, io.EOF
	}
	if _, err := io.ReadFull(c, head[n:]); err != nil {
		return nil, files, err
	}
	h, err := decodeHeader(head)
	if err != nil {
		return nil, files, err
	}
	if h.fds != len(files) || !all {
		return nil, files, fmt.Errorf("%w: %d descriptors came, %d were said", errWire, len(files), h.fds)
	}
	body = make([]byte, h.size)
	_, err = io.ReadFull(c, body)
	return body, files, err
}

// request is a call; which of its fields count is the method's matter.
type request struct {
	Method  string            `json:"method"`
	Exec    string            `json:"exec,omitempty"`
	Spec    *sandbox.ExecSpec `json:"spec,omitempty"`
	Process *Process          `json:"process,omitempty"`
	Streams []int             `json:"streams,omitempty"` // of a helper: what each descriptor becomes in the guest
	Out     int64             `json:"out,omitempty"`
	Err     int64             `json:"err,omitempty"`
	Wait    int64             `json:"wait_ms,omitempty"` // how long the holder may take to answer
	Offset  int64             `json:"offset,omitempty"`
	Data    []byte            `json:"data,omitempty"`
	End     bool              `json:"end,omitempty"`
	Signal  int               `json:"signal,omitempty"`
	Window  *sandbox.Window   `json:"window,omitempty"`
	Force   bool              `json:"force,omitempty"`
	Path    string            `json:"path,omitempty"`
}

// answer is what a call returned, or its error.
type answer struct {
	Code      string              `json:"code,omitempty"` // of the error, "" when there is none
	Message   string              `json:"message,omitempty"`
	State     *State              `json:"state,omitempty"`
	Ended     *Ended              `json:"ended,omitempty"`
	Exec      *sandbox.ExecState  `json:"exec,omitempty"`
	Execs     []sandbox.ExecState `json:"execs,omitempty"`
	Offset    int64               `json:"offset,omitempty"`
	Bytes     int64               `json:"bytes,omitempty"` // of a checkpoint
	Status    *sentry.Status      `json:"status,omitempty"`
	Processes []sentry.Process    `json:"processes,omitempty"`
	Usage     *sentry.Usage       `json:"usage,omitempty"`
}

// decodeRequest takes exactly one request.
func decodeRequest(b []byte) (request, error) {
	var r request
	if err := decodeStrict(b, &r); err != nil {
		return request{}, fmt.Errorf("%w: %w", errWire, err)
	}
	return r, nil
}

// codes are the errors that a caller branches on, by their name on the wire.
var codes = []struct {
	name string
	err  error
}{
	{"invalid", sandbox.ErrInvalid},
	{"ended", sandbox.ErrEnded},
	{"exec_unknown", sandbox.ErrExecUnknown},
	{"exec_conflict", sandbox.ErrExecConflict},
	{"exec_ended", sandbox.ErrExecEnded},
	{"stdin_offset", sandbox.ErrStdinOffset},
	{"capacity", sandbox.ErrCapacity},
	{"session_busy", session.ErrBusy},
	{"sessions", errSessions},
	{"paused", ErrPaused},
	{"busy", ErrBusy},
	{"hibernated", ErrHibernated},
	{"not_hibernated", ErrNotHibernated},
	{"no_room", ErrNoRoom},
	{"not_restored", ErrNotRestored},
	{"file_not_found", sandbox.ErrFileNotFound},
	{"no_process", sandbox.ErrNoProcess},
	{"runtime", sandbox.ErrRuntime},
}

// refuse makes the answer of an error.
func refuse(err error) answer {
	for _, c := range codes {
		if errors.Is(err, c.err) {
			return answer{Code: c.name, Message: plain(err.Error())}
		}
	}
	return answer{Code: "runtime", Message: plain(err.Error())}
}

// remoteError is an error that a holder answered with.
type remoteError struct {
	message string
	err     error
}

func (e *remoteError) Error() string { return e.message }
func (e *remoteError) Unwrap() error { return e.err }

// retryAfter is when a refusal for want of room is worth another try.
const retryAfter = time.Second

// error returns the error of an answer, or nil.
func (a answer) error() error {
	if a.Code == "" {
		return nil
	}
	for _, c := range codes {
		if c.name != a.Code {
			continue
		}
		if errors.Is(c.err, sandbox.ErrCapacity) {
			return &sandbox.Busy{Err: sandbox.ErrCapacity, What: "execs", Why: a.Message, RetryAfter: retryAfter}
		}
		if errors.Is(c.err, session.ErrBusy) {
			return &sandbox.Busy{Err: sandbox.ErrRate, What: "session", Why: a.Message, RetryAfter: retryAfter}
		}
		if errors.Is(c.err, errSessions) {
			return &sandbox.Busy{Err: sandbox.ErrRate, What: "sessions", Why: a.Message, RetryAfter: retryAfter}
		}
		return &remoteError{a.Message, c.err}
	}
	return &remoteError{a.Message, sandbox.ErrRuntime}
}

func marshal(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // structs of numbers, text and time can be written
	}
	return b
}
