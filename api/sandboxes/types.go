package sandboxes

import (
	"time"

	"quarry/worker/sandbox"
)

// Headers of the contract.
const (
	HeaderRequestID = "X-Request-Id"
	HeaderKey       = "Idempotency-Key"
	// HeaderSHA256 is the SHA-256 of a body in hex: of the part that is sent when it
	// is one. It is a trailer of answers above MaxHashed bytes.
	HeaderSHA256 = "X-Content-Sha256"
	// HeaderError is the trailer of an answer that fails after its first byte: the Error,
	// as JSON in ASCII. Who says TE: trailers gets it; for others, who may take an answer
	// that has an end for a whole one, the connection is cut.
	HeaderError = "Quarry-Error"
	// HeaderInfo is the FileInfo of a file that is sent, as JSON.
	HeaderInfo = "Quarry-File"
	// HeaderNext is the offset after what an answer has of an output, HeaderDropped how
	// many bytes came after what is kept, HeaderClosed whether nothing more comes.
	HeaderNext    = "Quarry-Next-Offset"
	HeaderDropped = "Quarry-Dropped-Bytes"
	HeaderClosed  = "Quarry-Closed"
)

// Limits of the contract.
const (
	// MaxBody bounds a JSON request: a create or an exec with its stdin in base64.
	MaxBody = 4 << 20
	// MaxInline bounds what an answer in JSON has of each stream of an exec; the rest
	// of what is kept is read from …/output.
	MaxInline = 4 << 20
	// MaxHashed is the largest file whose SHA-256 stands before its bytes.
	MaxHashed = 8 << 20
	// MaxWait bounds how long one request waits for an exec to change.
	MaxWait = 10 * time.Minute
	// MaxPage bounds a page of a list.
	MaxPage = 1000
	// MaxPath bounds the path of a file, as Linux does.
	MaxPath = 4096
)

// SandboxesPage is one page of GET /v1/sandboxes.
type SandboxesPage struct {
	Sandboxes []sandbox.Sandbox `json:"sandboxes"`
	Next      string            `json:"next,omitempty"` // after of the next page
}

// ExecsPage is the answer to GET …/exec.
type ExecsPage struct {
	Execs []sandbox.ExecState `json:"execs"`
}

// FilesPage is the answer to GET …/list.
type FilesPage struct {
	Files []sandbox.FileInfo `json:"files"`
}

// ExecRequest is the body of POST …/exec.
type ExecRequest struct {
	sandbox.ExecSpec
	// KillOnDisconnect ends the command when the connection that waits for it is lost.
	// Without it the command goes on, and is found by its id.
	KillOnDisconnect bool `json:"kill_on_disconnect,omitempty"`
	// Detach answers as soon as the command runs.
	Detach bool `json:"detach,omitempty"`
}

// ExecAnswer is the answer to an exec that was waited for.
type ExecAnswer struct {
	sandbox.ExecState
	Out []byte `json:"stdout_b64"` // the first MaxInline bytes
	Err []byte `json:"stderr_b64"`
	// More says that more is kept than the answer has.
	More bool `json:"more"`
}

// Frame is one line of an exec's stream. T is out, err or pulse, which says nothing but
// that the connection lives, or at the end exit, with the state.
type Frame struct {
	T      string             `json:"t"`
	Offset int64              `json:"off,omitempty"`
	Data   []byte             `json:"b64,omitempty"`
	State  *sandbox.ExecState `json:"state,omitempty"`
	Error  *Error             `json:"error,omitempty"` // the stream ends without an exit
}

// StdinAnswer says where stdin goes on.
type StdinAnswer struct {
	Next int64 `json:"next_offset"`
}

// SignalRequest is the body of POST …/signal.
type SignalRequest struct {
	Signal int `json:"signal"` // by number: 15 is SIGTERM, 9 SIGKILL
}

// TTLRequest is the body of POST …/ttl.
type TTLRequest struct {
	Seconds int64 `json:"ttl_s"` // from now on; an earlier end is put off, a later one stays
}

// DrainRequest is the body of POST /v1/node/drain.
type DrainRequest struct {
	End bool `json:"end"` // end what runs, too
}

// WriteAnswer is the answer to PUT …/files.
type WriteAnswer struct {
	sandbox.FileInfo
	SHA256 string `json:"sha256"` // of what was received and written
}
