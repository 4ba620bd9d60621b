package attach

import (
	"encoding/binary"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Generic netlink in the little that one command and its answer need;
// docs/decisions/attach-nbd.md says why it is not a library's. Everything here
// goes through package unix, for use in isolation.

const (
	// netlinkTimeout is for an answer, which is there when the request was sent: a
	// command is done in the system call that sends it.
	netlinkTimeout = 5
	// maxNetlink bounds one message of the kernel's: a family's description is the
	// longest, some 500 bytes.
	maxNetlink = 8 << 10
	nlAlign    = 4
	// genlHeader is struct genlmsghdr: command, version, and two bytes of nothing.
	genlHeader = 4
)

// genl is a socket for the commands of one family.
type genl struct {
	fd     int
	family uint16
	seq    uint32
}

// openGenl finds a family. Errors: unix.ENOENT when the kernel has none of that
// name and can load no module for it.
func openGenl(family string) (*genl, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_GENERIC)
	if err != nil {
		return nil, fmt.Errorf("open netlink socket: %w", err)
	}
	g := &genl{fd: fd, family: unix.GENL_ID_CTRL}
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: netlinkTimeout}); err != nil {
		g.close()
		return nil, err
	}
	answer, err := g.call(unix.CTRL_CMD_GETFAMILY, attrString(unix.CTRL_ATTR_FAMILY_NAME, family))
	if err == nil {
		var id []byte
		if id, err = attrOf(answer, unix.CTRL_ATTR_FAMILY_ID, 2); err == nil {
			g.family = binary.NativeEndian.Uint16(id)
			return g, nil
		}
	}
	g.close()
	return nil, fmt.Errorf("netlink family %q: %w", family, err)
}

func (g *genl) close() { unix.Close(g.fd) }

// call sends a command and returns the attributes of the kernel's answer, nil
// when it only says that it is done.
func (g *genl) call(cmd uint8, attrs []byte) ([]byte, error) {
	g.seq++
	const version = 1 // of "nbd"; the controller's is not looked at
	head := unix.SizeofNlMsghdr + genlHeader
	msg := binary.NativeEndian.AppendUint32(nil, uint32(head+len(attrs)))
	msg = binary.NativeEndian.AppendUint16(msg, g.family)
	msg = binary.NativeEndian.AppendUint16(msg, unix.NLM_F_REQUEST|unix.NLM_F_ACK)
	msg = binary.NativeEndian.AppendUint32(msg, g.seq)
	msg = binary.NativeEndian.AppendUint32(msg, 0)
	msg = append(msg, cmd, version, 0, 0)
	msg = append(msg, attrs...)
	if err := unix.Sendto(g.fd, msg, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return nil, fmt.Errorf("send: %w", err)
	}
	var answer []byte
	buf := make([]byte, maxNetlink)
	for {
		n, from, err := unix.Recvfrom(g.fd, buf, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("receive: %w", err)
		}
		if sender, ok := from.(*unix.SockaddrNetlink); !ok || sender.Pid != 0 {
			continue // not the kernel
		}
		done, err := g.messages(buf[:n], &answer)
		if done || err != nil {
			return answer, err
		}
	}
}

// messages takes the messages of one datagram apart; done says that the last one
// of an answer is among them.
func (g *genl) messages(b []byte, answer *[]byte) (done bool, err error) {
	for len(b) >= unix.SizeofNlMsghdr {
		size := int(binary.NativeEndian.Uint32(b[0:]))
		if size < unix.SizeofNlMsghdr || size > len(b) {
			return false, fmt.Errorf("netlink message of %d bytes in %d", size, len(b))
		}
		typ, seq, body := binary.NativeEndian.Uint16(b[4:]), binary.NativeEndian.Uint32(b[8:]), b[unix.SizeofNlMsghdr:size]
		switch {
		case seq != g.seq:
		case typ == unix.NLMSG_ERROR && len(body) >= 4:
			if errno := -int32(binary.NativeEndian.Uint32(body)); errno != 0 {
				return true, unix.Errno(errno)
			}
			return true, nil
		case typ == g.family && len(body) >= genlHeader:
			*answer = append([]byte(nil), body[genlHeader:]...)
		}
		b = b[min(aligned(size), len(b)):]
	}
	return false, nil
}

func aligned(n int) int { return (n + nlAlign - 1) &^ (nlAlign - 1) }

// attr encodes an attribute.
func attr(typ uint16, value []byte) []byte {
	b := make([]byte, unix.SizeofNlAttr, unix.SizeofNlAttr+aligned(len(value)))
	binary.NativeEndian.PutUint16(b[0:], uint16(unix.SizeofNlAttr+len(value)))
	binary.NativeEndian.PutUint16(b[2:], typ)
	b = append(b, value...)
	return append(b, make([]byte, aligned(len(value))-len(value))...)
}

func attrString(typ uint16, s string) []byte { return attr(typ, append([]byte(s), 0)) }

func attrUint32(typ uint16, v uint32) []byte {
	return attr(typ, binary.NativeEndian.AppendUint32(nil, v))
}

func attrUint64(typ uint16, v uint64) []byte {
	return attr(typ, binary.NativeEndian.AppendUint64(nil, v))
}

// attrOf finds an attribute of size bytes.
func attrOf(b []byte, typ uint16, size int) ([]byte, error) {
	for len(b) >= unix.SizeofNlAttr {
		n := int(binary.NativeEndian.Uint16(b[0:]))
		if n < unix.SizeofNlAttr || n > len(b) {
			return nil, fmt.Errorf("netlink attribute of %d bytes in %d", n, len(b))
		}
		if binary.NativeEndian.Uint16(b[2:]) == typ {
			if n != unix.SizeofNlAttr+size {
				return nil, fmt.Errorf("netlink attribute %d has %d bytes, want %d", typ, n-unix.SizeofNlAttr, size)
			}
			return b[unix.SizeofNlAttr:n], nil
		}
		b = b[min(aligned(n), len(b)):]
	}
	return nil, fmt.Errorf("netlink answer without attribute %d", typ)
}
