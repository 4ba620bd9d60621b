package network_test

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"quarry/internal/netns"
	"quarry/worker/network"
	"quarry/worker/sandbox"
)

// TestNeverReached gives a guest everything that a rule can give, and asks for what no
// rule gives.
func TestNeverReached(t *testing.T) {
	lab(t)
	n := open(t, network.Config{Refuse: []netip.Prefix{netip.MustParsePrefix(hostC + "/32")}})
	other := take(t, n, "other", sandbox.Rule{CIDR: "0.0.0.0/0"})
	g := take(t, n, "a", sandbox.Rule{CIDR: "0.0.0.0/0"}, sandbox.Rule{CIDR: "192.0.2.0/24"}, sandbox.Rule{CIDR: "0.0.0.0/1", Ports: tcp(80)})
	g.reaches(t, hostA+":80")
	g.reaches(t, routerAddr+":443")
	for _, addr := range []string{metadata, nodeAddr, g.Gateway.String(), other.Gateway.String(), lanHost, hostC} {
		g.denied(t, addr+":80")
		if err := exchangeFor(g.udp(t, addr+":5000"), brief); err == nil {
			t.Errorf("UDP reaches %s", addr)
		}
	}
	// Nothing of the guest's own is there to answer, so that a refused connection is
	// told from one that nobody lets through.
	netns.Do(other.NetnsPath, func() error {
		l, err := net.Listen("tcp4", other.Addr.String()+":80")
		if err == nil {
			go echoTCP(l)
		}
		return err
	})
	g.denied(t, other.Addr.String()+":80")
	if c, err := net.DialTimeout("tcp4", other.Addr.String()+":80", brief); err == nil {
		c.Close()
		t.Error("the node itself reaches into a guest that did not ask")
	}
	if g.State().Denied == 0 {
		t.Error("nothing was counted")
	}
}

// TestNodesResolver has the port of names open on the node: the guest's own answerer
// is the only one that it reaches there.
func TestNodesResolver(t *testing.T) {
	lab(t)
	n := open(t, network.Config{})
	g, other := take(t, n, "a", sandbox.Rule{CIDR: "0.0.0.0/0"}), take(t, n, "b", sandbox.Rule{CIDR: "0.0.0.0/0"})
	c, err := net.ListenPacket("udp4", nodeAddr+":53")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if conn := g.udp(t, nodeAddr+":53"); exchangeOnly(conn) && heard(c) {
		t.Error("the node's resolver is reached")
	}
	if err := exchangeFor(g.udp(t, other.Gateway.String()+":53"), brief); err == nil {
		t.Error("another guest's answerer is reached")
	}
	if got := other.State().Denied; got > 0 {
		t.Errorf("%d packets of another guest were counted", got)
	}
	g.refused(t, "a.example")
}

// exchangeOnly sends and does not wait.
func exchangeOnly(c net.Conn) bool {
	_, err := c.Write([]byte("ping"))
	return err == nil
}

// TestOptions has a frame whose options name where it is to go.
func TestOptions(t *testing.T) {
	w := lab(t)
	n := open(t, network.Config{})
	g := take(t, n, "a", sandbox.Rule{CIDR: hostA})
	link, err := netlink.LinkByName(g.Veth)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"all", g.Veth} { // a node that takes what nobody should
		if err := os.WriteFile("/proc/sys/net/ipv4/conf/"+name+"/accept_source_route", []byte("1"), 0); err != nil {
			t.Fatal(err)
		}
	}
	defer os.WriteFile("/proc/sys/net/ipv4/conf/all/accept_source_route", []byte("0"), 0)
	c := w.listen(t, hostB+":53")
	// A question to the gateway, with a loose source route to a host that is not allowed.
	plain := datagram(g.Addr, g.Gateway, 53)
	b := append(append(append([]byte{}, plain[:20]...), append([]byte{131, 7, 4}, append(netip.MustParseAddr(hostB).AsSlice(), 0)...)...), plain[20:]...)
	b[0], b[3], b[10], b[11] = 0x47, byte(len(b)), 0, 0
	sum := uint32(0)
	for i := 0; i < 28; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum+sum>>16))
	frame(t, g.NetnsPath, unix.ETH_P_IP, link.Attrs().HardwareAddr, b)
	if heard(c) {
		t.Error("a source route leads to a host that is not allowed")
	}
	if g.State().Denied != 1 {
		t.Errorf("got %+v, want one denied packet", g.State())
	}
}

