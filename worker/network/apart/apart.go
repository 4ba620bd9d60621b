// Package apart makes two network namespaces beside the machine's, joined by a wire:
// one plays a node, where a worker runs, the other all that is outside, where a test's
// or a bench's servers listen. Nothing of them is in the machine's own network, and
// nothing is left when they are closed and what runs there has ended.
package apart

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/vishvananda/netlink"

	"quarry/internal/netns"
)

// Addresses of the wire, of a range that is for examples alone.
const (
	nodeAddr   = "192.0.2.10/24"
	routerAddr = "192.0.2.1"
	wire       = "up0"
)

// Pair is the two namespaces. Its methods may be called at once.
type Pair struct {
	Node, Outside string // files that name them
}

// New makes both, named by files in a folder. Outside has the addresses given beside its
// own. It needs root.
func New(dir string, outside ...netip.Addr) (p *Pair, err error) {
	p = &Pair{}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make network namespaces: %w", err), p.Close())
		}
	}()
	for name, to := range map[string]*string{"node": &p.Node, "outside": &p.Outside} {
		path := filepath.Join(dir, name)
		if err := netns.Make(path); err != nil {
			return p, err
		}
		*to = path
	}
	err = netns.Do(p.Node, func() error {
		peer, err := os.Open(p.Outside)
		if err != nil {
			return err
		}
		defer peer.Close()
		attrs := netlink.NewLinkAttrs()
		attrs.Name = wire
		pair := &netlink.Veth{LinkAttrs: attrs, PeerName: wire, PeerNamespace: netlink.NsFd(int(peer.Fd()))}
		return errors.Join(netlink.LinkAdd(pair), up("lo"), up(wire, nodeAddr))
	})
	if err != nil {
		return p, err
	}
	var own []string
	for _, a := range outside {
		own = append(own, netip.PrefixFrom(a, a.BitLen()).String())
	}
	if err := netns.Do(p.Outside, func() error { return errors.Join(up("lo", own...), up(wire, routerAddr+"/24")) }); err != nil {
		return p, err
	}
	return p, netns.Do(p.Node, func() error { return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(routerAddr)}) })
}

// Close removes both. They are gone when nothing runs or listens there any more.
func (p *Pair) Close() error {
	var errs []error
	for _, path := range []string{p.Node, p.Outside} {
		if path != "" {
			errs = append(errs, netns.Remove(path))
		}
	}
	return errors.Join(errs...)
}

// Listen listens outside, on an address that New was given.
func (p *Pair) Listen(at netip.AddrPort) (l net.Listener, err error) {
	err = netns.Do(p.Outside, func() (err error) {
		l, err = net.Listen("tcp4", at.String())
		return err
	})
	return l, err
}

// Start starts a program on the node. Its SysProcAttr may have no Pdeathsig: the thread
// that starts it ends at once.
func (p *Pair) Start(cmd *exec.Cmd) error { return netns.Do(p.Node, cmd.Start) }

func up(name string, addrs ...string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	for _, text := range addrs {
		a, err := netlink.ParseAddr(text)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(link)
}
