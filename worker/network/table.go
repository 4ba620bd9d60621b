package network

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// building guards what package nftables keeps for all its connections: the number of
// the next set.
var building sync.Mutex

// table is the nftables table of one worker. Every change is one transaction, which
// is in force as a whole or not at all.
type table struct {
	tab    *nftables.Table
	prefix string // of the interfaces that are ours

	owned bool // others cannot change it
	sock  *netlink.Conn

	mu   sync.Mutex
	conn *nftables.Conn
}

// Flags of a table. An owned table is changed through the socket that owns it alone,
// so a firewall that starts anew and flushes every rule leaves this one; a
// persistent one stays when the socket is closed, for the next worker to own.
// Linux has both since 6.9.
const (
	tableOwner   = 0x2
	tablePersist = 0x4
)

// Size of the socket's buffers: a transaction of 32768 elements of 40 bytes goes out
// in one piece.
const socketBuffer = 8 << 20

func openTable(name, prefix string) (*table, error) {
	t := &table{tab: &nftables.Table{Name: name, Family: nftables.TableFamilyIPv4}, prefix: prefix}
	var sock *netlink.Conn
	conn, err := nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
		sock = c
		return errors.Join(c.SetWriteBuffer(socketBuffer), c.SetReadBuffer(socketBuffer))
	}))
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	t.conn, t.sock = conn, sock
	err = own(sock, name)
	t.owned = err == nil
	if err != nil {
		if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) {
			conn.CloseLasting()
			return nil, fmt.Errorf("own the nftables table %s: %w", name, err)
		}
		// An older kernel, or a table that was made on one: see guard.
		if err := t.do(func(c *nftables.Conn) { c.AddTable(t.tab) }); err != nil {
			conn.CloseLasting()
			return nil, err
		}
	}
	return t, nil
}

// own makes the table, or takes the orphaned one, with flags that package nftables
// does not send.
func own(c *netlink.Conn, name string) error {
	ae := netlink.NewAttributeEncoder()
	ae.ByteOrder = binary.BigEndian
	ae.String(unix.NFTA_TABLE_NAME, name)
	ae.Uint32(unix.NFTA_TABLE_FLAGS, tableOwner|tablePersist)
	attrs, err := ae.Encode()
	if err != nil {
		return err
	}
	message := func(kind int, flags netlink.HeaderFlags, family byte, res uint16, data []byte) netlink.Message {
		head := binary.BigEndian.AppendUint16([]byte{family, unix.NFNETLINK_V0}, res)
		return netlink.Message{
			Header: netlink.Header{Type: netlink.HeaderType(kind), Flags: netlink.Request | flags},
			Data:   append(head, data...),
		}
	}
	_, err = c.SendMessages([]netlink.Message{
		message(unix.NFNL_MSG_BATCH_BEGIN, 0, 0, unix.NFNL_SUBSYS_NFTABLES, nil),
		message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, netlink.Acknowledge|netlink.Create, byte(nftables.TableFamilyIPv4), 0, attrs),
		message(unix.NFNL_MSG_BATCH_END, 0, 0, unix.NFNL_SUBSYS_NFTABLES, nil),
	})
	if err != nil {
		return err
	}
	_, err = c.Receive()
	return err
}

// close leaves the table as it is.
func (t *table) close() error { return t.conn.CloseLasting() }

// do sends what build makes as one transaction.
func (t *table) do(build func(c *nftables.Conn)) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	building.Lock()
	build(t.conn)
	building.Unlock()
	if err := t.conn.Flush(); err != nil {
		return fmt.Errorf("change the nftables table %s: %w", t.tab.Name, err)
	}
	return nil
}

// read calls fn with the connection, for lists.
func (t *table) read(fn func(c *nftables.Conn) error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return fn(t.conn)
}

// Registers of expressions. A concatenated key lies in those that follow one another.
const (
	verdictReg = 0
	reg0       = unix.NFT_REG32_00
	reg1       = unix.NFT_REG32_01
	reg2       = unix.NFT_REG32_02
)

// match is a part of a rule.
type match []expr.Any

func rule(parts ...match) []expr.Any {
	var out []expr.Any
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

func verdict(k expr.VerdictKind) match   { return match{&expr.Verdict{Kind: k}} }
func gotoChain(name string) match        { return match{&expr.Verdict{Kind: expr.VerdictGoto, Chain: name}} }
func equal(reg uint32, b []byte) match   { return compare(expr.CmpOpEq, reg, b) }
func differs(reg uint32, b []byte) match { return compare(expr.CmpOpNeq, reg, b) }

func compare(op expr.CmpOp, reg uint32, b []byte) match {
	return match{&expr.Cmp{Op: op, Register: reg, Data: b}}
}

// Interfaces that are ours have a prefix of their own; a compare of fewer bytes than
// the name has is one of its beginning.
func (t *table) fromOurs() match {
	return append(loadMeta(expr.MetaKeyIIFNAME, reg0), equal(reg0, []byte(t.prefix))...)
}
func (t *table) toOurs() match {
	return append(loadMeta(expr.MetaKeyOIFNAME, reg0), equal(reg0, []byte(t.prefix))...)
}
func (t *table) toOthers() match {
	return append(loadMeta(expr.MetaKeyOIFNAME, reg0), differs(reg0, []byte(t.prefix))...)
}

func loadMeta(k expr.MetaKey, reg uint32) match { return match{&expr.Meta{Key: k, Register: reg}} }

func loadSource(reg uint32) match { return loadIP(reg, 12) }
func loadDest(reg uint32) match   { return loadIP(reg, 16) }

func loadIP(reg, off uint32) match {
	return match{&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: off, Len: 4}}
}

