package wait

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"
	"testing"
)

var (
	guestAddr = netip.MustParseAddr("10.9.1.2")
	modelAddr = netip.MustParseAddr("198.51.100.2")
)

// ipHeader is an IPv4 header before rest.
func ipHeader(proto byte, src, dst netip.Addr, length int, rest []byte) []byte {
	b := make([]byte, 20, 120)
	b[0], b[9] = 0x45, proto
	binary.BigEndian.PutUint16(b[2:], uint16(length))
	copy(b[12:], src.AsSlice())
	copy(b[16:], dst.AsSlice())
	return append(b, rest...)
}

// tcpHeader is one without options.
func tcpHeader(sport, dport uint16, seq, ack uint32, flags byte) []byte {
	b := binary.BigEndian.AppendUint16(nil, sport)
	b = binary.BigEndian.AppendUint16(b, dport)
	b = binary.BigEndian.AppendUint32(b, seq)
	b = binary.BigEndian.AppendUint32(b, ack)
	return append(b, 0x50, flags, 1, 2, 0, 0, 0, 0)
}

func TestParsePacket(t *testing.T) {
	toModel := flow{40000, netip.AddrPortFrom(modelAddr, 80)}
	tests := map[string]struct {
		b    []byte
		asks bool
		want packet
	}{
		"a request": {
			ipHeader(protoTCP, guestAddr, modelAddr, 140, tcpHeader(40000, 80, 7, 9, 0x18)), true,
			packet{flow: toModel, asks: true, seq: 7, ack: 9, size: 100, window: 0x102, acks: true},
		},
		"an answer of which only the headers were copied": {
			ipHeader(protoTCP, modelAddr, guestAddr, 65535, tcpHeader(80, 40000, 7, 9, 0x10)), false,
			packet{flow: toModel, seq: 7, ack: 9, size: 65495, window: 0x102, acks: true},
		},
		"pieces put together to more than the length can say": {
			ipHeader(protoTCP, modelAddr, guestAddr, 0, tcpHeader(80, 40000, 7, 9, 0x10)), false,
			packet{flow: toModel, seq: 7, ack: 9, size: 65536 - 40, window: 0x102, acks: true},
		},
		"an end": {
			ipHeader(protoTCP, modelAddr, guestAddr, 40, tcpHeader(80, 40000, 7, 9, 0x11)), false,
			packet{flow: toModel, seq: 7, ack: 9, size: 1, window: 0x102, fin: true, acks: true},
		},
		"a reset": {
			ipHeader(protoTCP, modelAddr, guestAddr, 40, tcpHeader(80, 40000, 7, 0, 0x04)), false,
			packet{flow: toModel, seq: 7, window: 0x102, rst: true},
		},
		"a beginning": {
			ipHeader(protoTCP, guestAddr, modelAddr, 40, tcpHeader(40000, 80, 7, 0, 0x02)), true,
			packet{flow: toModel, asks: true, seq: 7, size: 1, window: 0x102, syn: true},
		},
		"an error about a request, from a router": {
			ipHeader(protoICMP, netip.MustParseAddr("10.0.0.1"), guestAddr, 56, append([]byte{3, 1, 0, 0, 0, 0, 0, 0},
				ipHeader(protoTCP, guestAddr, modelAddr, 140, tcpHeader(40000, 80, 7, 9, 0)[:8])...)), false,
			packet{flow: toModel, icmp: true},
		},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			guest, got, err := parsePacket(tt.b, tt.asks)
			if err != nil || guest != guestAddr || got != tt.want {
				t.Errorf("got %s %+v, %v\nwant %+v", guest, got, err, tt.want)
			}
		})
	}
}

func TestWhatIsNoHeader(t *testing.T) {
	good := ipHeader(protoTCP, modelAddr, guestAddr, 140, tcpHeader(80, 40000, 7, 9, 0x18))
	for n := range 36 {
		if _, _, err := parsePacket(good[:n], false); !errors.Is(err, errHeader) {
			t.Errorf("%d bytes: %v", n, err)
		}
	}
	change := func(at int, v byte) []byte {
		b := append([]byte{}, good...)
		b[at] = v
		return b
	}
	for name, b := range map[string][]byte{
		"version 6": change(0, 0x65), "a header of 16 bytes": change(0, 0x44), "a later fragment": change(7, 1),
		"UDP": change(9, 17), "a TCP header of 16 bytes": change(32, 0x40), "a TCP header longer than the packet": append(change(3, 50)[:32], append([]byte{0xf0}, good[33:]...)...),
		"an ICMP error from the guest": ipHeader(protoICMP, guestAddr, modelAddr, 56, make([]byte, 40)),
	} {
		guest, _, err := parsePacket(b, false)
		if !errors.Is(err, errHeader) {
			t.Errorf("%s: %v", name, err)
		}
		if strings.Contains(name, "TCP header") && guest != guestAddr {
			t.Errorf("%s: of %s", name, guest)
		}
	}
}

