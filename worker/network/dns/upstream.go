package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

const (
	maxReply    = 4096 // of a resolver, by UDP or TCP
	maxRecords  = 128  // of a reply that are looked at
	maxAliases  = 16   // from the name to its addresses
	maxAddrs    = 30   // of a name; an answer of 512 bytes has room for fewer
	maxKnown    = 4096 // names whose answers are kept
	maxConf     = 64 << 10
	maxServers  = 3 // of resolv.conf, as in the C library
	tryFor      = 2 * time.Second
	lookupFor   = 5 * time.Second // less than a client waits for its second try
	keepNothing = 2 * time.Second // an answer that a name does not exist
)

// ErrNoName says that a name, or an address of it, does not exist.
var ErrNoName = errors.New("no such name")

// Upstream asks the node's resolvers. One is shared by all sandboxes of a node, and
// bounds what they ask together. Its methods may be called at once.
type Upstream struct {
	servers []netip.AddrPort // none is what resolv.conf says
	slots   chan struct{}
	end     context.Context // of what is being asked when Close is called
	stop    context.CancelFunc
	tasks   sync.WaitGroup

	mu    sync.Mutex
	known map[string]*entry
}

// entry is a name that was asked for, or is being asked for while done is open.
type entry struct {
	done  chan struct{}
	addrs []netip.Addr
	until time.Time
	err   error
}

// NewUpstream returns one that asks these servers, or those of /etc/resolv.conf, at
// most atOnce names at a time.
func NewUpstream(servers []netip.AddrPort, atOnce int) *Upstream {
	u := &Upstream{servers: servers, slots: make(chan struct{}, atOnce), known: map[string]*entry{}}
	u.end, u.stop = context.WithCancel(context.Background())
	return u
}

// Close ends what is being asked. Every Server that uses it was closed before.
func (u *Upstream) Close() {
	u.stop()
	u.tasks.Wait()
}

// Lookup returns the IPv4 addresses of a name and how long they hold. Those who ask
// for one name at a time share one question. Errors: ErrNoName; another is of the
// resolvers and may pass.
func (u *Upstream) Lookup(ctx context.Context, name string) ([]netip.Addr, time.Duration, error) {
	u.mu.Lock()
	e := u.known[name]
	if e != nil && e.over(time.Now()) {
		e = nil
	}
	if e == nil {
		e = &entry{done: make(chan struct{})}
		u.makeRoom()
		u.known[name] = e
		u.tasks.Go(func() { u.ask(name, e) })
	}
	u.mu.Unlock()
	select {
	case <-e.done:
		return e.addrs, time.Until(e.until), e.err
	case <-ctx.Done():
		return nil, 0, ctx.Err()
	}
}

// over reports whether an entry is answered and no longer holds.
func (e *entry) over(now time.Time) bool {
	select {
	case <-e.done:
		return !now.Before(e.until)
	default:
		return false
	}
}

// makeRoom forgets what is over, and any other answer when that is not enough.
func (u *Upstream) makeRoom() {
	if len(u.known) < maxKnown {
		return
	}
	now := time.Now()
	for name, e := range u.known {
		if e.over(now) {
			delete(u.known, name)
		}
	}
	for name := range u.known {
		if len(u.known) < maxKnown {
			return
		}
		delete(u.known, name)
	}
}

// ask fills an entry. It has no caller's context: others wait for it too.
func (u *Upstream) ask(name string, e *entry) {
	ctx, cancel := context.WithTimeout(u.end, lookupFor)
	defer cancel()
	defer close(e.done)
	select {
	case u.slots <- struct{}{}:
		defer func() { <-u.slots }()
	case <-ctx.Done():
		e.err = fmt.Errorf("look %s up: too many names are asked for at once", name)
		return
	}
	addrs, ttl, err := u.lookup(ctx, name)
	e.addrs, e.err, e.until = addrs, err, time.Now().Add(ttl)
	if errors.Is(err, ErrNoName) {
		e.until = time.Now().Add(keepNothing)
	}
}

func (u *Upstream) lookup(ctx context.Context, name string) ([]netip.Addr, time.Duration, error) {
	servers := u.servers
	if len(servers) == 0 {
		var err error
		if servers, err = nodeServers("/etc/resolv.conf"); err != nil {
			return nil, 0, err
		}
	}
	err := errors.New("the node names no resolver")
	for range 2 {
		for _, s := range servers {
			var addrs []netip.Addr
			var ttl time.Duration
			addrs, ttl, err = exchange(ctx, s, name)
			if err == nil || errors.Is(err, ErrNoName) {
				return addrs, ttl, err
			}
			if ctx.Err() != nil {
				break
			}
		}
	}
	return nil, 0, fmt.Errorf("look %s up: %w", name, err)
}

// exchange asks one server, by TCP when the answer is too long for a datagram.
func exchange(ctx context.Context, server netip.AddrPort, name string) ([]netip.Addr, time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, tryFor)
	defer cancel()
	q, id, err := question(name)
	if err != nil {
		return nil, 0, err
	}
	for _, network := range []string{"udp", "tcp"} {
		var d net.Dialer
		c, err := d.DialContext(ctx, network, server.String())
		if err != nil {
			return nil, 0, err
		}
		deadline, _ := ctx.Deadline()
		c.SetDeadline(deadline)
		// Close ends a read that waits.
		stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Now()) })
		addrs, ttl, err := ask(c, q, id, name, network == "tcp")
		stop()
		c.Close()
		if !errors.Is(err, errTruncated) {
			return addrs, ttl, err
		}
	}
	return nil, 0, errTruncated
}

