package wait

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"
)

// A script drives a machine by steps, with a clock that stands in between.
type script struct {
	t   *testing.T
	m   machine
	now time.Time
	cpu time.Duration
	f   facts
}

func newScript(t *testing.T) *script {
	s := &script{t: t, m: newMachine(Config{}.withDefaults()), now: time.Unix(1000, 0)}
	return s
}

var testEnd = netip.MustParseAddrPort("198.51.100.2:80")

// Connections of the tests.
var (
	flowA = flow{40000, testEnd}
	flowB = flow{40001, testEnd}
)

// ask is a packet of the guest: its data lies at seq, and it has the model's up to ack.
func ask(f flow, seq, size, ack uint32) packet {
	return packet{flow: f, asks: true, seq: seq, size: size, ack: ack, acks: true, window: 500}
}

// answer is one of the model.
func answer(f flow, seq, size, ack uint32) packet {
	return packet{flow: f, seq: seq, size: size, ack: ack, acks: true, window: 500}
}

func (s *script) packets(all ...packet) *script {
	s.t.Helper()
	for _, p := range all {
		s.m.packet(p, s.now)
	}
	return s
}

// pass lets time pass and does what the machine says, but pauses and resumes nothing:
// it returns the first that it is told to.
func (s *script) pass(d time.Duration) action {
	s.t.Helper()
	end := s.now.Add(d)
	for range 10000 {
		act, at := s.m.next(s.now)
		switch act {
		case doSample:
			f := s.f
			f.cpu = s.cpu
			if s.m.sampled(f, s.now) == doPause {
				return doPause
			}
			continue
		case doResume:
			return doResume
		}
		if at.IsZero() || at.After(end) {
			s.now = end
			return rest
		}
		s.now = at
	}
	s.t.Fatal("the machine never rests")
	return rest
}

// pauses passes at most d and pauses.
func (s *script) pauses(d time.Duration) *script {
	s.t.Helper()
	if got := s.pass(d); got != doPause {
		s.t.Fatalf("action %d, want a pause", got)
	}
	s.m.didPause(nil, s.now)
	return s
}

func (s *script) rests(d time.Duration) *script {
	s.t.Helper()
	if got := s.pass(d); got != rest {
		s.t.Fatalf("action %d, want none", got)
	}
	return s
}

// resumes wants a resumption at once.
func (s *script) resumes(why Reason) *script {
	s.t.Helper()
	if got := s.pass(0); got != doResume {
		s.t.Fatalf("action %d, want a resumption", got)
	}
	if s.m.wake.Why != why {
		s.t.Fatalf("resumed for %s, want %s", s.m.wake.Why, why)
	}
	s.m.didResume(nil, s.now)
	return s
}

// asked is a script whose guest has asked on a connection, and was acknowledged.
func asked(t *testing.T) *script {
	s := newScript(t)
	return s.packets(ask(flowA, 100, 50, 900), answer(flowA, 900, 0, 150))
}

