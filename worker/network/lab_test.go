package network_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/dns/dnsmessage"

	"quarry/internal/need"
	"quarry/internal/netns"
	"quarry/worker/network"
	"quarry/worker/sandbox"
)

// insideLab says to the test's program that it runs in namespaces of its own.
const insideLab = "QUARRY_NETWORK_LAB"

// TestMain runs the tests in a network namespace that plays the node, so that nothing
// they do touches the machine's own interfaces and rules, and in a mount namespace,
// so that no mount of theirs is left on it.
func TestMain(m *testing.M) {
	if role := os.Getenv("QUARRY_NETWORK_ROLE"); role != "" {
		os.Exit(play(role))
	}
	if os.Geteuid() != 0 || os.Getenv(insideLab) != "" {
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), insideLab+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	runtime.LockOSThread() // whose end the death signal is about
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		os.Exit(exit.ExitCode())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// Addresses of the lab. The node is at 192.0.2.10; everything else is outside.
const (
	nodeAddr   = "192.0.2.10"
	routerAddr = "192.0.2.1"
	hostA      = "203.0.113.10"
	hostB      = "203.0.113.11"
	hostC      = "203.0.113.12"
	lanHost    = "10.50.0.5"
	metadata   = "169.254.169.254"
)

// world is the lab's outside: hosts that echo, and a resolver.
type world struct {
	ns   string // path of its namespace
	zone sync.Map
	asks atomic.Int64 // questions that the resolver got
	slow atomic.Int64 // nanoseconds that it waits
}

var theWorld = sync.OnceValues(makeWorld)

// lab returns the outside, which all tests of one run share.
func lab(t testing.TB) *world {
	t.Helper()
	need.Root(t)
	w, err := theWorld()
	if err != nil {
		t.Fatal(err)
	}
	w.slow.Store(0)
	return w
}

func makeWorld() (*world, error) {
	dir, err := os.MkdirTemp("", "netlab")
	if err != nil {
		return nil, err
	}
	w := &world{ns: filepath.Join(dir, "outside")}
	if err := netns.Make(w.ns); err != nil {
		return nil, err
	}
	if err := w.wire(); err != nil {
		return nil, fmt.Errorf("wire the lab: %w", err)
	}
	return w, w.serve()
}

func (w *world) wire() error {
	ns, err := os.Open(w.ns)
	if err != nil {
		return err
	}
	defer ns.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = "up0", 1450
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "up0", PeerNamespace: netlink.NsFd(int(ns.Fd()))}); err != nil {
		return err
	}
	set := func(name string, addrs ...string) error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		for _, a := range addrs {
			addr, err := netlink.ParseAddr(a)
			if err != nil {
				return err
			}
			if err := netlink.AddrAdd(link, addr); err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(link)
	}
	if err := errors.Join(set("lo"), set("up0", nodeAddr+"/24")); err != nil {
		return err
	}
	if err := netns.Do(w.ns, func() error {
		return errors.Join(set("lo", hostA+"/32", hostB+"/32", hostC+"/32", lanHost+"/32", metadata+"/32"), set("up0", routerAddr+"/24"),
			os.WriteFile("/proc/sys/net/ipv4/ip_unprivileged_port_start", []byte("0"), 0))
	}); err != nil {
		return err
	}
	if err := netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(routerAddr)}); err != nil {
		return err
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)
}

// serve starts what echoes, on TCP 80, 443 and 9000 and UDP 5000 and 5001 of every
// address, outside and on the node, and the resolver.
func (w *world) serve() error {
	start := func(hosts ...string) error {
		for _, p := range []string{"80", "443", "9000"} {
			l, err := net.Listen("tcp4", "0.0.0.0:"+p)
			if err != nil {
				return err
			}
			go echoTCP(l) // ends with the test's process
		}
		for _, host := range hosts { // an answer comes from where the question went to
			for _, p := range []string{"5000", "5001"} {
				c, err := net.ListenPacket("udp4", host+":"+p)
				if err != nil {
					return err
				}
				go echoUDP(c)
			}
		}
		return nil
	}
	return errors.Join(start(nodeAddr), netns.Do(w.ns, func() error { return start(hostA, hostB, hostC, lanHost, metadata, routerAddr) }), netns.Do(w.ns, func() error {
		c, err := net.ListenPacket("udp4", routerAddr+":53")
		if err == nil {
			go w.resolve(c)
		}
		return err
	}))
}

func echoTCP(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			io.Copy(c, c)
		}()
	}
}

func echoUDP(c net.PacketConn) {
	buf := make([]byte, 2048)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		c.WriteTo(buf[:n], from)
	}
}

// name makes the resolver answer a name.
func (w *world) name(name string, addrs ...string) { w.zone.Store(name, addrs) }

func (w *world) resolve(c net.PacketConn) {
	buf := make([]byte, 2048)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		w.asks.Add(1)
		var m dnsmessage.Message
		if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		go func() {
			time.Sleep(time.Duration(w.slow.Load()))
			m.Response, m.RecursionAvailable = true, true
			q := m.Questions[0].Name
			v, ok := w.zone.Load(strings.TrimSuffix(q.String(), "."))
			if !ok {
				m.RCode = dnsmessage.RCodeNameError
			} else {
				for _, a := range v.([]string) {
					m.Answers = append(m.Answers, dnsmessage.Resource{
						Header: dnsmessage.ResourceHeader{Name: q, Class: dnsmessage.ClassINET, TTL: 1},
						Body:   &dnsmessage.AResource{A: netip.MustParseAddr(a).As4()},
					})
				}
			}
			if b, err := m.Pack(); err == nil {
				c.WriteTo(b, from)
			}
		}()
	}
}

