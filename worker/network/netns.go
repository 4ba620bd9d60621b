package network

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// guestInterface is the name of the guest's side of the veth.
const guestInterface = "eth0"

// slot is a namespace that was made, with a veth or bare.
type slot struct {
	name    string // a number, with "b" before it when bare
	path    string // where the namespace is mounted
	veth    string // the host's side
	gateway netip.Addr
	guest   netip.Addr
}

func (s *slot) bare() bool { return s.veth == "" }

// makeNamespace makes a network namespace and mounts it on a file, so that it stays
// without a process in it. Its loopback is up, IPv6 is off and it forwards nothing.
func makeNamespace(path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o400)
	if err != nil {
		return err
	}
	f.Close()
	result := make(chan error, 1)
	go func() { // ends with the result; its thread with it, unless it came back whole
		runtime.LockOSThread()
		whole, err := fillNamespace(path)
		if whole {
			runtime.UnlockOSThread()
		}
		result <- err
	}()
	if err := <-result; err != nil {
		return errors.Join(fmt.Errorf("make a network namespace: %w", err), dropNamespace(path))
	}
	return nil
}

// fillNamespace does it on a thread of its own, and reports whether the thread is in
// the namespace where it was before.
func fillNamespace(path string) (whole bool, err error) {
	before, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return true, err
	}
	defer before.Close()
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return true, err
	}
	err = setNamespace(path)
	if back := unix.Setns(int(before.Fd()), unix.CLONE_NEWNET); back != nil {
		return false, errors.Join(err, back)
	}
	return true, err
}

func setNamespace(path string) error {
	for name, value := range map[string]string{
		"net/ipv6/conf/all/disable_ipv6":     "1",
		"net/ipv6/conf/default/disable_ipv6": "1",
		// runsc takes the guest's address from the interface, and what comes for it
		// would be forwarded back by a namespace that inherited the node's setting.
		"net/ipv4/ip_forward": "0",
	} {
		if err := sysctl(name, value); err != nil {
			return err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	return unix.Mount("/proc/thread-self/ns/net", path, "", unix.MS_BIND, "")
}

// sysctl writes a setting. One of IPv6 that is not there is off: the kernel has none.
func sysctl(name, value string) error {
	err := os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0)
	if errors.Is(err, fs.ErrNotExist) && strings.HasPrefix(name, "net/ipv6/") {
		return nil
	}
	return err
}

// dropNamespace removes a namespace's mount and its file. The namespace ends with
// the last process in it.
func dropNamespace(path string) error {
	// Not mounted, or not there: nothing is left to do.
	if err := unix.Unmount(path, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
		return fmt.Errorf("unmount %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// isNamespace reports whether a namespace is mounted there.
func isNamespace(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == unix.NSFS_MAGIC
}

// plug connects a slot's namespace by a veth pair. Neighbours are written down on both
// sides, permanent, and the host's side speaks no ARP: there is nothing to lie about.
func (s *slot) plug(mtu int) error {
	ns, err := os.Open(s.path)
	if err != nil {
		return err
	}
	defer ns.Close()
	host, guest := macOf(s.gateway, 0), macOf(s.guest, 2)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU, attrs.HardwareAddr = s.veth, mtu, host
	err = netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: guestInterface, PeerHardwareAddr: guest,
		PeerNamespace: netlink.NsFd(int(ns.Fd())), PeerMTU: uint32(mtu)})
	if err != nil {
		return fmt.Errorf("make the veth %s: %w", s.veth, err)
	}
	if err := s.plugHost(guest); err != nil {
		return fmt.Errorf("set %s up: %w", s.veth, err)
	}
	if err := s.plugGuest(ns, host); err != nil {
		return fmt.Errorf("set the guest's side of %s up: %w", s.veth, err)
	}
	return nil
}

func (s *slot) plugHost(guest net.HardwareAddr) error {
	for name, value := range map[string]string{
		"net/ipv6/conf/" + s.veth + "/disable_ipv6":        "1",
		"net/ipv4/conf/" + s.veth + "/rp_filter":           "1",
		"net/ipv4/conf/" + s.veth + "/forwarding":          "1",
		"net/ipv4/conf/" + s.veth + "/proxy_arp":           "0",
		"net/ipv4/conf/" + s.veth + "/send_redirects":      "0",
		"net/ipv4/conf/" + s.veth + "/accept_redirects":    "0",
		"net/ipv4/conf/" + s.veth + "/route_localnet":      "0",
		"net/ipv4/conf/" + s.veth + "/accept_source_route": "0",
	} {
		if err := sysctl(name, value); err != nil {
			return err
		}
	}
	link, err := netlink.LinkByName(s.veth)
	if err != nil {
		return err
	}
	if err := netlink.LinkSetARPOff(link); err != nil {
		return err
	}
	if err := netlink.AddrAdd(link, address(s.gateway)); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return err
	}
	return netlink.NeighSet(neighbour(link, s.guest, guest))
}

func (s *slot) plugGuest(ns *os.File, host net.HardwareAddr) error {
	h, err := netlink.NewHandleAt(netns.NsHandle(ns.Fd()), unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	link, err := h.LinkByName(guestInterface)
	if err != nil {
		return err
	}
	if err := h.AddrAdd(link, address(s.guest)); err != nil {
		return err
	}
	if err := h.LinkSetUp(link); err != nil {
		return err
	}
	if err := h.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: s.gateway.AsSlice()}); err != nil {
		return err
	}
	return h.NeighSet(neighbour(link, s.gateway, host))
}

func address(a netip.Addr) *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(31, 32)}}
}

func neighbour(l netlink.Link, a netip.Addr, mac net.HardwareAddr) *netlink.Neigh {
	return &netlink.Neigh{LinkIndex: l.Attrs().Index, Family: unix.AF_INET, State: netlink.NUD_PERMANENT, IP: a.AsSlice(), HardwareAddr: mac}
}

// macOf is an address of the locally administered kind, made of the IPv4 address.
func macOf(a netip.Addr, side byte) net.HardwareAddr {
	b := a.As4()
	return net.HardwareAddr{0x02, side, b[0], b[1], b[2], b[3]}
}
