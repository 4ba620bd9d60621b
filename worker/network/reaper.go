package network

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// ErrClosed says that the network was closed: what a sandbox has of it is the next
// one's to adopt, or to remove.
var ErrClosed = errors.New("the network of sandboxes is closed")

// reaper removes what costs the kernel the same for one as for many: it waits some
// 30 ms for its readers before an interface is gone, and walks its whole table of
// connections, of 262144 places on a usual node, to find those of one address. What
// comes while it is at work is done together in the next round.
type reaper struct {
	group uint32          // of interfaces that are being removed; a number of this worker's own
	track *netlink.Handle // of netfilter

	mu      sync.Mutex // guards what follows
	pending *round
	over    bool // no round comes any more
	wake    chan struct{}
}

// round is what is removed together.
type round struct {
	veths []string
	flows flows
	done  chan struct{}
	err   error // of done
}

func newReaper(group uint32) (*reaper, error) {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open netfilter: %w", err)
	}
	return &reaper{group: group, track: h, pending: newRound(), wake: make(chan struct{}, 1)}, nil
}

func newRound() *round { return &round{flows: flows{}, done: make(chan struct{})} }

// ask has flows, and a veth unless it is "", removed in the next round. After the last one
// that fails with ErrClosed.
func (r *reaper) ask(veth string, guest netip.Addr, stays func(netip.Addr, port) bool) *round {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over {
		p := newRound()
		p.err = ErrClosed
		close(p.done)
		return p
	}
	p := r.pending
	if veth != "" {
		p.veths = append(p.veths, veth)
	}
	// Of two wishes for one guest that of the end, nil, is the one that counts.
	if old, ok := p.flows[guest]; !ok || old != nil {
		p.flows[guest] = stays
	}
	select {
	case r.wake <- struct{}{}:
	default:
	}
	return p
}

// wait returns when a round is over.
func (p *round) wait() error {
	<-p.done
	return p.err
}

// run does one round after the other until ctx ends, and then a last one.
func (r *reaper) run(ctx context.Context) {
	defer r.track.Close()
	for {
		last := false
		select {
		case <-r.wake:
		case <-ctx.Done():
			last = true
		}
		r.mu.Lock()
		p := r.pending
		r.pending, r.over = newRound(), last
		r.mu.Unlock()
		p.err = errors.Join(r.unplug(p.veths), cutFlows(r.track, p.flows))
		close(p.done)
		if last {
			return
		}
	}
}

// unplug removes veths, both sides of each, in one go.
func (r *reaper) unplug(names []string) error {
	some := false
	for _, name := range names {
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkSetGroup(link, int(r.group))
		}
		var missing netlink.LinkNotFoundError
		if errors.As(err, &missing) || errors.Is(err, unix.ENODEV) {
			continue
		}
		if err != nil {
			return fmt.Errorf("remove the veth %s: %w", name, err)
		}
		some = true
	}
	if !some {
		return nil
	}
	req := nl.NewNetlinkRequest(unix.RTM_DELLINK, unix.NLM_F_ACK)
	req.AddData(nl.NewIfInfomsg(unix.AF_UNSPEC))
	req.AddData(nl.NewRtAttr(unix.IFLA_GROUP, nl.Uint32Attr(r.group)))
	if _, err := req.Execute(unix.NETLINK_ROUTE, 0); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove veths: %w", err)
	}
	return nil
}