func TestWhenToPause(t *testing.T) {
	const quiet = 50 * time.Millisecond
	tests := map[string]func(s *script){
		"a request without an answer is a pause after the quiet time": func(s *script) {
			start := s.now
			s.pauses(quiet)
			if got := s.now.Sub(start); got != quiet {
				s.t.Errorf("after %s", got)
			}
		},
		"an answer in time is none": func(s *script) { s.packets(answer(flowA, 900, 10, 150)).rests(time.Hour) },
		"more of the request begins the time anew": func(s *script) {
			s.rests(40*time.Millisecond).packets(ask(flowA, 150, 10, 900), answer(flowA, 900, 0, 160)).rests(49 * time.Millisecond).pauses(time.Millisecond)
		},
		"a repeated request does not": func(s *script) {
			s.rests(40 * time.Millisecond).packets(ask(flowA, 100, 50, 900)).pauses(10 * time.Millisecond)
		},
		"signs of life of both sides do not": func(s *script) {
			s.rests(40*time.Millisecond).packets(ask(flowA, 149, 0, 900), ask(flowA, 149, 1, 900), answer(flowA, 899, 0, 150), answer(flowA, 899, 1, 150)).pauses(10 * time.Millisecond)
		},
		"what has not arrived is no request yet": func(s *script) {
			s.packets(ask(flowA, 150, 10, 900)).rests(time.Minute).packets(answer(flowA, 900, 0, 160)).pauses(maxHold)
		},
		"nor is one that the model does not take all of": func(s *script) {
			p := answer(flowA, 900, 0, 150)
			p.window = 0
			s.packets(p).rests(time.Minute).packets(answer(flowA, 900, 0, 150)).pauses(maxHold)
		},
		"a second connection is no hindrance when it is idle": func(s *script) {
			s.packets(ask(flowB, 5, 5, 7), answer(flowB, 7, 10, 10)).pauses(quiet)
		},
		"nor is one that is closed without an acknowledgement": func(s *script) {
			p := answer(flowB, 7, 1, 5)
			p.fin = true
			s.packets(ask(flowB, 5, 5, 7), p).pauses(quiet)
		},
		"one that nothing is heard of is forgotten": func(s *script) {
			s.packets(ask(flowB, 5, 5, 7)).rests(9 * time.Minute)
			s.packets(answer(flowA, 900, 0, 150)).pauses(2 * time.Minute)
		},
		"even the one that waits": func(s *script) {
			s.f.err = errors.New("gone")
			s.rests(11 * time.Minute)
			s.f.err = nil
			s.rests(time.Hour)
		},
		"a connection that is being made is one": func(s *script) {
			p := ask(flowB, 5, 1, 0)
			p.syn, p.acks = true, false
			s.packets(p).rests(time.Minute)
		},
		"a sandbox is not paused whose use of the processor is not known": func(s *script) {
			s.f.err = errors.New("gone")
			s.rests(time.Minute)
			s.f.err = nil
			s.pauses(2 * maxHold)
		},
		"nor one that is needed": func(s *script) {
			s.m.uses++
			s.rests(time.Minute)
			s.m.uses--
			s.pauses(maxHold)
		},
		"nor one whose packets are not seen": func(s *script) { s.m.blind = true; s.rests(time.Minute) },
		"a pause that failed is tried again later": func(s *script) {
			if s.pass(quiet) != doPause {
				s.t.Fatal("no pause")
			}
			s.m.didPause(errors.New("a read of the image"), s.now)
			s.rests(quiet).pauses(maxHold)
		},
		"pipelined: the second request waits after the first answer": func(s *script) {
			s.packets(answer(flowA, 900, 10, 150), ask(flowA, 150, 20, 910), answer(flowA, 910, 0, 170)).pauses(quiet)
		},
		"a half-closed connection still waits": func(s *script) {
			p := ask(flowA, 150, 1, 900)
			p.fin = true
			s.packets(p, answer(flowA, 900, 0, 151)).pauses(quiet)
		},
		"a request of which only the acknowledgement was seen": func(s *script) {
			s.packets(answer(flowA, 900, 10, 150)).rests(time.Second).packets(answer(flowA, 910, 0, 400)).pauses(quiet)
		},
		"an answer of which only the guest's acknowledgement was seen": func(s *script) {
			s.packets(ask(flowA, 150, 0, 950)).rests(time.Hour)
		},
		"a reset connection waits no more": func(s *script) {
			s.packets(packet{flow: flowA, rst: true}).rests(time.Hour)
		},
		"the ports of an old connection are used again": func(s *script) {
			syn, synAck := ask(flowA, 50, 1, 0), answer(flowA, 80, 1, 51)
			syn.syn, syn.acks, synAck.syn = true, false, true
			s.packets(syn, synAck).rests(time.Minute)
			s.packets(ask(flowA, 51, 10, 81), answer(flowA, 81, 0, 61)).pauses(quiet)
		},
		"numbers go around": func(s *script) {
			s.packets(ask(flowB, 0xfffffff0, 0x20, 0xfffffff8), answer(flowB, 0xfffffff8, 0, 0x10), answer(flowB, 0xfffffff8, 0x10, 0x10))
			s.packets(ask(flowB, 0x10, 0x10, 8), answer(flowB, 8, 0, 0x20)).pauses(quiet).packets(answer(flowB, 8, 1, 0x20)).resumes(Answer)
		},
	}
	for name, fn := range tests {
		t.Run(name, func(t *testing.T) { fn(asked(t)) })
	}
	t.Run("a guest that works is not paused", func(t *testing.T) {
		s := asked(t)
		for range 100 {
			s.cpu += 10 * time.Millisecond
			s.rests(30 * time.Millisecond)
		}
		s.pauses(2 * maxHold)
	})
}

func TestWhenToResume(t *testing.T) {
	fin := func(p packet) packet { p.fin = true; return p }
	tests := map[string]struct {
		p   packet
		why Reason
	}{
		"the answer":                         {answer(flowA, 900, 1, 150), Answer},
		"the answer after one that was lost": {answer(flowA, 2000, 100, 150), Answer},
		"an answer that is far away, of ports that were used again": {answer(flowA, 1<<31, 100, 150), Answer},
		"the answer of a connection that is not known":              {answer(flowB, 5, 1, 8), Answer},
		"the end":                                   {fin(answer(flowA, 900, 1, 150)), Closed},
		"the end of another connection":             {fin(answer(flowB, 900, 1, 150)), Closed},
		"a reset":                                   {packet{flow: flowA, rst: true}, Reset},
		"a reset by the guest's own stack":          {packet{flow: flowA, rst: true, asks: true}, Reset},
		"an error":                                  {packet{flow: flowA, icmp: true}, ICMP},
		"an error about another connection":         {packet{flow: flowB, icmp: true}, ICMP},
		"more of the request":                       {ask(flowA, 150, 5, 900), Asks},
		"more of it that only the model saw":        {answer(flowA, 900, 0, 160), Asks},
		"an answer to more of it that was not seen": {answer(flowA, 900, 10, 400), Answer},
		"an answer that only the guest has":         {ask(flowA, 150, 0, 950), Answer},
		"a connection that is being made":           {packet{flow: flowB, asks: true, syn: true, size: 1}, Asks},
		"the answer to a connection being made":     {packet{flow: flowB, syn: true, size: 1, acks: true, ack: 4}, Answer},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			asked(t).pauses(time.Second).packets(tt.p).resumes(tt.why).rests(49 * time.Millisecond)
		})
		t.Run(name+", while it is being paused", func(t *testing.T) {
			s := asked(t)
			if s.pass(time.Second) != doPause {
				t.Fatal("no pause")
			}
			s.packets(tt.p)
			s.m.didPause(nil, s.now)
			s.resumes(tt.why)
		})
	}
	for name, p := range map[string]packet{
		"a repeated request":              ask(flowA, 100, 50, 900),
		"a repeated part of it":           ask(flowA, 120, 10, 900),
		"the guest's sign of life":        ask(flowA, 149, 1, 900),
		"the model's":                     answer(flowA, 899, 1, 150),
		"an acknowledgement":              answer(flowA, 900, 0, 150),
		"a repetition of an older answer": answer(flowA, 800, 100, 150),
	} {
		t.Run(name+" is no reason", func(t *testing.T) {
			asked(t).pauses(time.Second).packets(p).rests(9 * time.Minute)
		})
	}
}

