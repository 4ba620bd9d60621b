package wait

import "time"

// maxConns bounds the connections of one sandbox that are known. One that is not
// known is of no harm: its data resumes the sandbox as well.
const maxConns = 64

// recent is how far behind the newest data a packet may be and still be a repetition:
// what a guest's receive buffer holds at most. What is further away is of another
// connection of the same ports.
const recent = 4 << 20

// maxHold is how long a wait is looked at again at most, where something kept it from
// being a pause.
const maxHold = time.Second

// conn is a connection between a guest and an endpoint.
type conn struct {
	asked    uint32 // end of what the guest sent
	acked    uint32 // of which the endpoint has this
	answered uint32 // end of what the endpoint sent
	began    bool   // asked is known
	heard    bool   // answered is known
	gap      bool   // something before answered was not seen: nothing is a repetition
	full     bool   // the endpoint takes no more now
	waiting  bool   // the guest sent data after all that the endpoint sent
	closed   bool   // by the endpoint
	at       time.Time
}

// settled says that what the guest sent has arrived and more could follow, so that a
// guest that sends no more has said everything.
func (c *conn) settled() bool { return c.closed || c.asked == c.acked && !c.full }

type phase int

const (
	running phase = iota
	pausing       // Pause was called and has not returned
	paused
	resuming // Resume was called and has not returned
)

type action int

const (
	rest     action = iota // until a time, or for ever
	doSample               // ask how much processor was used
	doPause
	doResume
)

// machine decides for one sandbox. It has no clock and no goroutine; its caller has a
// lock around it.
type machine struct {
	quiet, longest time.Duration
	share          float64

	conns map[flow]*conn
	blind bool // packets are not seen
	uses  int  // who needs it running

	phase  phase
	wake   *Wake     // it is to run, though it is pausing or paused
	at     time.Time // when it was paused
	retry  time.Time // when Resume is called again
	failed int       // how often Resume failed

	news  time.Time // when data was seen last, or it began to run
	mark  sample    // of the processor, since news
	due   time.Time // when the second sample is taken
	tries int       // how often this wait was no pause
	hasty int       // how often it was paused and then went on asking
}

type sample struct {
	at  time.Time
	cpu time.Duration
}

// facts are what a sample brings.
type facts struct {
	cpu time.Duration
	err error
}

func newMachine(c Config) machine {
	return machine{quiet: c.Quiet, longest: c.Longest, share: c.Share, conns: map[flow]*conn{}}
}

// toRun records that the sandbox is to run if it does not.
func (m *machine) toRun(why Reason, now time.Time) bool {
	if m.phase == running || m.phase == resuming || m.wake != nil {
		return false
	}
	m.wake = &Wake{why, now}
	return true
}

// packet takes a packet and says whether next has another answer sooner than before.
func (m *machine) packet(p packet, now time.Time) bool {
	if m.blind {
		return false
	}
	switch {
	case p.icmp:
		// One that runs finds out by itself whether the connection stands.
		woken := m.toRun(ICMP, now)
		if c := m.conns[p.flow]; c != nil && woken {
			c.waiting = false
		}
		return woken
	case p.rst:
		delete(m.conns, p.flow)
		return m.toRun(Reset, now)
	case p.asks:
		return m.fromGuest(p, now)
	}
	return m.fromModel(p, now)
}

// conn returns the connection of a packet, and forgets the one that was silent for
// the longest time if there are too many.
func (m *machine) conn(p packet, now time.Time) *conn {
	c := m.conns[p.flow]
	if c == nil {
		if len(m.conns) >= maxConns {
			var last flow
			var lastConn *conn
			for f, o := range m.conns {
				if lastConn == nil || o.at.Before(lastConn.at) {
					last, lastConn = f, o
				}
			}
			delete(m.conns, last)
		}
		c = &conn{}
		m.conns[p.flow] = c
	}
	c.at = now
	return c
}

// old says that a packet brings nothing after end.
func old(p packet, end uint32) bool {
	behind := int32(end - p.end32())
	return behind >= 0 && behind < recent
}

func (m *machine) fromGuest(p packet, now time.Time) bool {
	c := m.conn(p, now)
	if p.syn && !(c.began && c.asked == p.end32()) {
		*c = conn{at: now} // its numbers are others, however near
	}
	kick := false
	if p.acks && !p.syn {
		switch ahead := int32(p.ack - c.answered); {
		case !c.heard:
			c.answered, c.heard = p.ack, true
		case ahead > 0:
			// It has what was not seen here.
			c.answered, c.gap, c.waiting = p.ack, false, false
			m.news = now
			kick = m.toRun(Answer, now)
		case ahead == 0:
			c.gap = false
		}
	}
	if p.size == 0 || c.began && old(p, c.asked) {
		return kick // an acknowledgement, a sign of life or a repetition
	}
	if !c.began {
		c.acked = p.seq
	}
	c.asked, c.began = p.end32(), true
	data := p.size
	if p.syn {
		data--
	}
	if p.fin {
		data--
	}
	return m.asked(c, data > 0, now) || kick
}

// asked notes that the guest said something new.
func (m *machine) asked(c *conn, data bool, now time.Time) bool {
	m.news = now
	first := data && !c.waiting && !m.waits()
	if data {
		c.waiting = true
	}
	if first {
		m.tries = 0
	}
	if m.phase == pausing || m.phase == paused {
		m.hasty++
	}
	return m.toRun(Asks, now) || first
}

