package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/net/dns/dnsmessage"

	"quarry/api/sandboxes/client"
	"quarry/internal/need"
	"quarry/internal/netns"
	"quarry/worker/network"
	"quarry/worker/network/apart"
	"quarry/worker/sandbox"
)

// netLab is two network namespaces: a node, where the worker runs, and all else.
type netLab struct {
	t             *testing.T
	node, outside string
}

func newNetLab(t *testing.T) *netLab {
	t.Helper()
	need.Root(t)
	l := &netLab{t: t}
	p, err := apart.New(t.TempDir(), netip.MustParseAddr("203.0.113.10"), netip.MustParseAddr("203.0.113.11"))
	check(t, err)
	t.Cleanup(func() { check(t, p.Close()) })
	l.node, l.outside = p.Node, p.Outside
	for _, a := range []string{"203.0.113.10", "203.0.113.11"} {
		s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprintf(w, "page of %s at %s", r.Host, a) })}
		t.Cleanup(func() { s.Close() })
		listener, err := p.Listen(netip.MustParseAddrPort(a + ":80"))
		check(t, err)
		go s.Serve(listener) // ends with Close
	}
	var c net.PacketConn
	check(t, netns.Do(l.outside, func() (err error) { c, err = net.ListenPacket("udp4", "192.0.2.1:53"); return err }))
	t.Cleanup(func() { c.Close() })
	go answerNames(c, map[string]string{"a.example.": "203.0.113.10", "b.example.": "203.0.113.11"})
	return l
}

// sandboxLinks are the interfaces of the node that are of sandboxes.
func (l *netLab) sandboxLinks() (names []string) {
	l.t.Helper()
	check(l.t, netns.Do(l.node, func() error {
		links, err := network.List(netlink.LinkList)
		for _, x := range links {
			if strings.HasPrefix(x.Attrs().Name, "q") {
				names = append(names, x.Attrs().Name)
			}
		}
		return err
	}))
	return names
}

func answerNames(c net.PacketConn, zone map[string]string) {
	buf := make([]byte, 1500)
	for {
		n, from, err := c.ReadFrom(buf)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(buf[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		m.Response, m.RCode = true, dnsmessage.RCodeNameError
		if a, ok := zone[m.Questions[0].Name.String()]; ok {
			m.RCode = dnsmessage.RCodeSuccess
			m.Answers = []dnsmessage.Resource{{Header: dnsmessage.ResourceHeader{Name: m.Questions[0].Name, Class: dnsmessage.ClassINET, TTL: 60},
				Body: &dnsmessage.AResource{A: netip.MustParseAddr(a).As4()}}}
		}
		if b, err := m.Pack(); err == nil {
			c.WriteTo(b, from)
		}
	}
}

const fetch = `import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=10).read().decode())`

// hold keeps one connection, says so ten times a second, and how it ended.
const hold = `import http.client, time
c = http.client.HTTPConnection("a.example", 80, timeout=20)
try:
    while True:
        c.request("GET", "/")
        c.getresponse().read()
        c.auto_open = 0
        print("tick", flush=True)
        time.sleep(0.1)
except Exception as e:
    print("ended", type(e).__name__, flush=True)`

// TestNetworkOfASandbox has what runs in an image reach what its policy names: by the
// image's own resolver, over a worker that is killed, until another policy.
func TestNetworkOfASandbox(t *testing.T) {
	l := newNetLab(t)
	r := newWorkerRigIn(t, l.node, "cold", "--resolver", "192.0.2.1:53")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := r.socketClient()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task", Network: sandbox.Policy{Allow: []sandbox.Rule{{Host: "a.example", Ports: []sandbox.Port{{Number: 80}}}}}}, "key")
	check(t, err)
	if sb.Network.Generation != 1 || sb.Network.Applied != 1 {
		t.Errorf("got %+v, want a policy in force", sb.Network)
	}
	get := func(url string) (int, string) {
		t.Helper()
		code, out, err := run(ctx, c, sb.ID, sandbox.ExecSpec{Argv: []string{"python3", "-c", fetch, url}})
		check(t, err)
		return code, out
	}
	if code, out := get("http://a.example/"); code != 0 || !strings.Contains(out, "page of a.example") {
		t.Fatalf("an allowed name: %d %s\n%s", code, out, r.logTail())
	}
	for url, want := range map[string]string{"http://b.example/": "Name or service not known", "http://203.0.113.11/": "Connection refused", "http://192.0.2.10/": "Connection refused"} {
		if code, out := get(url); code == 0 || !strings.Contains(out, want) {
			t.Errorf("%s: %d %s, want %q", url, code, out, want)
		}
	}
	holder, err := c.Start(ctx, sb.ID, sandbox.ExecSpec{ID: "hold", Argv: []string{"python3", "-c", hold}})
	check(t, err)
	output := func() string {
		var b bytes.Buffer
		_, err := c.Output(ctx, sb.ID, holder.ID, "stdout", 0, &b)
		check(t, err)
		return b.String()
	}
	until := func(what string, ok func(string) bool) {
		t.Helper()
		for !ok(output()) {
			if ctx.Err() != nil {
				t.Fatalf("%s: does not come about: %s", what, output())
			}
			time.Sleep(50 * time.Millisecond)
		}
	}
	ticks := func(n int) func(string) bool {
		return func(s string) bool { return strings.Count(s, "tick\n") > n && !strings.Contains(s, "ended") }
	}
	until("a connection", ticks(3))
	r.killWorker()
	r.startWorkerIn(l.node, "--resolver", "192.0.2.1:53")
	c = r.socketClient()
	until("a connection over a worker that was killed", ticks(strings.Count(output(), "tick\n")+10))
	if code, out := get("http://a.example/"); code != 0 {
		t.Errorf("an allowed name after the restart: %d %s", code, out)
	}

	n, err := c.SetNetwork(ctx, sb.ID, sandbox.Policy{Allow: []sandbox.Rule{{Host: "b.example"}}})
	check(t, err)
	if n.Generation != 2 || n.Applied != 2 || n.Denied == 0 {
		t.Errorf("got %+v, want the second policy in force and some denied packets", n)
	}
	until("the end of a connection that is allowed no longer", func(s string) bool { return strings.Contains(s, "ended ConnectionResetError") })
	if code, out := get("http://b.example/"); code != 0 || !strings.Contains(out, "page of b.example") {
		t.Errorf("a name of the second policy: %d %s", code, out)
	}
	if code, _ := get("http://a.example/"); code == 0 {
		t.Error("a name of the first policy is reached under the second")
	}
	_, err = c.Delete(ctx, sb.ID)
	check(t, err)
	r.nothingLeftOf()
	if links := stays(l.sandboxLinks); len(links) > 0 {
		t.Errorf("left: %v", links)
	}
}

// socketClient asks the worker by its socket, which no network namespace is about.
func (r *workerRig) socketClient() *client.Client {
	r.t.Helper()
	c, err := client.New(client.Config{URL: "unix:" + filepath.Join(r.path("w"), "worker.sock")})
	check(r.t, err)
	return c
}