func TestPrivateByItsOwnRule(t *testing.T) {
	lab(t)
	n := open(t, network.Config{})
	g := take(t, n, "a", sandbox.Rule{CIDR: lanHost + "/32"})
	g.reaches(t, lanHost+":80")
	for _, cidr := range []string{metadata + "/32", "127.0.0.0/8", "224.0.0.1", g.Gateway.String(), nodeAddr, "fd00::/8"} {
		if _, err := g.Apply(context.Background(), sandbox.Policy{Allow: []sandbox.Rule{{CIDR: cidr}}}); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: got %v, want it refused", cidr, err)
		}
	}
	g.reaches(t, lanHost+":80") // the policy before holds
}

func TestWithoutRules(t *testing.T) {
	lab(t)
	n := open(t, network.Config{})
	g := take(t, n, "a")
	if g.Veth != "" || g.Addr.IsValid() || len(g.ResolvConf()) > 0 {
		t.Errorf("got %+v, want a bare namespace", g.Link)
	}
	err := netns.Do(g.NetnsPath, func() error {
		links, err := network.List(netlink.LinkList)
		if err != nil {
			return err
		}
		if len(links) != 1 || links[0].Attrs().Name != "lo" || links[0].Attrs().Flags&net.FlagUp == 0 {
			t.Errorf("got %v, want a loopback that is up", links)
		}
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			return err
		}
		return l.Close()
	})
	if err != nil {
		t.Error(err)
	}
	g.denied(t, hostA+":80")
	if gen := g.apply(t); gen != 2 {
		t.Errorf("got generation %d, want 2", gen)
	}
	if _, err := g.Apply(context.Background(), sandbox.Policy{Allow: []sandbox.Rule{{CIDR: hostA}}}); !errors.Is(err, network.ErrNoVeth) {
		t.Errorf("got %v, want ErrNoVeth", err)
	}
}

// frame sends an Ethernet frame from inside a namespace, as a guest that makes its
// own would.
func frame(t *testing.T, ns string, kind uint16, to net.HardwareAddr, body []byte) {
	t.Helper()
	err := netns.Do(ns, func() error {
		link, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW, 0)
		if err != nil {
			return err
		}
		defer unix.Close(fd)
		b := append(append(append([]byte{}, to...), link.Attrs().HardwareAddr...), byte(kind>>8), byte(kind))
		return unix.Sendto(fd, append(b, body...), 0, &unix.SockaddrLinklayer{Ifindex: link.Attrs().Index})
	})
	if err != nil {
		t.Fatal(err)
	}
}

// datagram is an IPv4 packet with a UDP datagram in it.
func datagram(src, dst netip.Addr, port uint16) []byte {
	b := make([]byte, 32)
	b[0], b[3], b[8], b[9] = 0x45, 32, 64, 17
	copy(b[12:], src.AsSlice())
	copy(b[16:], dst.AsSlice())
	sum := uint32(0)
	for i := 0; i < 20; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	binary.BigEndian.PutUint16(b[10:], ^uint16(sum+sum>>16))
	binary.BigEndian.PutUint16(b[20:], 4444)
	binary.BigEndian.PutUint16(b[22:], port)
	b[25] = 12
	copy(b[28:], "ping")
	return b
}

