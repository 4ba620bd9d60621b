package nbd

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// errHandshakeOver says that the client ended the handshake politely.
var errHandshakeOver = errors.New("client ended the handshake")

// session is what a finished handshake agreed on.
type session struct {
	name       string
	dev        Device
	structured bool
}

// transmissionFlags are the export's; DF means something only with structured
// replies.
func (s *session) transmissionFlags() uint16 {
	if s.structured {
		return exportFlags | flagSendDF
	}
	return exportFlags
}

// haggler runs the server's side of the handshake.
type haggler struct {
	devices  *opened
	r        io.Reader
	w        io.Writer
	noZeroes bool
	s        session
}

// haggle greets a client and answers its options until it has chosen an export.
func haggle(ctx context.Context, devices *opened, r io.Reader, w io.Writer) (*session, error) {
	h := &haggler{devices: devices, r: r, w: w}
	if err := h.greet(); err != nil {
		return nil, err
	}
	for range maxOptions {
		opt, data, tooBig, err := h.readOption()
		if err != nil {
			return nil, err
		}
		if tooBig {
			err = h.reply(opt, repErrTooBig, []byte("option data is too long"))
		} else {
			var chosen bool
			if chosen, err = h.option(ctx, opt, data); err == nil && chosen {
				return &h.s, nil
			}
		}
		if err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("client sent %d options without choosing an export", maxOptions)
}

func (h *haggler) greet() error {
	b := binary.BigEndian.AppendUint64(nil, magicInit)
	b = binary.BigEndian.AppendUint64(b, magicOption)
	b = binary.BigEndian.AppendUint16(b, flagFixedNewstyle|flagNoZeroes)
	if _, err := h.w.Write(b); err != nil {
		return err
	}
	var f [4]byte
	if _, err := io.ReadFull(h.r, f[:]); err != nil {
		return fmt.Errorf("read client flags: %w", err)
	}
	flags := binary.BigEndian.Uint32(f[:])
	if flags&^(flagFixedNewstyle|flagNoZeroes) != 0 || flags&flagFixedNewstyle == 0 {
		return fmt.Errorf("client flags %#x: want fixed newstyle and nothing unknown", flags)
	}
	h.noZeroes = flags&flagNoZeroes != 0
	return nil
}

// readOption returns the next option. Data beyond maxOptionLen is skipped, so
// that the client can be told, up to the longest payload there is.
func (h *haggler) readOption() (opt uint32, data []byte, tooBig bool, err error) {
	var b [optionSize]byte
	if _, err := io.ReadFull(h.r, b[:]); err != nil {
		return 0, nil, false, fmt.Errorf("read option: %w", err)
	}
	if m := binary.BigEndian.Uint64(b[0:]); m != magicOption {
		return 0, nil, false, fmt.Errorf("option has magic %#x", m)
	}
	opt = binary.BigEndian.Uint32(b[8:])
	n := binary.BigEndian.Uint32(b[12:])
	switch {
	case n > MaxPayload:
		return 0, nil, false, fmt.Errorf("option %d has %d bytes of data, at most %d are read", opt, n, MaxPayload)
	case n > maxOptionLen:
		if _, err := io.CopyN(io.Discard, h.r, int64(n)); err != nil {
			return 0, nil, false, fmt.Errorf("skip option %d: %w", opt, err)
		}
		return opt, nil, true, nil
	}
	data = make([]byte, n)
	if _, err := io.ReadFull(h.r, data); err != nil {
		return 0, nil, false, fmt.Errorf("read data of option %d: %w", opt, err)
	}
	return opt, data, false, nil
}

// option answers one option and reports whether transmission begins.
func (h *haggler) option(ctx context.Context, opt uint32, data []byte) (bool, error) {
	switch opt {
	case optExportName:
		return true, h.exportName(ctx, string(data))
	case optAbort:
		if err := h.reply(opt, repAck, nil); err != nil {
			return false, err
		}
		return false, errHandshakeOver
	case optList:
		return false, h.list(data)
	case optInfo, optGo:
		return h.info(ctx, opt, data)
	case optStructuredReply:
		if len(data) != 0 {
			return false, h.reply(opt, repErrInvalid, []byte("STRUCTURED_REPLY has no data"))
		}
		h.s.structured = true
		return false, h.reply(opt, repAck, nil)
	}
	// STARTTLS is here too: the socket lies in a private folder.
	return false, h.reply(opt, repErrUnsup, []byte("option is not supported"))
}

func (h *haggler) reply(opt, typ uint32, data []byte) error {
	b := binary.BigEndian.AppendUint64(make([]byte, 0, optionReplySize+len(data)), magicOptionReply)
	b = binary.BigEndian.AppendUint32(b, opt)
	b = binary.BigEndian.AppendUint32(b, typ)
	b = binary.BigEndian.AppendUint32(b, uint32(len(data)))
	_, err := h.w.Write(append(b, data...))
	return err
}

// exportName serves the old way to choose, which has no error reply: the
// connection just ends.
func (h *haggler) exportName(ctx context.Context, name string) error {
	dev, err := h.devices.open(ctx, name)
	if err != nil {
		return err
	}
	h.s.name, h.s.dev = name, dev
	b := binary.BigEndian.AppendUint64(nil, uint64(dev.Size()))
	b = binary.BigEndian.AppendUint16(b, h.s.transmissionFlags())
	if !h.noZeroes {
		b = append(b, make([]byte, 124)...)
	}
	_, err = h.w.Write(b)
	return err
}

func (h *haggler) list(data []byte) error {
	if len(data) != 0 {
		return h.reply(optList, repErrInvalid, []byte("LIST has no data"))
	}
	var names []string
	if h.devices.srv.Names != nil {
		names = h.devices.srv.Names()
	}
	for _, name := range names {
		b := binary.BigEndian.AppendUint32(nil, uint32(len(name)))
		if err := h.reply(optList, repServer, append(b, name...)); err != nil {
			return err
		}
	}
	return h.reply(optList, repAck, nil)
}

// info answers INFO and GO. Block sizes are always told: minimum 1 means that
// no client needs to have asked.
func (h *haggler) info(ctx context.Context, opt uint32, data []byte) (bool, error) {
	name, wantName, ok := parseInfo(data)
	if !ok {
		return false, h.reply(opt, repErrInvalid, []byte("malformed INFO or GO"))
	}
	dev, err := h.devices.open(ctx, name)
	if err != nil {
		code := uint32(repErrPlatform)
		if errors.Is(err, ErrUnknownExport) {
			code = repErrUnknown
		}
		return false, h.reply(opt, code, []byte(truncate(err.Error())))
	}
	h.s.name, h.s.dev = name, dev
	infos := [][]byte{h.exportInfo(), blockSizeInfo()}
	if wantName {
		infos = append(infos, append(binary.BigEndian.AppendUint16(nil, infoName), name...))
	}
	for _, b := range infos {
		if err := h.reply(opt, repInfo, b); err != nil {
			return false, err
		}
	}
	return opt == optGo, h.reply(opt, repAck, nil)
}

func (h *haggler) exportInfo() []byte {
	b := binary.BigEndian.AppendUint16(nil, infoExport)
	b = binary.BigEndian.AppendUint64(b, uint64(h.s.dev.Size()))
	return binary.BigEndian.AppendUint16(b, h.s.transmissionFlags())
}

func blockSizeInfo() []byte {
	b := binary.BigEndian.AppendUint16(nil, infoBlockSize)
	b = binary.BigEndian.AppendUint32(b, 1)
	b = binary.BigEndian.AppendUint32(b, preferredBlock)
	return binary.BigEndian.AppendUint32(b, MaxPayload)
}

// parseInfo reads the data of INFO and GO: name length, name, count of
// information requests, the requests.
func parseInfo(data []byte) (name string, wantName, ok bool) {
	if len(data) < 4 {
		return "", false, false
	}
	n := binary.BigEndian.Uint32(data)
	rest := data[4:]
	if n > MaxName || uint64(len(rest)) < uint64(n)+2 {
		return "", false, false
	}
	name, rest = string(rest[:n]), rest[n:]
	count := int(binary.BigEndian.Uint16(rest))
	rest = rest[2:]
	if len(rest) != 2*count {
		return "", false, false
	}
	for ; len(rest) > 0; rest = rest[2:] {
		wantName = wantName || binary.BigEndian.Uint16(rest) == infoName
	}
	return name, wantName, true
}