func TestTheLongestPause(t *testing.T) {
	s := asked(t).pauses(time.Second)
	s.rests(10*time.Minute - 1)
	s.pass(1)
	s.m.phase = paused
	s.resumes(Longest)
	// The same wait is no pause again.
	s.rests(time.Hour)
}

func TestAResumptionThatFailsIsTriedAgain(t *testing.T) {
	s := asked(t).pauses(time.Second).packets(answer(flowA, 900, 1, 150))
	for range 20 {
		if got := s.pass(maxHold); got != doResume {
			t.Fatalf("action %d", got)
		}
		s.m.didResume(errors.New("no answer"), s.now)
	}
	if s.pass(maxHold) != doResume {
		t.Fatal("not tried again")
	}
	s.m.didResume(nil, s.now)
	s.rests(time.Hour)
}

func TestAHoleIsNoRepetition(t *testing.T) {
	s := asked(t)
	// The first part of the answer is late; the guest has nothing of it yet.
	s.packets(answer(flowA, 1000, 100, 150), ask(flowB, 1, 9, 1), answer(flowB, 1, 0, 10))
	s.pauses(time.Second).packets(answer(flowA, 900, 100, 150)).resumes(Answer)
}

func TestOtherConnectionsWaitOn(t *testing.T) {
	s := asked(t).packets(ask(flowB, 1, 9, 1), answer(flowB, 1, 0, 10)).pauses(time.Second)
	s.packets(answer(flowB, 1, 5, 10)).resumes(Answer).rests(49 * time.Millisecond).pauses(time.Millisecond)
	s.packets(answer(flowA, 900, 5, 150)).resumes(Answer).rests(time.Hour)
}

func TestAGuestThatAsksInPiecesIsPausedLessAndLess(t *testing.T) {
	s, seq, n := asked(t), uint32(150), 0
	for end := s.now.Add(10 * time.Second); s.now.Before(end); {
		if s.pass(200*time.Millisecond) == doPause {
			n++
			s.m.didPause(nil, s.now)
		}
		s.packets(ask(flowA, seq, 1, 900), answer(flowA, 900, 0, seq+1))
		seq++
		if s.m.phase == paused {
			s.resumes(Asks)
		}
	}
	if n > 5 {
		t.Errorf("%d pauses", n)
	}
}

// TestAnyPackets sends any packets: the machine keeps to its bounds, pauses only what
// waits, and a paused one is resumed by every packet of the model with data that was
// not there before.
func TestAnyPackets(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	s := newScript(t)
	for range 50_000 {
		p := packet{
			flow: flow{uint16(r.IntN(200)), testEnd}, asks: r.IntN(2) == 0, seq: uint32(r.IntN(400)) - 200, ack: uint32(r.IntN(400)) - 200,
			size: uint32(r.IntN(3)), window: uint16(r.IntN(3)), syn: r.IntN(9) == 0, fin: r.IntN(9) == 0, rst: r.IntN(30) == 0, acks: r.IntN(5) != 0,
		}
		wasPaused, c := s.m.phase == paused && s.m.wake == nil, s.m.conns[p.flow]
		fresh := c == nil || int32(p.end32()-c.answered) > 0
		s.packets(p)
		if wasPaused && !p.asks && p.size > 0 && fresh && s.m.wake == nil {
			t.Fatalf("%+v did not wake", p)
		}
		if len(s.m.conns) > maxConns {
			t.Fatalf("%d connections", len(s.m.conns))
		}
		switch s.pass(time.Duration(r.IntN(40)) * time.Millisecond) {
		case doPause:
			if !s.m.waits() {
				t.Fatal("paused without a wait")
			}
			s.m.didPause(nil, s.now)
		case doResume:
			s.m.didResume(nil, s.now)
		}
	}
}
