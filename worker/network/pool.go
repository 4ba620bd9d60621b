package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// makers is how many namespaces are made at once: the kernel makes them one after
// the other under one lock, so more would only wait there.
const makers = 2

// pool is what is prepared. Its fields are guarded by Network.mu.
type pool struct {
	ready []*slot // with a veth
	bare  []*slot
	wake  chan struct{} // something was taken
}

// take returns a prepared slot, or makes one.
func (n *Network) takeSlot(ctx context.Context, bare bool) (*slot, error) {
	n.mu.Lock()
	list := &n.pool.ready
	if bare {
		list = &n.pool.bare
	}
	var s *slot
	if len(*list) > 0 {
		s, *list = (*list)[0], (*list)[1:]
	}
	n.mu.Unlock()
	select {
	case n.pool.wake <- struct{}{}:
	default:
	}
	if s != nil {
		return s, nil
	}
	return n.makeSlot(ctx, bare)
}

// fill keeps the pool as full as it is to be, until ctx ends.
func (n *Network) fill(ctx context.Context) {
	for ctx.Err() == nil {
		n.mu.Lock()
		needReady, needBare := len(n.pool.ready) < n.cfg.Ready, len(n.pool.bare) < n.cfg.Bare
		n.mu.Unlock()
		if !needReady && !needBare {
			select {
			case <-n.pool.wake:
			case <-ctx.Done():
			}
			continue
		}
		bare := needBare && !needReady
		s, err := n.makeSlot(ctx, bare)
		if err != nil {
			if ctx.Err() == nil {
				n.cfg.Log.Warn("no network prepared", "error", err)
			}
			select { // who needs one now makes it, and gets the error
			case <-time.After(time.Second):
			case <-ctx.Done():
			}
			continue
		}
		n.mu.Lock()
		if bare {
			n.pool.bare = append(n.pool.bare, s)
		} else {
			n.pool.ready = append(n.pool.ready, s)
		}
		n.mu.Unlock()
	}
}

// makeSlot makes a namespace, and a veth unless it is to be bare.
func (n *Network) makeSlot(ctx context.Context, bare bool) (*slot, error) {
	select {
	case n.making <- struct{}{}:
		defer func() { <-n.making }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	for range 64 {
		s, err := n.nextSlot(bare)
		if err != nil {
			return nil, err
		}
		err = n.build(s)
		if err == nil {
			return s, nil
		}
		n.freeSlot(s)
		if !errors.Is(err, errTaken) && !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
	}
	return nil, errors.New("no address for a sandbox: all that were tried are in use")
}

// errTaken says that another program has the addresses.
var errTaken = errors.New("the addresses are in use")

// build makes what a slot names. What it made is removed on an error.
func (n *Network) build(s *slot) error {
	if err := makeNamespace(s.path); err != nil {
		return err
	}
	if s.bare() {
		return nil
	}
	mtu, err := uplinkMTU()
	if err == nil {
		err = s.plug(mtu)
	}
	if err == nil {
		err = s.alone()
	}
	if err == nil {
		return nil
	}
	if errors.Is(err, fs.ErrExist) { // a veth of that name is not ours to remove
		return errors.Join(err, dropNamespace(s.path))
	}
	return errors.Join(err, n.reaper.unplug([]string{s.veth}), dropNamespace(s.path))
}

// alone reports errTaken when packets for the guest go elsewhere: another worker,
// or another program, has the same addresses and had them before.
func (s *slot) alone() error {
	link, err := netlink.LinkByName(s.veth)
	if err != nil {
		return err
	}
	routes, err := netlink.RouteGet(s.guest.AsSlice())
	if err != nil {
		return err
	}
	for _, r := range routes {
		if r.LinkIndex != link.Attrs().Index {
			return errTaken
		}
	}
	return nil
}

// nextSlot chooses a number that is free, in turn: one that was in use is so for the
// longest time before it is again.
func (n *Network) nextSlot(bare bool) (*slot, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	size := 1 << (31 - n.cfg.Range.Bits())
	for range size {
		n.next = (n.next + 1) % size
		name := strconv.Itoa(n.next)
		if bare {
			name = "b" + name
		}
		if n.slots[name] {
			continue
		}
		if _, err := os.Lstat(n.nsPath(name)); err == nil {
			continue // of a worker before, until it is swept
		}
		n.slots[name] = true
		return n.slot(name)
	}
	return nil, fmt.Errorf("the range %s has no address left", n.cfg.Range)
}

func (n *Network) freeSlot(s *slot) {
	n.mu.Lock()
	delete(n.slots, s.name)
	n.mu.Unlock()
}

func (n *Network) nsPath(name string) string { return filepath.Join(n.cfg.Folder, "ns", name) }

// slot returns what a name stands for.
func (n *Network) slot(name string) (*slot, error) {
	number, bare := strings.CutPrefix(name, "b")
	i, err := strconv.ParseUint(number, 10, 31)
	if err != nil || strconv.FormatUint(i, 10) != number {
		return nil, fmt.Errorf("%q is no name of a network", name)
	}
	s := &slot{name: name, path: n.nsPath(name)}
	if bare {
		return s, nil
	}
	s.veth = n.prefix + number
	s.gateway = addrAt(n.cfg.Range, uint32(i)*2)
	s.guest = addrAt(n.cfg.Range, uint32(i)*2+1)
	if !n.cfg.Range.Contains(s.guest) {
		return nil, fmt.Errorf("the network %s is beyond the range %s", name, n.cfg.Range)
	}
	return s, nil
}

// addrAt is an address of a prefix by its number.
func addrAt(p netip.Prefix, i uint32) netip.Addr {
	b := p.Masked().Addr().As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	v += i
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

// uplinkMTU is the MTU of the way out, so that a guest does not send what the node
// has to cut or refuse. Without a way out it is Ethernet's.
func uplinkMTU() (int, error) {
	routes, err := List(func() ([]netlink.Route, error) {
		return netlink.RouteListFiltered(netlink.FAMILY_V4, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return 0, fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		if r.Dst != nil && !r.Dst.IP.IsUnspecified() || r.LinkIndex == 0 {
			continue
		}
		link, err := netlink.LinkByIndex(r.LinkIndex)
		if err != nil {
			return 0, fmt.Errorf("the interface of the default route: %w", err)
		}
		return max(1280, min(link.Attrs().MTU, 9000)), nil
	}
	return 1500, nil
}
