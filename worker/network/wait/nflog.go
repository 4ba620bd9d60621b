package wait

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"syscall"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Numbers of linux/netfilter/nfnetlink_log.h.
const (
	ulogPacket = unix.NFNL_SUBSYS_ULOG << 8
	ulogConfig = unix.NFNL_SUBSYS_ULOG<<8 | 1

	cfgCommand = 1
	cfgMode    = 2
	cfgBuffer  = 3
	cfgTimeout = 4
	cfgThresh  = 5
	cfgFlags   = 6

	commandBind  = 1
	copyPacket   = 2
	flagSequence = 1

	attrPacketHeader = 1
	attrPayload      = 9
	attrSequence     = 12
)

// Hooks that a packet was copied at.
const (
	hookPrerouting  = 0 // it comes from the guest
	hookPostrouting = 4 // it goes to one
)

// logged is one packet that the kernel copied.
type logged struct {
	hook    byte
	seq     uint32 // how many were copied before
	payload []byte // of the buffer that was parsed
}

// errMessage is of bytes that the kernel would not have sent.
var errMessage = errors.New("not a message of nfnetlink_log")

// parseMessages calls fn with every packet of a datagram.
func parseMessages(b []byte, fn func(logged)) error {
	for len(b) >= unix.SizeofNlMsghdr {
		size := int(binary.NativeEndian.Uint32(b))
		kind := binary.NativeEndian.Uint16(b[4:])
		if size < unix.SizeofNlMsghdr || size > len(b) {
			return errMessage
		}
		if kind == ulogPacket {
			l, err := parseLogged(b[unix.SizeofNlMsghdr:size])
			if err != nil {
				return err
			}
			fn(l)
		} else if kind == unix.NLMSG_OVERRUN || kind == unix.NLMSG_ERROR {
			return errMessage
		}
		b = b[min(len(b), align(size)):]
	}
	if len(b) != 0 {
		return errMessage
	}
	return nil
}

// parseLogged reads the message of one packet.
func parseLogged(b []byte) (l logged, err error) {
	const generic = 4 // family, version and group
	if len(b) < generic {
		return l, errMessage
	}
	var header, numbered bool
	for b = b[generic:]; len(b) >= unix.SizeofNlAttr; {
		size := int(binary.NativeEndian.Uint16(b))
		kind := binary.NativeEndian.Uint16(b[2:]) & 0x3fff // without the flags
		if size < unix.SizeofNlAttr || size > len(b) {
			return l, errMessage
		}
		value := b[unix.SizeofNlAttr:size]
		switch {
		case kind == attrPacketHeader && len(value) >= 3:
			l.hook, header = value[2], true
		case kind == attrSequence && len(value) == 4:
			l.seq, numbered = binary.BigEndian.Uint32(value), true
		case kind == attrPayload:
			l.payload = value
		}
		b = b[min(len(b), align(size)):]
	}
	if len(b) != 0 || !header || !numbered {
		return l, errMessage
	}
	return l, nil
}

func align(n int) int { return (n + 3) &^ 3 }

// tap is the socket that the kernel copies headers to.
type tap struct {
	conn  *netlink.Conn
	group uint16
	buf   [64 << 10]byte

	first bool   // a message has been read
	next  uint32 // the number of the next
}

// groups is how many groups of the machine are tried for one that is free.
const groups = 64

// openTap binds a group that nobody has. netns is an open namespace, or 0.
func openTap(name string, netns, buffer int) (*tap, error) {
	h := fnv.New32a()
	h.Write([]byte(name))
	// Low numbers are what people write into rules by hand.
	start := 1024 + h.Sum32()%60000
	var err error
	for i := range uint32(groups) {
		t := &tap{group: uint16(start + i)}
		if err = t.open(netns, buffer); err == nil {
			return t, nil
		}
		// A group that another socket has bound is EPERM, as is a want of rights.
		if !errors.Is(err, unix.EBUSY) && !errors.Is(err, unix.EPERM) {
			return nil, fmt.Errorf("bind group %d of nfnetlink_log: %w", t.group, err)
		}
	}
	return nil, fmt.Errorf("bind a group of nfnetlink_log: %d to %d have other readers, or the right CAP_NET_ADMIN is missing: %w", start, start+groups-1, err)
}

