package network

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// flows chooses tracked connections: those of a guest, by its address, that its
// function says do not stay.
type flows map[netip.Addr]func(dest netip.Addr, p port) bool

// MatchConntrackFlow implements netlink.CustomConntrackFilter.
func (f flows) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	src, ok := netip.AddrFromSlice(flow.Forward.SrcIP)
	if !ok {
		return false
	}
	stays, ours := f[src.Unmap()]
	if !ours {
		return false
	}
	dest, ok := netip.AddrFromSlice(flow.Forward.DstIP)
	return !ok || stays == nil || !stays(dest.Unmap(), port{flow.Forward.Protocol, flow.Forward.DstPort})
}

// cutFlows removes connections from the kernel's table. A list that was disturbed
// is taken again: one that was passed over would stay. The handle is kept open by
// the caller: the kernel makes who closes a socket of netfilter wait for what
// transactions of nftables removed, and the next transaction with it.
func cutFlows(h *netlink.Handle, f flows) error {
	if len(f) == 0 {
		return nil
	}
	var err error
	for range 4 {
		_, err = h.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, f)
		if err == nil {
			return nil
		}
		if !errors.Is(err, netlink.ErrDumpInterrupted) && !errors.Is(err, unix.ENOENT) {
			break
		}
	}
	return fmt.Errorf("remove tracked connections: %w", err)
}