// question is a query for the IPv4 addresses of a name. Its id is from a source
// that cannot be guessed, as is the port that the kernel sends it from.
func question(name string) ([]byte, uint16, error) {
	n, err := dnsmessage.NewName(name + ".")
	if err != nil {
		return nil, 0, err
	}
	id := uint16(rand.Uint32())
	m := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: id, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: n, Type: dnsmessage.TypeA, Class: dnsmessage.ClassINET}},
	}
	b, err := m.Pack()
	return b, id, err
}

var (
	errTruncated = errors.New("the resolver's answer is cut off")
	errOther     = errors.New("an answer to another question")
)

// ask sends a question on a connection and reads until its answer comes: others are
// passed over, since anybody may send a datagram.
func ask(c net.Conn, q []byte, id uint16, name string, stream bool) ([]netip.Addr, time.Duration, error) {
	if stream {
		q = append(binary.BigEndian.AppendUint16(nil, uint16(len(q))), q...)
	}
	if _, err := c.Write(q); err != nil {
		return nil, 0, err
	}
	buf := make([]byte, maxReply)
	for {
		n, err := readReply(c, buf, stream)
		if err != nil {
			return nil, 0, err
		}
		addrs, ttl, err := parseReply(buf[:n], id, name)
		if stream || !errors.Is(err, errOther) {
			return addrs, ttl, err
		}
	}
}

func readReply(c net.Conn, buf []byte, stream bool) (int, error) {
	if !stream {
		return c.Read(buf)
	}
	if _, err := io.ReadFull(c, buf[:2]); err != nil {
		return 0, err
	}
	n := int(binary.BigEndian.Uint16(buf))
	if n > len(buf) {
		return 0, fmt.Errorf("an answer of %d bytes; %d are the most", n, len(buf))
	}
	return io.ReadFull(c, buf[:n])
}

// parseReply reads the addresses of a name, through its aliases, from an answer.
func parseReply(b []byte, id uint16, name string) ([]netip.Addr, time.Duration, error) {
	var p dnsmessage.Parser
	h, err := p.Start(b)
	if err != nil || h.ID != id || !h.Response {
		return nil, 0, errOther
	}
	q, err := p.Question()
	if err != nil || lower(q.Name) != name || q.Type != dnsmessage.TypeA || q.Class != dnsmessage.ClassINET {
		return nil, 0, errOther
	}
	switch {
	case h.Truncated:
		return nil, 0, errTruncated
	case h.RCode == dnsmessage.RCodeNameError:
		return nil, 0, ErrNoName
	case h.RCode != dnsmessage.RCodeSuccess:
		return nil, 0, fmt.Errorf("the resolver answers %v", h.RCode)
	}
	if err := p.SkipAllQuestions(); err != nil {
		return nil, 0, err
	}
	return addresses(&p, name)
}

type alias struct {
	to  string
	ttl uint32
}

// addresses follows the aliases of an answer section from name to its addresses.
func addresses(p *dnsmessage.Parser, name string) ([]netip.Addr, time.Duration, error) {
	aliases := map[string]alias{}
	found := map[string][]netip.Addr{}
	lives := map[string]uint32{}
	for range maxRecords {
		h, err := p.AnswerHeader()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			break
		}
		if err != nil {
			return nil, 0, err
		}
		owner := lower(h.Name)
		switch h.Type {
		case dnsmessage.TypeA:
			r, err := p.AResource()
			if err != nil {
				return nil, 0, err
			}
			if old, ok := lives[owner]; !ok || h.TTL < old {
				lives[owner] = h.TTL
			}
			if len(found[owner]) < maxAddrs {
				found[owner] = append(found[owner], netip.AddrFrom4(r.A))
			}
		case dnsmessage.TypeCNAME:
			r, err := p.CNAMEResource()
			if err != nil {
				return nil, 0, err
			}
			aliases[owner] = alias{lower(r.CNAME), h.TTL}
		default:
			if err := p.SkipAnswer(); err != nil {
				return nil, 0, err
			}
		}
	}
	ttl := uint32(1 << 31)
	for range maxAliases {
		if addrs := found[name]; len(addrs) > 0 {
			return addrs, time.Duration(min(ttl, lives[name], 1<<20)) * time.Second, nil
		}
		next, ok := aliases[name]
		if !ok {
			break
		}
		ttl = min(ttl, next.ttl)
		name = next.to
	}
	return nil, 0, ErrNoName
}

func lower(n dnsmessage.Name) string {
	return strings.ToLower(strings.TrimSuffix(n.String(), "."))
}

// nodeServers reads the resolvers of a resolv.conf.
func nodeServers(path string) ([]netip.AddrPort, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxConf))
	if err != nil {
		return nil, err
	}
	var out []netip.AddrPort
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		if a, err := netip.ParseAddr(fields[1]); err == nil && len(out) < maxServers {
			out = append(out, netip.AddrPortFrom(a, 53))
		}
	}
	return out, nil
}
