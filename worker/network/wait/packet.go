package wait

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// snapLen is how much of each packet the kernel copies: the longest header of IPv4
// (60 bytes) and the 36 bytes of TCP's that say ports, numbers and window, with most
// options. An ICMP error with the headers it is about has 56.
const snapLen = 96

// flow names a connection of a sandbox.
type flow struct {
	port uint16         // the guest's
	end  netip.AddrPort // the endpoint
}

// packet is what is told of a packet between a guest and an endpoint.
type packet struct {
	flow
	asks bool // from the guest
	icmp bool // an error about the flow, from wherever

	seq, ack uint32
	size     uint32 // bytes of data, and one for each of SYN and FIN: what seq counts
	window   uint16 // as sent: 0 is 0 whatever the scale
	syn, fin bool
	rst      bool
	acks     bool // ack is set
}

func (p *packet) end32() uint32 { return p.seq + p.size }

// errHeader is of a packet that is cut short or is none of those that are watched.
var errHeader = errors.New("not the header of a watched packet")

const (
	protoICMP = 1
	protoTCP  = 6
)

// Types of ICMP that end or change a connection.
const (
	icmpUnreachable = 3
	icmpTimeExceed  = 11
	icmpParameter   = 12
)

// parsePacket reads the beginning of an IPv4 packet that goes to the guest or comes
// from it. What the guest wrote is taken as any bytes. With an error it returns the
// guest where the packet says as much.
func parsePacket(b []byte, asks bool) (guest netip.Addr, p packet, err error) {
	proto, src, dst, length, rest, err := parseIP(b)
	if err != nil {
		return netip.Addr{}, packet{}, err
	}
	if guest = dst; asks {
		guest = src
	}
	if proto == protoICMP && !asks {
		p, err = parseError(rest, guest)
		return guest, p, err
	}
	if proto != protoTCP || len(rest) < 16 {
		return guest, packet{}, errHeader
	}
	sport, dport := binary.BigEndian.Uint16(rest), binary.BigEndian.Uint16(rest[2:])
	if p.asks = asks; asks {
		p.flow = flow{sport, netip.AddrPortFrom(dst, dport)}
	} else {
		p.flow = flow{dport, netip.AddrPortFrom(src, sport)}
	}
	p.seq, p.ack = binary.BigEndian.Uint32(rest[4:]), binary.BigEndian.Uint32(rest[8:])
	flags := rest[13]
	p.fin, p.syn, p.rst, p.acks = flags&1 != 0, flags&2 != 0, flags&4 != 0, flags&16 != 0
	p.window = binary.BigEndian.Uint16(rest[14:])
	head := int(rest[12]>>4) * 4
	if head < 20 || length < head {
		return guest, packet{}, errHeader
	}
	p.size = uint32(length - head)
	if p.syn {
		p.size++
	}
	if p.fin {
		p.size++
	}
	return guest, p, nil
}

// parseIP reads an IPv4 header. length is that of what follows it in the packet, of
// which rest is the part that was copied.
func parseIP(b []byte) (proto byte, src, dst netip.Addr, length int, rest []byte, err error) {
	if len(b) < 20 || b[0]>>4 != 4 {
		return 0, src, dst, 0, nil, errHeader
	}
	head, total := int(b[0]&15)*4, int(binary.BigEndian.Uint16(b[2:]))
	if total == 0 {
		// Longer than the field can say: pieces that the kernel put together. Anything
		// above the headers will do.
		total = 1 << 16
	}
	// Only the first fragment has the header of what it carries.
	if head < 20 || len(b) < head || total < head || binary.BigEndian.Uint16(b[6:])&0x1fff != 0 {
		return 0, src, dst, 0, nil, errHeader
	}
	return b[9], netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20])), total - head, b[head:], nil
}

// parseError reads an ICMP error about a packet that the guest sent.
func parseError(b []byte, guest netip.Addr) (p packet, err error) {
	if len(b) < 8 || b[0] != icmpUnreachable && b[0] != icmpTimeExceed && b[0] != icmpParameter {
		return p, errHeader
	}
	proto, src, dst, _, rest, err := parseIP(b[8:])
	if err != nil || src != guest || proto != protoTCP || len(rest) < 4 {
		return p, errHeader
	}
	p.icmp = true
	p.flow = flow{binary.BigEndian.Uint16(rest), netip.AddrPortFrom(dst, binary.BigEndian.Uint16(rest[2:]))}
	return p, nil
}
