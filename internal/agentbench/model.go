package agentbench

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

const (
	// maxQuestion bounds a question.
	maxQuestion = 1 << 20
	// questionSize and answerSize are what agents send and get: a prompt's news, a turn.
	questionSize = 16 << 10
	answerSize   = 8 << 10
	// finishers are the agents that check all their memory at once at the end.
	finishers = 2
	// maxFailures bounds the failures that are told in words.
	maxFailures = 20
)

// wakeup is one answer that an agent has taken: from when it was there until the agent
// had touched its working set and said so.
type wakeup struct {
	at    time.Time
	took  time.Duration
	touch time.Duration // of it, in the guest
}

// agent is what the model knows of one.
type agent struct {
	sandbox string
	step    int           // that it asked last; -1 is none
	open    chan struct{} // closed when the answer may be sent
	acked   chan struct{} // closed when it was taken
	there   time.Time     // since when there is an answer
	last    bool          // the answer is to check everything
	checked bool          // it has
	ended   bool          // its sandbox has
}

// model is the stub server that agents ask, and what it sees of them.
type model struct {
	scale    func(time.Duration) time.Duration
	seed     uint64
	patience time.Duration                                   // until an agent says that it is awake
	wake     func(ctx context.Context, sandbox string) error // nil: agents are not to be woken

	life   context.Context
	finish chan struct{} // closed when no more is measured
	turns  chan struct{} // of those that check everything
	all    sync.WaitGroup

	mu       sync.Mutex
	agents   []*agent
	wakes    []wakeup
	wrong    int // pages
	failures map[string]int
	told     []string
}

func newModel(life context.Context, c Config) *model {
	m := &model{scale: c.scaled, seed: c.Seed, patience: c.Patience, life: life, finish: make(chan struct{}), turns: make(chan struct{}, finishers), failures: map[string]int{}}
	for range c.Agents {
		m.agents = append(m.agents, &agent{step: -1})
	}
	return m
}

// fail counts a failure of a kind.
func (m *model) fail(kind, format string, args ...any) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.failures[kind]++
	if len(m.told) < maxFailures {
		m.told = append(m.told, kind+": "+fmt.Sprintf(format, args...))
	}
}

// ServeHTTP implements http.Handler.
func (m *model) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	i, err := strconv.Atoi(q.Get("agent"))
	step, err2 := strconv.Atoi(q.Get("step"))
	if err != nil || err2 != nil || i < 0 || i >= len(m.agents) || step < 0 {
		http.Error(w, "want agent and step", http.StatusBadRequest)
		return
	}
	if _, err := io.Copy(io.Discard, io.LimitReader(r.Body, maxQuestion)); err != nil {
		return
	}
	switch r.URL.Path {
	case "/ask":
		m.ask(r.Context(), w, i, step)
	case "/ack":
		number := func(name string) int { n, _ := strconv.Atoi(q.Get(name)); return max(n, 0) }
		m.ack(i, step, time.Duration(number("us"))*time.Microsecond, number("wrong"), number("page"))
		answer(w, "", 0)
	default:
		http.NotFound(w, r)
	}
}

func answer(w http.ResponseWriter, word string, size int) {
	text := word + "\n" + strings.Repeat("x", size)
	w.Header().Set("Content-Length", strconv.Itoa(len(text)))
	io.WriteString(w, text)
}

// ask answers when the wait of that step is over. An agent that asks the same again,
// as its connection was cut, has the same answer.
func (m *model) ask(ctx context.Context, w http.ResponseWriter, i, step int) {
	m.mu.Lock()
	a := m.agents[i]
	if step > a.step {
		open, acked := make(chan struct{}), make(chan struct{})
		a.step, a.open, a.acked = step, open, acked
		m.all.Go(func() { m.serve(i, step, a, open, acked) }) // ends with life at the latest
	}
	open, old := a.open, step < a.step
	m.mu.Unlock()
	if old {
		http.Error(w, "that step is over", http.StatusConflict)
		return
	}
	select {
	case <-open:
		m.mu.Lock()
		last := a.last
		m.mu.Unlock()
		answer(w, map[bool]string{true: "finish", false: "go"}[last], answerSize)
	case <-ctx.Done():
	case <-m.life.Done():
		panic(http.ErrAbortHandler) // an answer would have the agent go on
	}
}

// serve has one answer ready after its wait, wakes who has to be woken for it, and waits
// until it was taken.
func (m *model) serve(i, step int, a *agent, open, acked chan struct{}) {
	src := rand.New(rand.NewPCG(m.seed, uint64(i)<<32|uint64(step)))
	wait := m.scale(minWait + time.Duration(src.Int64N(int64(maxWait-minWait))))
	select {
	case <-time.After(wait):
	case <-m.finish:
		select {
		case m.turns <- struct{}{}:
			defer func() { <-m.turns }()
		case <-m.life.Done():
			return
		}
	case <-m.life.Done():
		return
	}
	m.mu.Lock()
	a.there = time.Now()
	select {
	case <-m.finish:
		a.last = true
	default:
	}
	sandbox := a.sandbox
	m.mu.Unlock()
	if m.wake != nil {
		if err := m.wake(m.life, sandbox); err != nil && m.life.Err() == nil {
			m.fail("not woken", "agent %d: %v", i, err)
		}
	}
	close(open)
	select {
	case <-acked:
	case <-m.life.Done():
	case <-time.After(m.patience):
		m.mu.Lock()
		ended := a.ended
		m.mu.Unlock()
		if !ended {
			m.fail("no sign of life", "agent %d, step %d, for %v", i, step, m.patience)
		}
	}
}

// ack takes an agent's word that it is awake.
func (m *model) ack(i, step int, touch time.Duration, wrong, page int) {
	now := time.Now()
	m.mu.Lock()
	a := m.agents[i]
	again := step != a.step || a.acked == nil
	if !again {
		select {
		case <-a.acked:
			again = true // its answer was cut
		default:
			close(a.acked)
			if a.last {
				a.checked = true
			} else {
				m.wakes = append(m.wakes, wakeup{now, now.Sub(a.there), touch})
			}
			m.wrong += wrong
		}
	}
	m.mu.Unlock()
	if !again && wrong > 0 {
		m.fail("wrong bytes", "agent %d, step %d: %d pages, the first is %d", i, step, wrong, page)
	}
}

// each reports whether something holds for all agents whose sandboxes live.
func (m *model) each(holds func(*agent) bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, a := range m.agents {
		if !a.ended && !holds(a) {
			return false
		}
	}
	return true
}