// open makes a network in a folder of the test.
func open(t testing.TB, cfg network.Config) *network.Network {
	t.Helper()
	if cfg.Folder == "" {
		cfg.Folder = t.TempDir()
	}
	cfg.Resolvers = []netip.AddrPort{netip.MustParseAddrPort(routerAddr + ":53")}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	n, err := network.New(context.Background(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Sweep(context.Background(), nil); err != nil {
			t.Error(err)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	})
	return n
}

// take gives a sandbox a network.
func take(t testing.TB, n *network.Network, id string, rules ...sandbox.Rule) guest {
	t.Helper()
	l, err := n.Take(context.Background(), id, sandbox.Policy{Allow: rules})
	if err != nil {
		t.Fatal(err)
	}
	return guest{l}
}

// guest is what a guest can do: everything, in its own namespace.
type guest struct{ *network.Link }

// patience is how long what is let through is waited for, on a machine that has much
// else to do; brief is how long what is not let through is seen not to come. Emulated
// machines say so and need longer.
const patience = time.Minute

var brief = func() time.Duration {
	if os.Getenv("QUARRY_NETWORK_SLOW") != "" {
		return 4 * time.Second
	}
	return 400 * time.Millisecond
}()

// dial connects by TCP and exchanges a few bytes.
func (g guest) dial(addr string, wait time.Duration) (net.Conn, error) {
	var c net.Conn
	err := netns.Do(g.NetnsPath, func() (err error) {
		c, err = net.DialTimeout("tcp4", addr, wait)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := exchangeFor(c, wait); err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// udp makes a socket that sends to one address.
func (g guest) udp(t testing.TB, addr string) net.Conn {
	t.Helper()
	var c net.Conn
	err := netns.Do(g.NetnsPath, func() (err error) {
		c, err = net.Dial("udp4", addr)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// exchange writes to what echoes and reads it back.
func exchange(c net.Conn) error { return exchangeFor(c, patience) }

func exchangeFor(c net.Conn, wait time.Duration) error {
	c.SetDeadline(time.Now().Add(wait))
	if _, err := c.Write([]byte("ping")); err != nil {
		return err
	}
	b := make([]byte, 4)
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	if string(b) != "ping" {
		return fmt.Errorf("got %q back", b)
	}
	return nil
}

func (g guest) reaches(t testing.TB, addr string) {
	t.Helper()
	c, err := g.dial(addr, patience)
	if err != nil {
		t.Errorf("%s is allowed and not reached: %v", addr, err)
		return
	}
	c.Close()
}

func (g guest) denied(t testing.TB, addr string) {
	t.Helper()
	if c, err := g.dial(addr, brief); err == nil {
		c.Close()
		t.Errorf("%s is reached and not allowed", addr)
	}
}

// ask sends one question to the answerer.
func (g guest) ask(t testing.TB, name string, kind dnsmessage.Type) (dnsmessage.RCode, []string, error) {
	t.Helper()
	return g.question(t, name, kind, patience)
}

func (g guest) askFor(t testing.TB, name string, wait time.Duration) (dnsmessage.RCode, []string, error) {
	t.Helper()
	return g.question(t, name, dnsmessage.TypeA, wait)
}

func (g guest) question(t testing.TB, name string, kind dnsmessage.Type, wait time.Duration) (dnsmessage.RCode, []string, error) {
	t.Helper()
	c := g.udp(t, g.DNS.String()+":53")
	defer c.Close()
	m := dnsmessage.Message{Header: dnsmessage.Header{ID: 7, RecursionDesired: true},
		Questions: []dnsmessage.Question{{Name: dnsmessage.MustNewName(name + "."), Type: kind, Class: dnsmessage.ClassINET}}}
	b, err := m.Pack()
	if err != nil {
		t.Fatal(err)
	}
	c.SetDeadline(time.Now().Add(wait))
	if _, err := c.Write(b); err != nil {
		return 0, nil, err
	}
	buf := make([]byte, 2048)
	n, err := c.Read(buf)
	if err != nil {
		return 0, nil, err
	}
	if err := m.Unpack(buf[:n]); err != nil {
		t.Fatalf("the answer does not parse: %v", err)
	}
	if m.ID != 7 || !m.Response || len(m.Questions) != 1 || m.Questions[0].Name.String() != name+"." {
		t.Fatalf("got %+v as an answer", m)
	}
	var addrs []string
	for _, a := range m.Answers {
		addrs = append(addrs, netip.AddrFrom4(a.Body.(*dnsmessage.AResource).A).String())
	}
	return m.RCode, addrs, nil
}

// resolved asks for the addresses of a name that has some.
func (g guest) resolved(t testing.TB, name string, want ...string) {
	t.Helper()
	code, got, err := g.ask(t, name, dnsmessage.TypeA)
	if err != nil || code != dnsmessage.RCodeSuccess || strings.Join(got, " ") != strings.Join(want, " ") {
		t.Fatalf("%s: got %v %v %v, want %v", name, code, got, err, want)
	}
}

// refused asks for the addresses of a name that is not answered.
func (g guest) refused(t testing.TB, name string) {
	t.Helper()
	code, got, err := g.ask(t, name, dnsmessage.TypeA)
	if err != nil || code != dnsmessage.RCodeNameError || len(got) > 0 {
		t.Fatalf("%s: got %v %v %v, want no such name", name, code, got, err)
	}
}

func (g guest) apply(t testing.TB, rules ...sandbox.Rule) int64 {
	t.Helper()
	gen, err := g.Apply(context.Background(), sandbox.Policy{Allow: rules})
	if err != nil {
		t.Fatal(err)
	}
	return gen
}

func tcp(ports ...int) []sandbox.Port {
	var out []sandbox.Port
	for _, p := range ports {
		out = append(out, sandbox.Port{Number: p})
	}
	return out
}
