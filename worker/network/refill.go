package network

import (
	"errors"
	"fmt"
	"os"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Refill gives the sandbox's namespace its address and routes again, which runsc takes
// from it at each start, so that a sandbox that was ended can be restored there. Until
// it is, the kernel has the guest's address: it says nothing to anybody, as it would tell
// the guest's peers that their connections are not known.
func (l *Link) Refill() error {
	if l.slot.bare() {
		return nil
	}
	ns, err := os.Open(l.slot.path)
	if err != nil {
		return err
	}
	defer ns.Close()
	if err := hush(ns); err != nil {
		return fmt.Errorf("keep the kernel silent in the namespace of %s: %w", l.ID, err)
	}
	if err := l.slot.refill(ns); err != nil {
		return fmt.Errorf("give the namespace of %s its address again: %w", l.ID, err)
	}
	return nil
}

func (s *slot) refill(ns *os.File) error {
	h, err := netlink.NewHandleAt(netns.NsHandle(ns.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	link, err := h.LinkByName(guestInterface)
	if err != nil {
		return err
	}
	return errors.Join(
		h.AddrReplace(link, address(s.guest)),
		h.RouteReplace(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: s.gateway.AsSlice()}),
		h.NeighSet(neighbour(link, s.gateway, macOf(s.gateway, 0))),
	)
}

// hush drops all that the kernel itself would send in a namespace. A guest's packets do
// not pass there: the Sentry gives them to the interface.
func hush(ns *os.File) error {
	c, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())))
	if err != nil {
		return err
	}
	drop := nftables.ChainPolicyDrop
	t := c.AddTable(&nftables.Table{Name: "quarry", Family: nftables.TableFamilyIPv4})
	c.AddChain(&nftables.Chain{
		Name: "silence", Table: t, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookOutput, Priority: nftables.ChainPriorityFilter, Policy: &drop,
	})
	return c.Flush()
}
