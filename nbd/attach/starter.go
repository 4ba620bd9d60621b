package attach

// Read is one read of a Starter.
type Read struct {
	Off int64
	N   int
	// Answer is called once, by any thread: with the N bytes, all of them right,
	// valid until it returns; or with an error. It must not block. The Read may be
	// started again then.
	Answer func(p []byte, err error)
}

// Starter is a Source that keeps its unanswered reads itself, so that one which
// waits needs no goroutine and one which does not wakes none.
type Starter interface {
	Source
	// Start begins a read and returns at once; Answer may come before that. The
	// source answers it with an error when its deadline has passed. Safe for
	// concurrent use.
	Start(r *Read)
	// Cancel answers every unanswered read with an error, and every later one.
	Cancel()
}