func (m *machine) fromModel(p packet, now time.Time) bool {
	c := m.conn(p, now)
	if p.syn && !(c.heard && c.answered == p.end32()) {
		*c = conn{at: now, asked: c.asked, acked: c.acked, began: c.began && c.asked == p.ack}
	}
	kick := false
	fresh := p.size > 0 && (!c.heard || c.gap || !old(p, c.answered))
	if p.acks {
		switch ahead := int32(p.ack - c.asked); {
		case !c.began:
			c.asked, c.acked, c.began = p.ack, p.ack, true
		case ahead > 0:
			// It has what was not seen here, and may answer it in the same packet.
			c.asked, c.acked = p.ack, p.ack
			if !fresh {
				kick = m.asked(c, true, now)
			}
		case int32(p.ack-c.acked) > 0:
			c.acked = p.ack
		}
		c.full = p.window == 0
	}
	if p.fin {
		c.closed, c.waiting = true, false
	}
	if !fresh {
		if p.fin {
			kick = m.toRun(Closed, now) || kick
		}
		return kick
	}
	// What was missed before it may still come, and is no repetition then.
	c.gap = c.gap || !c.heard || p.seq != c.answered && int32(p.seq-c.answered) > 0
	if !c.heard || !old(p, c.answered) {
		c.answered, c.heard = p.end32(), true
	}
	c.waiting = false
	m.news, m.hasty = now, 0
	why := Answer
	if p.fin && p.size == 1 {
		why = Closed
	}
	return m.toRun(why, now) || kick
}

// waits says that a request is without an answer.
func (m *machine) waits() bool {
	for _, c := range m.conns {
		if c.waiting {
			return true
		}
	}
	return false
}

// settled says that the guest has nothing more to send of what it has begun.
// Connections of which nothing was heard as long as a pause may last are gone.
func (m *machine) settled(now time.Time) bool {
	all := true
	for f, c := range m.conns {
		switch {
		case now.Sub(c.at) > m.longest:
			delete(m.conns, f)
		case !c.settled():
			all = false
		}
	}
	return all
}

// doubt forgets all that is known: nothing waits any more, and what is paused is to
// run.
func (m *machine) doubt(why Reason, now time.Time) bool {
	clear(m.conns)
	return m.toRun(why, now)
}

// next says what is to be done now, or when to ask again; the zero time is never.
func (m *machine) next(now time.Time) (action, time.Time) {
	switch m.phase {
	case paused:
		if m.wake == nil {
			if end := m.at.Add(m.longest); now.Before(end) {
				return rest, end
			}
			m.doubt(Longest, now)
		}
		if now.Before(m.retry) {
			return rest, m.retry
		}
		m.phase = resuming
		return doResume, time.Time{}
	case running:
		if m.blind || m.uses > 0 || !m.waits() {
			return rest, time.Time{}
		}
		at := m.due
		if m.stale() {
			at = m.first()
		}
		if now.Before(at) {
			return rest, at
		}
		return doSample, time.Time{}
	}
	return rest, time.Time{}
}

// stale says that the first sample is missing, or there was news since.
func (m *machine) stale() bool { return m.mark.at.IsZero() || m.mark.at.Before(m.news) }

// first is when the first sample is taken: half of the quiet time before a pause.
func (m *machine) first() time.Time {
	return m.news.Add(m.held(m.hasty) - m.quiet/2)
}

// held is the quiet time, doubled n times.
func (m *machine) held(n int) time.Duration { return min(m.quiet<<min(n, 10), max(maxHold, m.quiet)) }

// sampled takes what a sample brought and says whether to pause.
func (m *machine) sampled(f facts, now time.Time) action {
	if m.phase != running || m.blind || m.uses > 0 || !m.waits() {
		return rest
	}
	if f.err != nil {
		m.mark = sample{}
		m.tries++
		m.news = now.Add(m.held(m.tries) - m.quiet) // not asked again at once
		return rest
	}
	fresh := sample{now, f.cpu}
	if m.stale() {
		if !now.Before(m.first()) {
			m.mark, m.due = fresh, now.Add(m.quiet/2)
		}
		return rest
	}
	if now.Before(m.due) {
		return rest
	}
	used, window := f.cpu-m.mark.cpu, now.Sub(m.mark.at)
	settled := m.settled(now)
	if !m.waits() {
		return rest
	}
	if used < 0 || float64(used) > m.share*float64(window) || !settled {
		m.tries++
		m.mark, m.due = fresh, now.Add(m.held(m.tries-1))
		return rest
	}
	m.phase = pausing
	return doPause
}

// didPause takes what became of a pause.
func (m *machine) didPause(err error, now time.Time) {
	if err == nil {
		m.phase, m.at, m.retry, m.failed = paused, now, time.Time{}, 0
		return
	}
	m.phase, m.wake = running, nil
	m.tries++
	m.mark, m.news = sample{}, now.Add(m.held(m.tries)-m.quiet)
}

// didResume takes what became of a resumption. One that failed is tried again: the
// sandbox must not stay paused.
func (m *machine) didResume(err error, now time.Time) {
	if err != nil {
		m.failed++
		m.phase, m.retry = paused, now.Add(min(10*time.Millisecond<<min(m.failed, 7), maxHold))
		return
	}
	m.phase, m.wake, m.mark, m.news, m.tries = running, nil, sample{}, now, 0
}