// loadPort loads a port of TCP and UDP: 0 is the source's, 2 the destination's.
func loadPort(reg, off uint32) match {
	return match{&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: off, Len: 2}}
}

// protocol matches packets of a protocol.
func protocol(p byte) match {
	return append(loadMeta(expr.MetaKeyL4PROTO, reg0), equal(reg0, []byte{p})...)
}

// tcpOrUDP matches when the protocol that was loaded is one of both.
func tcpOrUDP(load match) match {
	return append(load,
		&expr.Range{Op: expr.CmpOpEq, Register: reg0, FromData: []byte{protoTCP}, ToData: []byte{protoUDP}},
		&expr.Range{Op: expr.CmpOpNeq, Register: reg0, FromData: []byte{protoTCP + 1}, ToData: []byte{protoUDP - 1}})
}

// state matches packets of a tracked connection in one of these states.
func state(bits uint32) match {
	return match{
		&expr.Ct{Key: expr.CtKeySTATE, Register: reg0},
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: reg0, Data: make([]byte, 4)},
	}
}

// in matches when the key that begins in a register is in a set.
func in(set string, reg uint32) match {
	return match{&expr.Lookup{SourceRegister: reg, SetName: set}}
}

// limit matches so many packets a second.
func limit(rate uint64, burst uint32) match {
	return match{&expr.Limit{Type: expr.LimitTypePkts, Rate: rate, Burst: burst, Unit: expr.LimitTimeSecond}}
}

// icmpProhibited is the code of "communication administratively prohibited".
const icmpProhibited = 13

// ofNode matches packets that came from no interface: the node made them.
func ofNode() match { return append(loadMeta(expr.MetaKeyIIF, reg0), equal(reg0, make([]byte, 4))...) }

// headerWords loads the length of an IPv4 header: 5 is one without options.
func headerWords() match {
	return match{
		&expr.Payload{DestRegister: reg0, Base: expr.PayloadBaseNetworkHeader, Offset: 0, Len: 1},
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 1, Mask: []byte{0x0f}, Xor: []byte{0}},
	}
}

// tcpReset matches segments with the flag RST.
func tcpReset() match {
	return match{
		&expr.Payload{DestRegister: reg0, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: reg0, DestRegister: reg0, Len: 1, Mask: []byte{4}, Xor: []byte{0}},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg0, Data: []byte{4}},
	}
}

// icmpUnreachable matches messages of type 3.
func icmpUnreachable() match {
	return append(match{&expr.Payload{DestRegister: reg0, Base: expr.PayloadBaseTransportHeader, Offset: 0, Len: 1}}, equal(reg0, []byte{3})...)
}

// dispatch goes where a map of interfaces says.
func dispatch(k expr.MetaKey, set string) match {
	return append(loadMeta(k, reg0), &expr.Lookup{SourceRegister: reg0, DestRegister: verdictReg, IsDestRegSet: true, SetName: set})
}

func counter(name string) match {
	return match{&expr.Objref{Type: unix.NFT_OBJECT_COUNTER, Name: name}}
}

// ifname is the key of an interface in a map.
func ifname(name string) []byte {
	return append([]byte(name), make([]byte, unix.IFNAMSIZ-len(name))...)
}

// portKey is the key of an address and a port in a set: each part fills a register.
func portKey(a netip.Addr, p port) []byte {
	b := append(a.AsSlice(), p.proto, 0, 0, 0)
	return append(binary.BigEndian.AppendUint16(b, p.number), 0, 0)
}

// portType is the type of those keys.
var portType = nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetProto, nftables.TypeInetService)

// addElements adds elements to a set in messages that are short enough for one
// attribute, whose length has 16 bits.
func addElements(c *nftables.Conn, s *nftables.Set, e []nftables.SetElement) {
	inParts(e, func(p []nftables.SetElement) { c.SetAddElements(s, p) })
}
func deleteElements(c *nftables.Conn, s *nftables.Set, e []nftables.SetElement) {
	inParts(e, func(p []nftables.SetElement) { c.SetDeleteElements(s, p) })
}

func inParts(e []nftables.SetElement, fn func([]nftables.SetElement)) {
	const most = 256 // of at most 100 bytes
	for len(e) > 0 {
		n := min(most, len(e))
		fn(e[:n])
		e = e[n:]
	}
}