// listen has a host of the lab wait for datagrams at a port of its own.
func (w *world) listen(t *testing.T, addr string) net.PacketConn {
	t.Helper()
	var c net.PacketConn
	if err := netns.Do(w.ns, func() (err error) { c, err = net.ListenPacket("udp4", addr); return err }); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func heard(c net.PacketConn) bool { return heardFor(c, brief) }

func heardFor(c net.PacketConn, wait time.Duration) bool {
	c.SetReadDeadline(time.Now().Add(wait))
	_, _, err := c.ReadFrom(make([]byte, 100))
	return err == nil
}

// numbered has a datagram say a number, and number waits for one that does.
func numbered(i int, datagram []byte) []byte {
	datagram[28] = byte(i)
	return datagram
}

func number(c net.PacketConn) (i int, ok bool) {
	b := make([]byte, 100)
	c.SetReadDeadline(time.Now().Add(brief))
	n, _, err := c.ReadFrom(b)
	return int(b[0]), err == nil && n > 0
}

func TestSpoofedFrames(t *testing.T) {
	w := lab(t)
	n := open(t, network.Config{})
	g, other := take(t, n, "a", sandbox.Rule{CIDR: hostA}), take(t, n, "b", sandbox.Rule{CIDR: hostA})
	gateway, err := netlink.LinkByName(g.Veth)
	if err != nil {
		t.Fatal(err)
	}
	mac := gateway.Attrs().HardwareAddr
	broadcast := net.HardwareAddr{255, 255, 255, 255, 255, 255}
	c := w.listen(t, hostA+":6000")
	frame(t, g.NetnsPath, unix.ETH_P_IP, mac, datagram(g.Addr, netip.MustParseAddr(hostA), 6000))
	if !heardFor(c, patience) {
		t.Fatal("a frame that is allowed is not heard: the test proves nothing")
	}
	// All are sent before the wait, which is long on emulated machines; each says which
	// it is.
	sources := []netip.Addr{other.Addr, g.Gateway, netip.MustParseAddr(hostB), netip.MustParseAddr(nodeAddr), netip.MustParseAddr("127.0.0.1")}
	for i, src := range sources {
		frame(t, g.NetnsPath, unix.ETH_P_IP, mac, numbered(i, datagram(src, netip.MustParseAddr(hostA), 6000)))
	}
	for i, ok := number(c); ok; i, ok = number(c) {
		t.Errorf("a frame with the address %s is heard", sources[i])
	}
	node, err := net.ListenPacket("udp4", "0.0.0.0:6001")
	if err != nil {
		t.Fatal(err)
	}
	defer node.Close()
	targets := []string{"255.255.255.255", "224.0.0.1", g.Gateway.String(), nodeAddr, "127.0.0.1"}
	for i, dst := range targets {
		frame(t, g.NetnsPath, unix.ETH_P_IP, broadcast, numbered(i, datagram(g.Addr, netip.MustParseAddr(dst), 6001)))
	}
	for i, ok := number(node); ok; i, ok = number(node) {
		t.Errorf("the node hears a frame to %s", targets[i])
	}
	// ARP: "the other guest is at my address". The host neither answers nor learns.
	arp := append([]byte{0, 1, 8, 0, 6, 4, 0, 2}, mac...)
	arp = append(append(arp, other.Addr.AsSlice()...), broadcast...)
	frame(t, g.NetnsPath, unix.ETH_P_ARP, broadcast, append(arp, g.Gateway.AsSlice()...))
	neighbours, err := network.List(func() ([]netlink.Neigh, error) { return netlink.NeighList(0, unix.AF_INET) })
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range neighbours {
		if x.State != netlink.NUD_PERMANENT && x.State != netlink.NUD_NOARP && x.LinkIndex == gateway.Attrs().Index {
			t.Errorf("the host learned %v", x)
		}
	}
	g.reaches(t, hostA+":80")
	other.reaches(t, hostA+":80")
}

func TestNoIPv6(t *testing.T) {
	lab(t)
	n := open(t, network.Config{})
	g := take(t, n, "a", sandbox.Rule{CIDR: "0.0.0.0/0"})
	if _, err := os.Stat("/proc/sys/net/ipv6"); err != nil {
		t.Log("this kernel has no IPv6: nothing to see")
		return
	}
	link, err := netlink.LinkByName(g.Veth)
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := network.List(func() ([]netlink.Addr, error) { return netlink.AddrList(link, netlink.FAMILY_V6) })
	if err != nil || len(addrs) > 0 {
		t.Errorf("got %v %v on the host's side, want nothing", addrs, err)
	}
	// A link-local answerer of the node, which a guest that makes its own frames asks.
	c, err := net.ListenPacket("udp6", "[::]:6002")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	b := make([]byte, 52)
	b[0], b[5], b[6], b[7] = 0x60, 12, 17, 64
	b[8], b[9], b[23] = 0xfe, 0x80, 1
	b[24], b[25], b[39] = 0xff, 0x02, 1
	binary.BigEndian.PutUint16(b[40:], 4444)
	binary.BigEndian.PutUint16(b[42:], 6002)
	b[45] = 12
	frame(t, g.NetnsPath, unix.ETH_P_IPV6, net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, b)
	if heard(c) {
		t.Error("the node hears IPv6 of a guest")
	}
}

// TestTwoWorkers has two workers of one machine with the same range.
func TestTwoWorkers(t *testing.T) {
	lab(t)
	one, two := open(t, network.Config{}), open(t, network.Config{})
	a, b := take(t, one, "a", sandbox.Rule{CIDR: hostA}), take(t, two, "a", sandbox.Rule{CIDR: hostB})
	if a.Addr == b.Addr || a.Veth == b.Veth {
		t.Fatalf("both have %s %s", a.Addr, a.Veth)
	}
	a.reaches(t, hostA+":80")
	b.reaches(t, hostB+":80")
	a.denied(t, hostB+":80")
	b.denied(t, hostA+":80")
	netns.Do(b.NetnsPath, func() error {
		l, err := net.Listen("tcp4", b.Addr.String()+":80")
		if err == nil {
			go echoTCP(l)
		}
		return err
	})
	a.denied(t, b.Addr.String()+":80")
	if err := one.Release(context.Background(), "a"); err != nil {
		t.Fatal(err)
	}
	if err := one.Sweep(context.Background(), nil); err != nil {
		t.Fatal(err)
	}
	b.reaches(t, hostB+":80")
}
