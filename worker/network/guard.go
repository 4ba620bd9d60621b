package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// guard watches a table that others can change, on kernels that let nobody own one
// for good: a firewall that starts anew and flushes every rule would leave guests
// with the whole network. It tells of each change that is not ours.
type guard struct {
	conn  *netlink.Conn
	table string
	own   uint32 // the port of the socket that makes our changes
}

func newGuard(t *table) (*guard, error) {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("watch nftables: %w", err)
	}
	// Losing notes is told as an error, after which everything is put in order.
	if err := errors.Join(c.JoinGroup(unix.NFNLGRP_NFTABLES), c.SetReadBuffer(socketBuffer)); err != nil {
		c.Close()
		return nil, fmt.Errorf("watch nftables: %w", err)
	}
	own, err := portOf(t.sock)
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("watch nftables: %w", err)
	}
	return &guard{conn: c, table: t.tab.Name, own: own}, nil
}

// portOf is what the kernel calls a socket in messages about what it asked for.
func portOf(c *netlink.Conn) (port uint32, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	controlErr := raw.Control(func(fd uintptr) {
		var a unix.Sockaddr
		if a, err = unix.Getsockname(int(fd)); err == nil {
			port = a.(*unix.SockaddrNetlink).Pid
		}
	})
	return port, errors.Join(err, controlErr)
}

// run calls changed until the guard is closed: at once, and, since a change is told in
// many messages and another may have come meanwhile, again when it was quiet for a
// moment.
func (g *guard) run(changed func()) {
	told := false // something came since changed was called
	for {
		var wait time.Time
		if told {
			wait = time.Now().Add(20 * time.Millisecond)
		}
		if g.conn.SetReadDeadline(wait) != nil {
			return
		}
		messages, err := g.conn.Receive()
		lost := errors.Is(err, unix.ENOBUFS)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			told = false
			changed()
		case err != nil && !lost:
			return
		case lost || slices.ContainsFunc(messages, g.concerns):
			if !told {
				changed()
			}
			told = true
		}
	}
}

// concerns reports whether a message tells of a change of our table by somebody
// else. In every kind of message the table's name is the attribute 1.
func (g *guard) concerns(m netlink.Message) bool {
	if m.Header.PID == g.own || m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || m.Header.Type&0xff == unix.NFT_MSG_NEWGEN || len(m.Data) < 4 {
		return false
	}
	ad, err := netlink.NewAttributeDecoder(m.Data[4:])
	if err != nil {
		return false
	}
	ad.ByteOrder = binary.BigEndian
	for ad.Next() {
		if ad.Type() == unix.NFTA_TABLE_NAME {
			return ad.String() == g.table
		}
	}
	return false
}

// repair puts the table in order after somebody changed it. The maps are emptied and
// the chains that all share made first: then nothing passes, whatever is left of the
// sandboxes' own chains, which may be there without their rules.
func (n *Network) repair() {
	n.cfg.Log.Warn("another program changed the rules of sandboxes; they are put in force again", "table", n.table.tab.Name)
	for attempt := range 10 {
		time.Sleep(time.Duration(attempt) * 100 * time.Millisecond)
		err := n.rebuild()
		if err == nil {
			return
		}
		n.cfg.Log.Error("rules of sandboxes not put in force again", "error", err)
	}
}

func (n *Network) rebuild() error {
	err := n.table.do(func(c *nftables.Conn) {
		c.AddTable(n.table.tab)
		for _, name := range []string{mapOut, mapIn, mapDeny} {
			set := n.table.verdicts(name)
			c.AddSet(set, nil)
			c.FlushSet(set)
		}
	})
	if err != nil {
		return err
	}
	if err := n.table.setUp(n.cfg.Range, n.cfg.Refuse); err != nil {
		return err
	}
	n.mu.Lock()
	links := make([]*Link, 0, len(n.links))
	for _, l := range n.links {
		links = append(links, l)
	}
	n.mu.Unlock()
	var errs []error
	for _, l := range links {
		l.mu.Lock()
		if !l.gone && !l.slot.bare() && l.ready != nil {
			errs = append(errs, l.install())
		}
		l.mu.Unlock()
	}
	return errors.Join(errs...)
}
