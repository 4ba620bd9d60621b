package nbd

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"time"
)

// RefusedError is a server's refusal of an option in the handshake.
type RefusedError struct {
	Option  uint32
	Code    uint32 // the protocol's NBD_REP_ERR_ value
	Message string // the server's own words, may be empty
}

func (e *RefusedError) Error() string {
	msg := e.Message
	if msg == "" {
		msg = "no reason given"
	}
	return fmt.Sprintf("nbd server refused option %d with %#x: %s", e.Option, e.Code, msg)
}

// Is makes a refusal for want of the export match ErrUnknownExport.
func (e *RefusedError) Is(target error) bool {
	return target == ErrUnknownExport && e.Code == repErrUnknown
}

// Dial connects to a server and chooses an export. ctx bounds the connection
// and the handshake only. Errors: *RefusedError, ctx's, and the network's.
func Dial(ctx context.Context, network, addr, export string) (*Client, error) {
	if len(export) > MaxName {
		return nil, fmt.Errorf("export name has %d bytes, at most %d are allowed", len(export), MaxName)
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, network, addr)
	if err != nil {
		return nil, fmt.Errorf("dial nbd server: %w", err)
	}
	// A deadline in the past unblocks the handshake when ctx ends.
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	offer, err := choose(conn, export)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("choose nbd export %q at %s: %w", export, addr, err)
	}
	return newClient(conn, offer)
}

// offer is what the server said about the export.
type offer struct {
	name       string // as the server names it, or as asked for
	size       int64
	maxPayload int64
}

// choose runs the client's side of the handshake. It asks for no structured
// replies: a simple reply is a whole read or an error, and that is all a
// reader that must never see half an answer wants to understand.
func choose(rw io.ReadWriter, export string) (offer, error) {
	var b [18]byte
	if _, err := io.ReadFull(rw, b[:]); err != nil {
		return offer{}, fmt.Errorf("read greeting: %w", err)
	}
	if binary.BigEndian.Uint64(b[0:]) != magicInit || binary.BigEndian.Uint64(b[8:]) != magicOption {
		return offer{}, errors.New("greeting is not that of a newstyle nbd server")
	}
	flags := binary.BigEndian.Uint16(b[16:])
	if flags&flagFixedNewstyle == 0 {
		return offer{}, errors.New("nbd server does not speak fixed newstyle")
	}
	msg := binary.BigEndian.AppendUint32(nil, uint32(flags&(flagFixedNewstyle|flagNoZeroes)))
	msg = binary.BigEndian.AppendUint64(msg, magicOption)
	msg = binary.BigEndian.AppendUint32(msg, optGo)
	msg = binary.BigEndian.AppendUint32(msg, uint32(4+len(export)+2+4))
	msg = binary.BigEndian.AppendUint32(msg, uint32(len(export)))
	msg = append(msg, export...)
	for _, v := range []uint16{2, infoName, infoBlockSize} {
		msg = binary.BigEndian.AppendUint16(msg, v)
	}
	if _, err := rw.Write(msg); err != nil {
		return offer{}, err
	}
	return readOffer(rw, export)
}

// readOffer reads the replies to GO up to its acknowledgement.
func readOffer(r io.Reader, export string) (offer, error) {
	o := offer{name: export, size: -1, maxPayload: MaxPayload}
	for range maxOptions {
		typ, data, err := readOptionReply(r)
		switch {
		case err != nil:
			return offer{}, err
		case typ&repErr != 0:
			return offer{}, &RefusedError{Option: optGo, Code: typ, Message: truncate(string(data))}
		case typ == repInfo:
			if err := o.apply(data); err != nil {
				return offer{}, err
			}
		case typ == repAck && o.size < 0:
			return offer{}, errors.New("nbd server acknowledged without telling a size")
		case typ == repAck:
			return o, nil
		default:
			return offer{}, fmt.Errorf("unexpected reply type %#x", typ)
		}
	}
	return offer{}, fmt.Errorf("nbd server sent %d replies without an acknowledgement", maxOptions)
}

func readOptionReply(r io.Reader) (typ uint32, data []byte, err error) {
	var b [optionReplySize]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return 0, nil, fmt.Errorf("read option reply: %w", err)
	}
	n := binary.BigEndian.Uint32(b[16:])
	if binary.BigEndian.Uint64(b[0:]) != magicOptionReply || binary.BigEndian.Uint32(b[8:]) != optGo || n > maxOptionLen {
		return 0, nil, errors.New("malformed option reply")
	}
	data = make([]byte, n)
	if _, err := io.ReadFull(r, data); err != nil {
		return 0, nil, fmt.Errorf("read option reply: %w", err)
	}
	return binary.BigEndian.Uint32(b[12:]), data, nil
}

// apply takes one information reply; unknown kinds are passed over, as the
// protocol wants.
func (o *offer) apply(data []byte) error {
	if len(data) < 2 {
		return errors.New("information reply without a type")
	}
	body := data[2:]
	switch binary.BigEndian.Uint16(data) {
	case infoExport:
		if len(body) != 10 {
			return fmt.Errorf("export information has %d bytes, want 10", len(body))
		}
		size := binary.BigEndian.Uint64(body)
		if size > math.MaxInt64 {
			return fmt.Errorf("export of %d bytes is too large", size)
		}
		o.size = int64(size)
	case infoName:
		o.name = string(body)
	case infoBlockSize:
		if len(body) != 12 {
			return fmt.Errorf("block size information has %d bytes, want 12", len(body))
		}
		if n := int64(binary.BigEndian.Uint32(body[8:])); n >= preferredBlock {
			o.maxPayload = min(o.maxPayload, n)
		}
	}
	return nil
}
