package wait

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// auditEvery is how often the rules are looked at, beside the kernel's notices.
const auditEvery = 5 * time.Second

// errRules ends a session whose rules are not what they were.
var errRules = errors.New("the rules that copy headers were changed by another program")

// session is what packets are seen by: a socket, the rules that fill it, and a watch
// over the rules. One that fails is closed as a whole and another one opened.
type session struct {
	tap   *tap
	rules *rules
	guard *netlink.Conn
	fails chan error // a change of the rules that was not made; one is enough

	read atomic.Int64 // messages that were read
	told atomic.Int32 // so many more audits know of a loss that the socket told of

	audits   sync.Mutex // guards what follows
	handles  []uint64   // of the rules
	counted  int64      // what the rules had counted when they were looked at last
	forgiven int64      // of which these are known to be missing
}

// openSession opens one in the namespace of a path.
func openSession(c Config, ends []netip.AddrPort, guests []Sandbox, owned bool) (*session, error) {
	netns := 0
	if c.Netns != "" {
		f, err := os.Open(c.Netns)
		if err != nil {
			return nil, fmt.Errorf("open network namespace: %w", err)
		}
		defer f.Close()
		netns = int(f.Fd())
	}
	s := &session{fails: make(chan error, 1)}
	var err error
	if s.tap, err = openTap(c.Name, netns, c.Buffer); err != nil {
		return nil, err
	}
	if s.rules, err = openRules(c.Name, netns, owned); err == nil {
		err = s.fill(netns, ends, guests)
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// fill watches over the rules before there are any, so that no change is missed.
func (s *session) fill(netns int, ends []netip.AddrPort, guests []Sandbox) error {
	var err error
	if s.guard, err = netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: netns}); err != nil {
		return fmt.Errorf("open the notices of nftables: %w", err)
	}
	if err := s.guard.JoinGroup(unix.NFNLGRP_NFTABLES); err != nil {
		return fmt.Errorf("join the notices of nftables: %w", err)
	}
	if err := s.rules.setUp(s.tap.group, ends, guests); err != nil {
		return err
	}
	s.handles, _, err = s.rules.look()
	return err
}

func (s *session) close() error {
	var errs []error
	if s.rules != nil {
		errs = append(errs, s.rules.close())
	}
	if s.guard != nil {
		errs = append(errs, s.guard.Close())
	}
	return errors.Join(append(errs, s.tap.close())...)
}

// fail ends the session: the rules are not what they should be.
func (s *session) fail(err error) {
	select {
	case s.fails <- err:
	default:
	}
}

// run reads until the session fails or ctx ends, and returns why it failed.
func (s *session) run(ctx context.Context, w *Watcher) (Reason, error) {
	type end struct {
		why Reason
		err error
	}
	ends := make(chan end, 3) // of the three below, each of which ends with its socket or stop
	stop := make(chan struct{})
	go func() {
		ends <- end{Reader, s.tap.read(func(l logged) { s.read.Add(1); w.packet(l) }, func(e tapEvent) {
			if e == tapMissing {
				s.told.Store(3) // the one under way and the two that compare numbers from before and after
			}
			w.event(e)
		})}
	}()
	go func() { ends <- end{Rules, s.watch()} }()
	go func() { ends <- end{Rules, s.audit(stop, w.missing)} }()
	var first end
	left := 3
	select {
	case first = <-ends:
		left--
	case err := <-s.fails:
		first = end{Rules, err}
	case <-ctx.Done():
		first = end{Stopped, ctx.Err()}
	}
	close(stop)
	first.err = errors.Join(first.err, s.close())
	for ; left > 0; left-- {
		<-ends
	}
	return first.why, first.err
}

// watch reads the kernel's notices until one is of our table and not by us.
func (s *session) watch() error {
	for {
		msgs, err := s.guard.Receive()
		if err != nil {
			// Notices that are missing may have been of our table.
			return fmt.Errorf("read the notices of nftables: %w", err)
		}
		for _, m := range msgs {
			if s.rules.foreign(m) {
				return errRules
			}
		}
	}
}

// foreign says that a notice is of our table and of a change that others made.
func (r *rules) foreign(m netlink.Message) bool {
	const generic = 4
	if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || m.Header.PID == r.port || m.Header.Type&0xff == unix.NFT_MSG_NEWGEN {
		return false
	}
	if len(m.Data) < generic || m.Data[0] != byte(r.tab.Family) {
		return false
	}
	ad, err := netlink.NewAttributeDecoder(m.Data[generic:])
	if err != nil {
		return true
	}
	for ad.Next() {
		// The name of the table has this number in every kind of notice.
		if ad.Type() == unix.NFTA_TABLE_NAME {
			return ad.String() == r.tab.Name
		}
	}
	return ad.Err() != nil
}

// look returns the handles of all rules and what they counted.
func (r *rules) look() (handles []uint64, counted int64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range []string{chainAsks, chainAsked, chainAnswers, chainAnswered} {
		all, err := r.conn.GetRules(r.tab, &nftables.Chain{Table: r.tab, Name: name})
		if err != nil {
			return nil, 0, fmt.Errorf("read the rules of %s: %w", r.tab.Name, err)
		}
		for _, one := range all {
			handles = append(handles, one.Handle)
			for _, e := range one.Exprs {
				if c, ok := e.(*expr.Counter); ok {
					counted += int64(c.Packets)
				}
			}
		}
	}
	return handles, counted, nil
}

// audit compares the rules with what they were, and what they counted with what was
// read: a packet for whose copy the kernel had no memory is missing without a sign.
func (s *session) audit(stop <-chan struct{}, lost func()) error {
	tick := time.NewTicker(auditEvery)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return nil
		case <-tick.C:
		}
		if err := s.check(lost); err != nil {
			return err
		}
	}
}

// check is one audit.
func (s *session) check(lost func()) error {
	s.audits.Lock()
	defer s.audits.Unlock()
	handles, counted, err := s.rules.look()
	if err != nil {
		return err
	}
	if !slices.Equal(handles, s.handles) {
		return errRules
	}
	// What was counted the last time has been read by now.
	if missing := s.counted - s.read.Load(); missing > s.forgiven {
		s.forgiven = missing
		if s.told.Load() == 0 {
			lost()
		}
	}
	s.told.Store(max(0, s.told.Load()-1))
	s.counted = counted
	return nil
}
