package proxy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
)

// Exchange is one HTTP request with its answer.
type Exchange struct {
	Method, Path string
	Status       int
	Request      []byte // body
	Answer       []byte // body
}

// Record makes the proxy remember what passes on connections that are made from
// now on, and forget what it remembered before.
func (p *Proxy) Record() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.record, p.tapes = true, nil
}

// Exchanges ends Record and returns what has passed since, one connection after
// another. An answer that was cut off is returned as far as it came.
func (p *Proxy) Exchanges() ([]Exchange, error) {
	p.mu.Lock()
	tapes := p.tapes
	p.record, p.tapes = false, nil
	p.mu.Unlock()
	var all []Exchange
	for _, t := range tapes {
		es, err := t.exchanges()
		if err != nil {
			return nil, err
		}
		all = append(all, es...)
	}
	return all, nil
}

// tape is what passed on one connection.
type tape struct {
	mu       sync.Mutex // guards what follows
	requests bytes.Buffer
	answers  bytes.Buffer
}

// tape returns one for a new connection, nil when nothing is recorded.
func (p *Proxy) tape() *tape {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.record {
		return nil
	}
	t := new(tape)
	p.tapes = append(p.tapes, t)
	return t
}

func (t *tape) up() io.Writer {
	if t == nil {
		return io.Discard
	}
	return lockedWriter{&t.mu, &t.requests}
}

func (t *tape) down() io.Writer {
	if t == nil {
		return io.Discard
	}
	return lockedWriter{&t.mu, &t.answers}
}

type lockedWriter struct {
	mu *sync.Mutex
	w  io.Writer
}

func (w lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.w.Write(p)
}

func (t *tape) exchanges() ([]Exchange, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	requests := bufio.NewReader(bytes.NewReader(t.requests.Bytes()))
	answers := bufio.NewReader(bytes.NewReader(t.answers.Bytes()))
	var es []Exchange
	for {
		q, err := http.ReadRequest(requests)
		if errors.Is(err, io.EOF) {
			return es, nil
		}
		if err != nil {
			return nil, fmt.Errorf("recorded request: %w", err)
		}
		e := Exchange{Method: q.Method, Path: q.URL.Path}
		if e.Request, err = body(q.Body); err != nil {
			return nil, fmt.Errorf("recorded request: %w", err)
		}
		a, err := http.ReadResponse(answers, q)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return append(es, e), nil
		}
		if err != nil {
			return nil, fmt.Errorf("recorded answer: %w", err)
		}
		e.Status = a.StatusCode
		if e.Answer, err = body(a.Body); err != nil {
			return nil, fmt.Errorf("recorded answer: %w", err)
		}
		es = append(es, e)
	}
}

// body reads a body, as much as there is of it.
func body(r io.ReadCloser) ([]byte, error) {
	defer r.Close()
	p, err := io.ReadAll(r)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = nil
	}
	return p, err
}
