package wait

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// tableOwner makes a table one of its socket: others cannot change it, a flush of all
// rules leaves it, and it goes with the socket. Linux has it since 5.12.
const tableOwner = 0x2

// Sets of the table. Numbers name them within a transaction; those that package
// nftables gives are not safe between goroutines.
const (
	setGuests    = "guests"    // interface and address
	setEndpoints = "endpoints" // address and port
	setAsking    = "asking"    // addresses of guests, with how much they send
	setAnswered  = "answered"  // and how much without data is sent to them
	idGuests     = 1
	idEndpoints  = 2
	idAsking     = 3
	idAnswered   = 4
)

// What is copied of the packets of one guest, and of those to it that have no data,
// in packets a second. More is a guest that works, or one that wants to keep the
// reader busy: what is left out of either does not wake, and is found out by the
// numbers of what follows.
const (
	copyRate  = 1000
	copyBurst = 2000
)

// Chains: two that packets come to by themselves, and two for those that are watched.
const (
	chainAsks     = "asks"
	chainAnswers  = "answers"
	chainAsked    = "asked"
	chainAnswered = "answered"
)

// Priorities of the chains. Requests are seen before a destination is translated and
// after worker/network, at -150, has refused what is not allowed; answers when their
// source is again the one that the guest knows.
const (
	priorityAsks    = -149
	priorityAnswers = 101
)

// rules are the table that copies headers to a group. They judge nothing.
type rules struct {
	tab  *nftables.Table
	conn *nftables.Conn
	port uint32 // of the socket that changes them
	held bool   // the kernel keeps others from changing them

	mu sync.Mutex // guards conn, whose transactions are built call by call
}

// openRules makes the table anew, whatever there was by its name.
func openRules(name string, netns int, owned bool) (*rules, error) {
	r := &rules{tab: &nftables.Table{Name: name, Family: nftables.TableFamilyIPv4}}
	var sock *netlink.Conn
	opts := []nftables.ConnOption{nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
		sock = c
		return nil
	})}
	if netns != 0 {
		opts = append(opts, nftables.WithNetNSFd(netns))
	}
	conn, err := nftables.New(opts...)
	if err != nil {
		return nil, fmt.Errorf("open nftables: %w", err)
	}
	r.conn = conn
	if r.port, err = portID(sock); err == nil {
		err = r.make(sock, owned)
	}
	if err != nil {
		conn.CloseLasting()
		return nil, err
	}
	return r, nil
}

// make makes the empty table.
func (r *rules) make(sock *netlink.Conn, owned bool) error {
	if owned {
		err := r.own(sock)
		if err == nil {
			r.held = true
			return nil
		}
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EEXIST) || errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("%w: %s: %w", ErrTable, r.tab.Name, err)
		}
		if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("make the nftables table %s: %w", r.tab.Name, err)
		}
	}
	// An older kernel: what a worker that was killed left goes in the same transaction.
	return r.do(func(c *nftables.Conn) error {
		c.AddTable(r.tab)
		c.DelTable(r.tab)
		c.AddTable(r.tab)
		return nil
	})
}

// own makes the table with a flag that package nftables does not send.
func (r *rules) own(c *netlink.Conn) error {
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: unix.NFTA_TABLE_NAME, Data: append([]byte(r.tab.Name), 0)},
		{Type: unix.NFTA_TABLE_FLAGS, Data: binary.BigEndian.AppendUint32(nil, tableOwner)},
	})
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
		message(unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE, netlink.Acknowledge|netlink.Create|netlink.Excl, byte(r.tab.Family), 0, attrs),
		message(unix.NFNL_MSG_BATCH_END, 0, 0, unix.NFNL_SUBSYS_NFTABLES, nil),
	})
	if err != nil {
		return err
	}
	_, err = c.Receive()
	return err
}

// do sends what build makes as one transaction.
func (r *rules) do(build func(c *nftables.Conn) error) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	err := build(r.conn)
	if err == nil {
		err = r.conn.Flush()
	}
	if err != nil {
		return fmt.Errorf("change the nftables table %s: %w", r.tab.Name, err)
	}
	return nil
}

// close removes the table.
func (r *rules) close() error {
	var err error
	if !r.held {
		err = r.do(func(c *nftables.Conn) error {
			c.AddTable(r.tab) // it may be gone
			c.DelTable(r.tab)
			return nil
		})
	}
	return errors.Join(err, r.conn.CloseLasting())
}

var (
	guestKey    = nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)
	endpointKey = nftables.MustConcatSetType(nftables.TypeIPAddr, nftables.TypeInetService)
)

func (r *rules) guests() *nftables.Set {
	return &nftables.Set{Table: r.tab, ID: idGuests, Name: setGuests, KeyType: guestKey, Concatenation: true}
}
func (r *rules) endpoints() *nftables.Set {
	return &nftables.Set{Table: r.tab, ID: idEndpoints, Name: setEndpoints, KeyType: endpointKey, Concatenation: true}
}

