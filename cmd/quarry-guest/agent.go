package main

import (
	"bytes"
	"errors"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// agent is the other role of this program, quarry-guest agent, for quarry bench agents:
// an agent that is as simple as one can be. It holds memory, asks its model over plain
// HTTP, touches a working set when the answer comes, says so, works, and asks again.
type agent struct {
	server unix.SockaddrInet4
	index  int
	hot    int // percent of the memory that each step reads and writes, the same each time
	moving int // percent of it that each step reads besides, another part each time
	cold   int // percent of it that the work after reads, another part each time
	work   time.Duration
	body   int // bytes of a question
	mem    *held
	fd     int // of the connection; -1 is none
	buf    []byte
}

const (
	// maxAnswer bounds an answer of the model.
	maxAnswer = 16 << 20
	// againAfter is the pause before a model is asked again that was not reached.
	againAfter = 20 * time.Millisecond
	// maxAttempts bounds that: ten minutes.
	maxAttempts = 30000
)

// runAgent reads words such as mib=256 and lives until it is ended.
func runAgent(args []string) error {
	a := &agent{fd: -1, buf: make([]byte, 0, 64<<10)}
	mib, work, seed := 0, 0, 0
	for _, w := range args {
		name, value, _ := strings.Cut(w, "=")
		if name == "model" {
			if err := a.dialAt(value); err != nil {
				return err
			}
			continue
		}
		to := map[string]*int{"index": &a.index, "mib": &mib, "hot": &a.hot, "moving": &a.moving, "cold": &a.cold, "work": &work, "body": &a.body, "seed": &seed}[name]
		n, err := strconv.Atoi(value)
		if to == nil || err != nil || n < 0 {
			return errors.New("agent: no word of it: " + w)
		}
		*to = n
	}
	a.work = time.Duration(work) * time.Millisecond
	var err error
	if a.mem, err = hold(mib<<20, uint64(seed)); err != nil {
		return err
	}
	for step := 0; ; step++ {
		if err := a.step(step); err != nil {
			return err
		}
	}
}

func (a *agent) dialAt(text string) error {
	host, port, _ := strings.Cut(text, ":")
	n, err := strconv.Atoi(port)
	parts := strings.Split(host, ".")
	if err != nil || len(parts) != 4 {
		return errors.New("agent: want model=ADDRESS:PORT, not " + text)
	}
	for i, p := range parts {
		b, err := strconv.ParseUint(p, 10, 8)
		if err != nil {
			return errors.New("agent: want model=ADDRESS:PORT, not " + text)
		}
		a.server.Addr[i] = byte(b)
	}
	a.server.Port = n
	return nil
}

// step asks, touches, says so, and works.
func (a *agent) step(step int) error {
	answer, err := a.call("/ask"+words("?agent=", a.index, "&step=", step), a.body)
	if err != nil {
		return err
	}
	woke := time.Now()
	word, _, _ := bytes.Cut(answer, []byte("\n"))
	if string(word) == "finish" {
		a.mem.checkAll()
	} else {
		a.mem.touchHot(a.hot)
		a.mem.touchNext(a.moving)
	}
	touched, found := time.Since(woke), a.mem.take()
	_, err = a.call("/ack"+words("?agent=", a.index, "&step=", step, "&us=", int(touched.Microseconds()), "&wrong=", found.pages, "&page=", found.first), 0)
	if err != nil {
		return err
	}
	// What it finds wrong in its work is told with the next step.
	a.mem.touchNext(a.cold)
	time.Sleep(a.work - time.Since(woke))
	return nil
}

// words puts texts and numbers together; package fmt would make the program a sixth
// larger.
func words(parts ...any) string {
	var b strings.Builder
	for _, p := range parts {
		switch p := p.(type) {
		case string:
			b.WriteString(p)
		case int:
			b.WriteString(strconv.Itoa(p))
		}
	}
	return b.String()
}

// call asks until there is an answer. A connection that did not live through a
// restore is made anew, and the same is asked again.
func (a *agent) call(path string, body int) ([]byte, error) {
	var err error
	for range maxAttempts {
		var answer []byte
		if answer, err = a.try(path, body); err == nil {
			return answer, nil
		}
		unix.Close(a.fd)
		a.fd = -1
		time.Sleep(againAfter)
	}
	return nil, err
}

func (a *agent) try(path string, body int) ([]byte, error) {
	if a.fd < 0 {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return nil, err
		}
		a.fd = fd
		if err := unix.Connect(fd, &a.server); err != nil {
			return nil, err
		}
	}
	q := append(a.buf[:0], "POST "+path+words(" HTTP/1.1\r\nHost: model\r\nContent-Length: ", body, "\r\n\r\n")...)
	q = append(q, make([]byte, body)...)
	for len(q) > 0 {
		n, err := unix.Write(a.fd, q)
		if err != nil && err != unix.EINTR {
			return nil, err
		}
		q = q[max(n, 0):]
	}
	return a.answer()
}

var errCut = errors.New("the answer is cut")

// answer reads one with a length.
func (a *agent) answer() ([]byte, error) {
	in := a.buf[:0]
	defer func() { a.buf = in[:0] }()
	need, at := -1, 0
	for need < 0 || len(in) < need {
		if len(in) == cap(in) {
			in = append(make([]byte, 0, 2*cap(in)), in...)
		}
		n, err := unix.Read(a.fd, in[len(in):cap(in)])
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n == 0 {
			return nil, errCut
		}
		in = in[:len(in)+n]
		if end := bytes.Index(in, []byte("\r\n\r\n")); need < 0 && end >= 0 {
			length, err := contentLength(in[:end])
			if err != nil {
				return nil, err
			}
			at = end + 4
			need = at + length
		}
		if need < 0 && len(in) > maxAnswer {
			return nil, errCut
		}
	}
	return in[at:need], nil
}

// contentLength reads the head of an answer that must be a 200.
func contentLength(head []byte) (int, error) {
	lines := strings.Split(string(head), "\r\n")
	if !strings.HasPrefix(lines[0], "HTTP/1.1 200 ") {
		return 0, errors.New("agent: the model says " + lines[0])
	}
	for _, l := range lines[1:] {
		name, value, _ := strings.Cut(l, ":")
		if !strings.EqualFold(name, "Content-Length") {
			continue
		}
		n, err := strconv.Atoi(strings.TrimSpace(value))
		if err != nil || n < 0 || n > maxAnswer {
			return 0, errCut
		}
		return n, nil
	}
	return 0, errCut
}
