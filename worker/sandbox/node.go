package sandbox

import (
	"context"
	"io"
	"time"
)

// Node keeps the sandboxes of one machine. Its methods may be called at once from
// any number of goroutines. A method that is given up by its caller leaves nothing
// half done: what it began goes on to its end, and the state says so.
//
// Errors are those of this package, wrapped.
type Node interface {
	// Create makes a sandbox and returns when it runs. The same key with the same
	// spec returns the sandbox that the first call made, and made says false.
	Create(ctx context.Context, s Spec, key string) (sb Sandbox, made bool, err error)
	Get(ctx context.Context, id string) (Sandbox, error)
	// List returns sandboxes in order of their id, and the id after which the next
	// page begins, "" at the end.
	List(ctx context.Context, f Filter) (page []Sandbox, next string, err error)
	// Delete ends a sandbox, however often it is called, and returns its record.
	Delete(ctx context.Context, id string) (End, error)
	// Authorize reports whether the token is the sandbox's own.
	Authorize(ctx context.Context, id, token string) bool

	// Pause stops a sandbox. expect is for how long, as far as its caller knows; 0 is not
	// known.
	Pause(ctx context.Context, id string, expect time.Duration) error
	// Resume lets a paused sandbox go on, and restores a hibernated one.
	Resume(ctx context.Context, id string) error
	// Hibernate pauses a sandbox, puts its memory to disk and ends its processes. Refused
	// with ErrNotHibernated, a sandbox that ran goes on.
	Hibernate(ctx context.Context, id string) error
	// Wake has a sandbox run that was hibernated or paused. One that runs is left alone.
	Wake(ctx context.Context, id string) error
	// SetTTL makes a sandbox live so many seconds from now; it never shortens.
	SetTTL(ctx context.Context, id string, seconds int64) (Sandbox, error)
	Usage(ctx context.Context, id string) (Usage, error)

	// Exec starts a command, or finds the one that has its id, and returns its state.
	Exec(ctx context.Context, id string, e ExecSpec) (ExecState, error)
	// WaitExec returns when the exec has ended, whoever still holds its output open,
	// or has more than out and err bytes of output; or, with the state as it is and
	// no error, when ctx ends. What the command wrote before its end is in its output
	// by then.
	WaitExec(ctx context.Context, id, exec string, out, err int64) (ExecState, error)
	Execs(ctx context.Context, id string) ([]ExecState, error)
	// Output copies what is kept of a stream, stdout or stderr, from an offset on.
	Output(ctx context.Context, id, exec, stream string, offset int64, w io.Writer) (int64, error)
	// Stdin gives an exec what follows on its stdin, at the offset where it is now,
	// and returns the next one. What was given before and is given again is passed over.
	Stdin(ctx context.Context, id, exec string, offset int64, r io.Reader, end bool) (int64, error)
	Signal(ctx context.Context, id, exec string, signal int) error
	Resize(ctx context.Context, id, exec string, w Window) error

	// ReadFile calls begin with the file before the first byte is written to w. It
	// does not wake a paused sandbox.
	ReadFile(ctx context.Context, id, path string, o ReadOptions, begin func(FileInfo) error, w io.Writer) error
	WriteFile(ctx context.Context, id, path string, o WriteOptions, r io.Reader) (FileInfo, error)
	StatFile(ctx context.Context, id, path string) (FileInfo, error)
	ListFiles(ctx context.Context, id, path string, depth int) ([]FileInfo, error)
	RemoveFile(ctx context.Context, id, path string) error
	TarDown(ctx context.Context, id string, o TarOptions, w io.Writer) error
	TarUp(ctx context.Context, id, path string, r io.Reader) error

	// Give adds a share to a running sandbox, and Take removes one.
	Give(ctx context.Context, id string, s Share) error
	Take(ctx context.Context, id, target string) error

	SetNetwork(ctx context.Context, id string, p Policy) (Network, error)

	// Events calls fn with each event after a sequence number until ctx ends.
	Events(ctx context.Context, after uint64, id string, fn func(Event) error) error
	Status(ctx context.Context) (NodeStatus, error)
	// Drain makes the node refuse creates; with end it ends what runs.
	Drain(ctx context.Context, end bool) error
}