func (t *tap) open(netns, buffer int) error {
	c, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{NetNS: netns})
	if err != nil {
		return err
	}
	// The forced size counts where the machine's maximum is less, and needs rights
	// that binding needs as well.
	if err := c.SetReadBuffer(buffer); err != nil {
		c.Close()
		return err
	}
	mode := append(binary.BigEndian.AppendUint32(nil, snapLen), copyPacket, 0)
	attrs, err := netlink.MarshalAttributes([]netlink.Attribute{
		{Type: cfgCommand, Data: []byte{commandBind}},
		{Type: cfgMode, Data: mode},
		{Type: cfgBuffer, Data: binary.BigEndian.AppendUint32(nil, 512)}, // a header and its attributes have 200
		{Type: cfgTimeout, Data: binary.BigEndian.AppendUint32(nil, 1)},  // hundredths of a second
		{Type: cfgThresh, Data: binary.BigEndian.AppendUint32(nil, 1)},
		{Type: cfgFlags, Data: binary.BigEndian.AppendUint16(nil, flagSequence)},
	})
	if err != nil {
		c.Close()
		return err
	}
	head := binary.BigEndian.AppendUint16([]byte{unix.AF_UNSPEC, unix.NFNETLINK_V0}, t.group)
	// One message: until there are rules for the group nothing but its answer comes.
	if _, err := c.Execute(netlink.Message{
		Header: netlink.Header{Type: ulogConfig, Flags: netlink.Request | netlink.Acknowledge},
		Data:   append(head, attrs...),
	}); err != nil {
		c.Close()
		return err
	}
	t.conn = c
	return nil
}

// What tap.read tells beside packets.
type tapEvent int

const (
	tapMissing tapEvent = iota // there were packets that were not handed over
	tapDrained                 // all that there is has been read
)

// read calls packet for every packet and event for what else there is, until the
// socket is closed or fails.
func (t *tap) read(packet func(logged), event func(tapEvent)) error {
	raw, err := t.conn.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		for {
			n, from, err := unix.Recvfrom(int(fd), t.buf[:], unix.MSG_DONTWAIT)
			switch {
			case errors.Is(err, unix.EINTR):
				continue
			case errors.Is(err, unix.EAGAIN):
				event(tapDrained)
				return false
			case errors.Is(err, unix.ENOBUFS):
				event(tapMissing)
				continue
			case err != nil:
				failed = os.NewSyscallError("recvfrom", err)
				return true
			}
			// Only the kernel is believed.
			if nl, ok := from.(*unix.SockaddrNetlink); !ok || nl.Pid != 0 {
				continue
			}
			if failed = t.datagram(t.buf[:n], packet, event); failed != nil {
				return true
			}
		}
	})
	return errors.Join(failed, err)
}

// datagram parses one, and finds out by the numbers whether there was one between.
func (t *tap) datagram(b []byte, packet func(logged), event func(tapEvent)) error {
	return parseMessages(b, func(l logged) {
		if t.first && l.seq != t.next {
			event(tapMissing)
		}
		t.first, t.next = true, l.seq+1
		packet(l)
	})
}

func (t *tap) close() error { return t.conn.Close() }

// portID is the address of a netlink socket, which is in the notifications of what
// it changed.
func portID(c *netlink.Conn) (uint32, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var id uint32
	var failed error
	err = raw.Control(func(fd uintptr) {
		var sa unix.Sockaddr
		if sa, failed = unix.Getsockname(int(fd)); failed != nil {
			return
		}
		if nl, ok := sa.(*unix.SockaddrNetlink); ok {
			id = nl.Pid
		} else {
			failed = syscall.EAFNOSUPPORT
		}
	})
	return id, errors.Join(failed, err)
}
