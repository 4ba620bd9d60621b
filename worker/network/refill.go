package network

import (
	"errors"
	"fmt"
	"os"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Refill gives the sandbox's namespace its address and routes again, which runsc takes
// from it at each start, so that a sandbox that was ended can be restored there. From
// then on until Reopen no packet reaches the namespace: neither the kernel, which has the
// guest's address until runsc starts, nor a Sentry that does not know of the guest's
// connections yet is to tell the peers so.
func (l *Link) Refill() error {
	if l.slot.bare() {
		return nil
	}
	if err := l.Shut(); err != nil {
		return err
	}
	ns, err := os.Open(l.slot.path)
	if err != nil {
		return err
	}
	defer ns.Close()
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

// blackhole is a queue of the kernel's that drops all that is given to it.
const blackhole = "blackhole"

func (l *Link) queue() (*netlink.GenericQdisc, error) {
	link, err := netlink.LinkByName(l.slot.veth)
	if err != nil {
		return nil, fmt.Errorf("the veth of %s: %w", l.ID, err)
	}
	attrs := netlink.QdiscAttrs{LinkIndex: link.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT}
	return &netlink.GenericQdisc{QdiscAttrs: attrs, QdiscType: blackhole}, nil
}

// Shut lets no packet through to the sandbox until Reopen. A Sentry acknowledges what
// comes while its guest stands: what came after a checkpoint would be lost with it.
func (l *Link) Shut() error {
	if l.slot.bare() {
		return nil
	}
	q, err := l.queue()
	if err == nil {
		err = netlink.QdiscReplace(q)
	}
	if err != nil {
		return fmt.Errorf("let no packet through to %s: %w", l.ID, err)
	}
	return nil
}

// Reopen lets packets through again, if they are not.
func (l *Link) Reopen() error {
	if l.slot.bare() {
		return nil
	}
	q, err := l.queue()
	if err != nil {
		return err
	}
	if err := netlink.QdiscDel(q); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("let packets through to %s again: %w", l.ID, err)
	}
	return nil
}
