package holder

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
)

// input is the stdin of an exec, at an offset that only grows. One caller writes
// at a time.
type input struct {
	x    *execution
	turn chan struct{} // has one element while somebody writes

	mu     sync.Mutex // guards what follows
	to     *os.File   // does not block
	offset int64
	closed bool
}

func newInput(to *os.File, x *execution) *input {
	return &input{to: to, x: x, turn: make(chan struct{}, 1)}
}

// feed writes what was given with the exec, as long as it takes.
func (in *input) feed(b []byte, end bool) {
	in.write(context.Background(), 0, b, end) // ends with the exec, which closes the input
}

// write takes what follows at an offset, waits for room until ctx ends, and returns
// the offset after what was taken.
func (in *input) write(ctx context.Context, offset int64, b []byte, end bool) (int64, error) {
	select {
	case in.turn <- struct{}{}:
		defer func() { <-in.turn }()
	case <-ctx.Done():
		in.mu.Lock()
		defer in.mu.Unlock()
		return in.offset, nil
	}
	in.mu.Lock()
	now, closed := in.offset, in.closed
	in.mu.Unlock()
	skip := now - offset
	switch {
	case offset < 0 || skip < 0:
		return now, fmt.Errorf("%w: it is at %d, not %d: go on from there", sandbox.ErrStdinOffset, now, offset)
	case closed && skip == int64(len(b)) && end:
		return now, nil // the same end once more
	case closed:
		return now, fmt.Errorf("%w: its stdin is closed", sandbox.ErrExecEnded)
	}
	b = b[min(skip, int64(len(b))):]
	n, err := in.put(ctx, b)
	in.mu.Lock()
	in.offset += int64(n)
	now = in.offset
	in.mu.Unlock()
	if n < len(b) || err != nil {
		return now, err
	}
	if end {
		in.end()
	}
	return now, nil
}

// put writes until all is written or ctx ends, which is no error.
func (in *input) put(ctx context.Context, b []byte) (n int, err error) {
	stop := context.AfterFunc(ctx, func() { in.to.SetWriteDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() {
			in.to.SetWriteDeadline(time.Time{})
		}
	}()
	for n < len(b) && err == nil {
		part := b[n:min(len(b), n+maxTyped)]
		var signals []int
		if in.x.terminal != nil {
			signals = typed(in.to, part)
		}
		var m int
		m, err = in.to.Write(part)
		n += m
		in.x.press(signals)
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return n, nil
	case errors.Is(err, unix.EPIPE), errors.Is(err, os.ErrClosed), errors.Is(err, unix.EIO):
		return n, fmt.Errorf("%w: nobody reads its stdin", sandbox.ErrExecEnded)
	}
	return n, err
}

// maxTyped is how much is written between two looks at a terminal's mode.
const maxTyped = 4096

// end says that nothing more comes. A terminal stays open for output: its end is a
// character that the command may take for one.
func (in *input) end() {
	if in.x.terminal != nil {
		in.to.Write([]byte{endOfTransmission})
		in.mu.Lock()
		in.closed = true
		in.mu.Unlock()
		return
	}
	in.close()
}

const endOfTransmission = 4

// close closes the pipe. The terminal is its stream's to close.
func (in *input) close() {
	in.mu.Lock()
	defer in.mu.Unlock()
	if !in.closed && in.x.terminal == nil {
		in.to.Close()
	}
	in.closed = true
}

// press sends the signals that typing makes.
func (x *execution) press(signals []int) {
	for _, sig := range signals {
		ctx, cancel := context.WithTimeout(context.Background(), signalTimeout)
		x.mu.Lock()
		pid := x.state.PID
		x.mu.Unlock()
		if err := x.deliver(ctx, pid, sig); err != nil {
			x.box.log.Warn("typed signal not delivered", "exec", x.state.ID, "signal", sig, "err", err)
		}
		cancel()
	}
}

// signalTimeout bounds the delivery of one signal.
const signalTimeout = 5 * time.Second