func FuzzPacket(f *testing.F) {
	f.Add(ipHeader(protoTCP, modelAddr, guestAddr, 140, tcpHeader(80, 40000, 7, 9, 0x18)), false)
	f.Add(ipHeader(protoTCP, guestAddr, modelAddr, 140, tcpHeader(40000, 80, 7, 9, 0x18)), true)
	f.Add(ipHeader(protoICMP, modelAddr, guestAddr, 56, append([]byte{3, 1, 0, 0, 0, 0, 0, 0},
		ipHeader(protoTCP, guestAddr, modelAddr, 140, tcpHeader(40000, 80, 7, 9, 0)[:8])...)), false)
	f.Fuzz(func(t *testing.T, b []byte, asks bool) {
		guest, p, err := parsePacket(b, asks)
		if err == nil && (!guest.Is4() || !p.end.Addr().Is4() || p.size > 1<<16+2) {
			t.Errorf("%s %+v", guest, p)
		}
	})
}

// message is one of nfnetlink_log.
func message(hook byte, seq uint32, payload []byte) []byte {
	attr := func(kind uint16, value []byte) []byte {
		b := binary.NativeEndian.AppendUint16(nil, uint16(4+len(value)))
		b = append(binary.NativeEndian.AppendUint16(b, kind), value...)
		return append(b, make([]byte, align(len(b))-len(b))...)
	}
	body := []byte{2, 0, 4, 0}
	body = append(body, attr(attrPacketHeader, []byte{8, 0, hook, 0})...)
	body = append(body, attr(10, []byte{0})...)
	body = append(body, attr(attrPayload, payload)...)
	body = append(body, attr(attrSequence, binary.BigEndian.AppendUint32(nil, seq))...)
	b := binary.NativeEndian.AppendUint32(nil, uint32(16+len(body)))
	b = binary.NativeEndian.AppendUint16(b, ulogPacket)
	b = append(b, make([]byte, 10)...)
	return append(b, body...)
}

func TestParseMessages(t *testing.T) {
	var got []logged
	b := append(message(0, 7, []byte("abcde")), message(4, 8, []byte("fgh"))...)
	if err := parseMessages(b, func(l logged) { got = append(got, l) }); err != nil {
		t.Fatal(err)
	}
	if len(got) != 2 || got[0].hook != 0 || got[0].seq != 7 || string(got[0].payload) != "abcde" || got[1].hook != 4 || got[1].seq != 8 || string(got[1].payload) != "fgh" {
		t.Errorf("got %+v", got)
	}
	for n := range len(b) {
		if n != 0 && n != len(message(0, 7, []byte("abcde"))) && parseMessages(b[:n], func(logged) {}) == nil {
			t.Errorf("%d of %d bytes are taken", n, len(b))
		}
	}
}

func FuzzMessages(f *testing.F) {
	f.Add(message(0, 7, []byte("abcde")))
	f.Add(append(message(0, 7, nil), message(4, 8, make([]byte, snapLen))...))
	f.Fuzz(func(t *testing.T, b []byte) {
		n := 0
		parseMessages(b, func(l logged) {
			n += 16 + len(l.payload)
			parsePacket(l.payload, l.hook == hookPrerouting)
		})
		if n > len(b) {
			t.Errorf("%d bytes of packets in %d", n, len(b))
		}
	})
}

// TestAMissingNumberIsNoticed: the socket reports a loss once until it was empty.
func TestAMissingNumberIsNoticed(t *testing.T) {
	var events, packets int
	tp := &tap{}
	for _, seq := range []uint32{5, 6, 8, 9} {
		if err := tp.datagram(message(4, seq, nil), func(logged) { packets++ }, func(tapEvent) { events++ }); err != nil {
			t.Fatal(err)
		}
	}
	if events != 1 || packets != 4 {
		t.Errorf("%d events and %d packets", events, packets)
	}
}
