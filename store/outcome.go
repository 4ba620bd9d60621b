package store

import (
	"context"
	"errors"
)

// The reasons why no good copy of a chunk could be had, beside ErrNotFound and
// *CorruptError. Who knows the reason wraps one of them.
var (
	// ErrUnreachable says that a store gave no answer, or not in time.
	ErrUnreachable = errors.New("store cannot be reached")
	// ErrUnauthorised says that a store refused this client.
	ErrUnauthorised = errors.New("store refused the credentials")
	// ErrLocalDisk says that a disk of this machine failed.
	ErrLocalDisk = errors.New("local disk failed")
)

// Outcome says in one word why a chunk could not be had, for counters, logs and
// reports.
type Outcome string

// The outcomes.
const (
	Corrupt      Outcome = "corrupt"      // every copy had wrong bytes
	Missing      Outcome = "missing"      // no store has it
	Unreachable  Outcome = "unreachable"  // no answer, or none in time
	Unauthorised Outcome = "unauthorised" // refused
	LocalDisk    Outcome = "local_disk"   // this machine's disk failed
)

// Outcomes lists all of them, in the order in which reports show them.
var Outcomes = []Outcome{Corrupt, Missing, Unreachable, Unauthorised, LocalDisk}

// OutcomeOf classifies the error of a chunk. When it has several reasons, wrong
// bytes come first, as nobody must overlook them; what cannot be classified is
// Unreachable, as is the end of a deadline. It returns "" for nil and for a
// caller that went away.
func OutcomeOf(err error) Outcome {
	switch {
	case err == nil:
		return ""
	case errors.As(err, new(*CorruptError)):
		return Corrupt
	case errors.Is(err, ErrUnauthorised):
		return Unauthorised
	case errors.Is(err, ErrLocalDisk):
		return LocalDisk
	case errors.Is(err, ErrUnreachable), errors.Is(err, context.DeadlineExceeded):
		return Unreachable
	case errors.Is(err, ErrNotFound):
		return Missing
	case errors.Is(err, context.Canceled):
		return ""
	}
	return Unreachable
}
