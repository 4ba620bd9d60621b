package session

import (
	"bytes"
	"errors"
	"os"
	"regexp"
	"sync"

	"golang.org/x/sys/unix"
)

// heldMax is kept of what background jobs write while no command runs.
const heldMax = 64 << 10

// pump carries what a session writes to the command that runs. It reads always, so
// that nobody in the guest waits for it.
type pump struct {
	from *os.File
	drop *filter // of what bash says by itself, or nil

	mu   sync.Mutex // guards what follows, and is held from a read until it is passed on
	to   *os.File   // of the command that runs, nil between two
	held []byte
	buf  [64 << 10]byte
}

// run reads until nobody in the guest holds the other end any more.
func (p *pump) run() {
	defer p.from.Close()
	raw, err := p.from.SyscallConn()
	if err != nil {
		return
	}
	for end := false; !end; {
		err := raw.Read(func(fd uintptr) bool {
			p.mu.Lock()
			defer p.mu.Unlock()
			n, err := p.readLocked(int(fd), len(p.buf))
			end = err == nil && n == 0 || err != nil && !errors.Is(err, unix.EAGAIN)
			return !errors.Is(err, unix.EAGAIN)
		})
		if err != nil {
			return
		}
	}
}

// readLocked passes on what is there, without waiting.
func (p *pump) readLocked(fd, most int) (int, error) {
	for {
		n, err := unix.Read(fd, p.buf[:min(most, len(p.buf))])
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return 0, err
		}
		b := p.buf[:n]
		if p.drop != nil {
			b = p.drop.pass(b)
		}
		p.passLocked(b)
		return n, nil
	}
}

func (p *pump) passLocked(b []byte) {
	if p.to != nil {
		_, _ = p.to.Write(b) // who reads it has a limit of its own, and never stops
		return
	}
	p.held = append(p.held, b[:min(len(b), heldMax-len(p.held))]...)
}

// begin makes a command the one that is written to.
func (p *pump) begin(to *os.File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.to = to
	if len(p.held) > 0 {
		_, _ = to.Write(p.held)
		p.held = nil
	}
}

// settle passes on what was in the pipe when the command ended, and leaves it.
func (p *pump) settle() {
	p.mu.Lock()
	defer p.mu.Unlock()
	defer func() { p.to = nil }()
	raw, err := p.from.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		left, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ)
		for err == nil && left > 0 {
			var n int
			n, err = p.readLocked(int(fd), left)
			if n == 0 {
				return
			}
			left -= n
		}
	})
	if p.drop != nil {
		p.passLocked(p.drop.rest())
	}
}

// filter takes out one line: an interactive bash without a terminal complains that it
// has none whenever a signal has ended a process.
type filter struct {
	prefix string // "bash: [PID: "
	kept   []byte // may be the beginning of such a line
}

// complaint is the rest of that line; the number in parentheses is bash's descriptor.
var complaint = regexp.MustCompile(`^\d{1,10} \(255\)\] tcsetattr: [^\n]{1,100}\n`)

const maxNoise = 160 // of the whole line

// pass returns what of b, and of what was kept, can go on.
func (f *filter) pass(b []byte) []byte {
	b = append(f.kept, b...)
	f.kept = nil
	var out []byte
	for {
		i := bytes.Index(b, []byte(f.prefix))
		if i < 0 {
			n := partial(b, f.prefix)
			f.kept = append(f.kept, b[len(b)-n:]...)
			return append(out, b[:len(b)-n]...)
		}
		out, b = append(out, b[:i]...), b[i:]
		rest := b[len(f.prefix):]
		if m := complaint.Find(rest); m != nil {
			b = rest[len(m):]
			continue
		}
		if !bytes.ContainsRune(rest, '\n') && len(b) < maxNoise {
			f.kept = append(f.kept, b...)
			return out
		}
		out, b = append(out, b[:len(f.prefix)]...), rest
	}
}

// rest returns what was kept: nothing follows it.
func (f *filter) rest() []byte {
	b := f.kept
	f.kept = nil
	return b
}

// partial is how many bytes at the end of b are the beginning of s.
func partial(b []byte, s string) int {
	for n := min(len(b), len(s)-1); n > 0; n-- {
		if string(b[len(b)-n:]) == s[:n] {
			return n
		}
	}
	return 0
}