// rates is a set that the rules add the guests to that they see.
func (r *rules) rates(name string, id uint32) *nftables.Set {
	const most = 1 << 16 // some 150 bytes each, if there were ever as many guests
	return &nftables.Set{Table: r.tab, ID: id, Name: name, KeyType: nftables.TypeIPAddr, Dynamic: true, Size: most}
}

func guestElement(veth string, a netip.Addr) nftables.SetElement {
	key := append([]byte(veth), make([]byte, unix.IFNAMSIZ-len(veth))...)
	return nftables.SetElement{Key: append(key, a.AsSlice()...)}
}

func endpointElements(ends []netip.AddrPort) []nftables.SetElement {
	out := make([]nftables.SetElement, 0, len(ends))
	for _, e := range ends {
		key := binary.BigEndian.AppendUint16(e.Addr().AsSlice(), e.Port())
		out = append(out, nftables.SetElement{Key: append(key, 0, 0)})
	}
	return out
}

// setUp fills the table: sets first, then the chains that look into them.
func (r *rules) setUp(group uint16, ends []netip.AddrPort, guests []Sandbox) error {
	var first []nftables.SetElement
	for _, s := range guests {
		first = append(first, guestElement(s.Veth, s.Addr))
	}
	accept := nftables.ChainPolicyAccept
	return r.do(func(c *nftables.Conn) error {
		if err := c.AddSet(r.guests(), nil); err != nil {
			return err
		}
		if err := c.AddSet(r.endpoints(), endpointElements(ends)); err != nil {
			return err
		}
		for part := range chunks(first) {
			if err := c.SetAddElements(r.guests(), part); err != nil {
				return err
			}
		}
		for _, set := range []*nftables.Set{r.rates(setAsking, idAsking), r.rates(setAnswered, idAnswered)} {
			if err := c.AddSet(set, nil); err != nil {
				return err
			}
		}
		for _, ch := range []struct {
			chain nftables.Chain
			rules [][]expr.Any
		}{
			{nftables.Chain{Name: chainAsked}, askedRules(group)},
			{nftables.Chain{Name: chainAnswered}, answeredRules(group)},
			{nftables.Chain{Name: chainAsks, Type: nftables.ChainTypeFilter, Policy: &accept,
				Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRef(priorityAsks)}, asksRules()},
			{nftables.Chain{Name: chainAnswers, Type: nftables.ChainTypeFilter, Policy: &accept,
				Hooknum: nftables.ChainHookPostrouting, Priority: nftables.ChainPriorityRef(priorityAnswers)}, answersRules(group)},
		} {
			ch.chain.Table = r.tab
			chain := c.AddChain(&ch.chain)
			for _, e := range ch.rules {
				c.AddRule(&nftables.Rule{Table: r.tab, Chain: chain, Exprs: e})
			}
		}
		return nil
	})
}

// chunks yields parts that are short enough for one attribute, whose length has 16
// bits: an element has 44 bytes.
func chunks(all []nftables.SetElement) func(yield func([]nftables.SetElement) bool) {
	return func(yield func([]nftables.SetElement) bool) {
		for len(all) > 0 {
			n := min(512, len(all))
			if !yield(all[:n]) {
				return
			}
			all = all[n:]
		}
	}
}

func (r *rules) addGuest(s Sandbox) error {
	return r.do(func(c *nftables.Conn) error {
		return c.SetAddElements(r.guests(), []nftables.SetElement{guestElement(s.Veth, s.Addr)})
	})
}

func (r *rules) removeGuest(s Sandbox) error {
	return r.do(func(c *nftables.Conn) error {
		return c.SetDeleteElements(r.guests(), []nftables.SetElement{guestElement(s.Veth, s.Addr)})
	})
}

func (r *rules) setEndpoints(ends []netip.AddrPort) error {
	return r.do(func(c *nftables.Conn) error {
		c.FlushSet(r.endpoints())
		return c.SetAddElements(r.endpoints(), endpointElements(ends))
	})
}

// Registers of 4 bytes; a key in parts fills those that follow one another.
const (
	reg0 = unix.NFT_REG32_00
	reg1 = unix.NFT_REG32_01
	reg4 = unix.NFT_REG32_04
)

// Offsets into headers.
const (
	ipSource, ipDest   = 12, 16
	tcpSource, tcpDest = 0, 2
	tcpLength          = 12
	tcpFlags           = 13
	icmpDest           = 8 + ipDest       // of the packet that an error is about,
	icmpPort           = 8 + 20 + tcpDest // which has no options of IP
)

