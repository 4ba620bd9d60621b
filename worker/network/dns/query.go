// Package dns answers a guest's questions for names: for those that are allowed, with
// addresses that were admitted before they are told, and no others. It is not a
// resolver: what it does not know it asks the node's.
//
// The guest is hostile, so a question is one small datagram of one form, and what is
// done for one guest at a time is bounded.
package dns

import (
	"encoding/binary"
	"errors"
	"net/netip"
	"strings"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	// maxQuery is the longest question that is read: a name of 255 bytes with its
	// header and an OPT record has less than 300.
	maxQuery = 512
	// maxAnswer is the longest answer, what every client takes without saying so.
	maxAnswer = 512
)

// query is one question.
type query struct {
	id        uint16
	recursion bool
	name      string // lower case, without a dot at the end; "" is the root
	wire      []byte // as asked: some clients compare its case with the answer's
	kind      dnsmessage.Type
	class     dnsmessage.Class
}

// errQuery is what is no question: it is not answered.
var errQuery = errors.New("no question")

// parseQuery reads a datagram. It takes a header, one question and nothing it would
// have to understand: what follows the question is not looked at.
func parseQuery(b []byte) (query, error) {
	const header = 12
	if len(b) < header || len(b) > maxQuery {
		return query{}, errQuery
	}
	flags := binary.BigEndian.Uint16(b[2:])
	// QR and opcode are zero; one question, no answer, no authority.
	if flags&0xf800 != 0 || binary.BigEndian.Uint16(b[4:]) != 1 ||
		binary.BigEndian.Uint32(b[6:]) != 0 {
		return query{}, errQuery
	}
	q := query{id: binary.BigEndian.Uint16(b), recursion: flags&0x0100 != 0}
	rest := b[header:]
	labels := make([]string, 0, 8)
	for size := 1; ; { // with the root's byte
		if len(rest) == 0 {
			return query{}, errQuery
		}
		n := int(rest[0])
		if n == 0 {
			rest = rest[1:]
			break
		}
		size += n + 1
		if n > 63 || size > MaxName+2 || len(rest) < 1+n { // a pointer is more than 63
			return query{}, errQuery
		}
		for _, c := range rest[1 : 1+n] {
			if !inLabel(c) {
				return query{}, errQuery
			}
		}
		labels = append(labels, strings.ToLower(string(rest[1:1+n])))
		rest = rest[1+n:]
	}
	if len(rest) < 4 {
		return query{}, errQuery
	}
	q.name = strings.Join(labels, ".")
	q.wire = b[header : len(b)-len(rest)]
	q.kind = dnsmessage.Type(binary.BigEndian.Uint16(rest))
	q.class = dnsmessage.Class(binary.BigEndian.Uint16(rest[2:]))
	return q, nil
}

// answer writes the answer to a question: as many of the addresses as maxAnswer
// has room for. Their owner is the name that was asked for, whatever aliases
// the node's resolver went through.
func (q query) answer(code dnsmessage.RCode, addrs []netip.Addr, ttl uint32) []byte {
	const header, record = 12, 16
	room := (maxAnswer - header - len(q.wire) - 4) / record
	addrs = addrs[:min(len(addrs), room)]
	b := make([]byte, header, maxAnswer)
	binary.BigEndian.PutUint16(b, q.id)
	flags := uint16(0x8080) | uint16(code)&0xf // an answer, recursion available
	if q.recursion {
		flags |= 0x0100
	}
	binary.BigEndian.PutUint16(b[2:], flags)
	binary.BigEndian.PutUint16(b[4:], 1)
	binary.BigEndian.PutUint16(b[6:], uint16(len(addrs)))
	b = append(b, q.wire...)
	b = binary.BigEndian.AppendUint16(b, uint16(q.kind))
	b = binary.BigEndian.AppendUint16(b, uint16(q.class))
	for _, a := range addrs {
		b = append(b, 0xc0, header) // the question's name
		b = binary.BigEndian.AppendUint16(b, uint16(dnsmessage.TypeA))
		b = binary.BigEndian.AppendUint16(b, uint16(dnsmessage.ClassINET))
		b = binary.BigEndian.AppendUint32(b, ttl)
		b = binary.BigEndian.AppendUint16(b, 4)
		b = append(b, a.AsSlice()...)
	}
	return b
}