func meta(k expr.MetaKey, reg uint32) expr.Any { return &expr.Meta{Key: k, Register: reg} }
func network(off, n, reg uint32) expr.Any {
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: off, Len: n}
}
func transport(off, n, reg uint32) expr.Any {
	return &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: off, Len: n}
}
func equal(reg uint32, b ...byte) expr.Any {
	return &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: b}
}
func masked(reg uint32, mask byte) expr.Any {
	return &expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 1, Mask: []byte{mask}, Xor: []byte{0}}
}
func in(set string, id, reg uint32) expr.Any {
	return &expr.Lookup{SourceRegister: reg, SetName: set, SetID: id}
}

// ofGuest matches packets of a guest by its interface and its address in the header.
func ofGuest(k expr.MetaKey, address uint32) []expr.Any {
	return []expr.Any{meta(k, reg0), network(address, 4, reg4), in(setGuests, idGuests, reg0)}
}

// ofEndpoint matches packets of TCP by the endpoint in the headers.
func ofEndpoint(address, port uint32) []expr.Any {
	return []expr.Any{
		meta(expr.MetaKeyL4PROTO, reg0), equal(reg0, protoTCP),
		network(address, 4, reg0), transport(port, 2, reg1), in(setEndpoints, idEndpoints, reg0),
	}
}

// copyTo copies the header. The counter is what the reader compares its own with.
func copyTo(group uint16) []expr.Any {
	return []expr.Any{&expr.Counter{}, &expr.Log{
		Key:   1<<unix.NFTA_LOG_GROUP | 1<<unix.NFTA_LOG_SNAPLEN | 1<<unix.NFTA_LOG_QTHRESHOLD,
		Group: group, Snaplen: snapLen, QThreshold: 1,
	}}
}

// plain matches acknowledgements without data in a packet of n bytes whose header of
// TCP has words words: none is part of a request.
func plain(words, n byte) []expr.Any {
	const finSynRstAck = 0x17
	length := binary.NativeEndian.AppendUint32(nil, uint32(n))
	return []expr.Any{
		meta(expr.MetaKeyLEN, reg0), equal(reg0, length...),
		transport(tcpLength, 1, reg0), masked(reg0, 0xf0), equal(reg0, words<<4),
		transport(tcpFlags, 1, reg0), masked(reg0, finSynRstAck), equal(reg0, 0x10),
	}
}

func join(parts ...[]expr.Any) []expr.Any {
	var out []expr.Any
	for _, p := range parts {
		out = append(out, p...)
	}
	return out
}

func toChain(name string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: name}}
}

var pass = []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}

// over matches packets beyond the rate of the guest whose address is in the header.
func over(set string, id, address uint32) []expr.Any {
	return []expr.Any{network(address, 4, reg0), &expr.Dynset{
		SrcRegKey: reg0, SetName: set, SetID: id, Operation: unix.NFT_DYNSET_OP_UPDATE,
		Exprs: []expr.Any{&expr.Limit{Type: expr.LimitTypePkts, Rate: copyRate, Burst: copyBurst, Unit: expr.LimitTimeSecond, Over: true}},
	}}
}

func asksRules() [][]expr.Any {
	return [][]expr.Any{join(ofGuest(expr.MetaKeyIIFNAME, ipSource), ofEndpoint(ipDest, tcpDest), toChain(chainAsked))}
}

// askedRules copy what a guest sends to an endpoint. A guest that takes a long answer
// sends little but acknowledgements, without the time stamp option or with it.
func askedRules(group uint16) [][]expr.Any {
	return [][]expr.Any{
		join(plain(5, 20+20), pass),
		join(plain(8, 20+32), pass),
		join(over(setAsking, idAsking, ipSource), pass),
		copyTo(group),
	}
}

// answersRules copy what routers say of requests, beside what an endpoint sends.
func answersRules(group uint16) [][]expr.Any {
	guest := ofGuest(expr.MetaKeyOIFNAME, ipDest)
	out := [][]expr.Any{join(guest, ofEndpoint(ipSource, tcpSource), toChain(chainAnswered))}
	for _, kind := range []byte{icmpUnreachable, icmpTimeExceed, icmpParameter} {
		out = append(out, join(guest, []expr.Any{
			meta(expr.MetaKeyL4PROTO, reg0), equal(reg0, protoICMP),
			transport(0, 1, reg0), equal(reg0, kind),
			transport(icmpDest, 4, reg0), transport(icmpPort, 2, reg1), in(setEndpoints, idEndpoints, reg0),
		}, copyTo(group)))
	}
	return out
}

// answeredRules copy what an endpoint sends to a guest, its acknowledgements too, as
// they say that a request has arrived. Data, ends and resets are copied whatever
// their number.
func answeredRules(group uint16) [][]expr.Any {
	const syn = 2
	limit := join(over(setAnswered, idAnswered, ipDest), pass)
	return [][]expr.Any{
		join(plain(5, 20+20), limit),
		join(plain(8, 20+32), limit),
		join([]expr.Any{transport(tcpFlags, 1, reg0), masked(reg0, syn), equal(reg0, syn)}, limit),
		copyTo(group),
	}
}
