package wait

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/internal/netns"
)

const insideLab = "QUARRY_WAIT_LAB"

// TestMain runs the tests in a network namespace that plays the node, so that no rule
// of theirs is one of the machine's, and in a mount namespace.
func TestMain(m *testing.M) {
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

// patientRTO is after how many milliseconds the model's kernel repeats what nobody has
// acknowledged. By default that is a matter of few, and a guest whose processors are
// busy acknowledges later what it has. So it repeats nothing but what the guest's
// acknowledgements of other bytes say is missing, or what is lost without a trace.
const patientRTO = 10_000

// lab is the model's namespace, beside the node's.
type lab struct {
	dir, model string
	guests     atomic.Int32
}

var theLab = sync.OnceValues(makeLab)

func newLab(t testing.TB) *lab {
	t.Helper()
	need.Root(t)
	l, err := theLab()
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func makeLab() (*lab, error) {
	dir, err := os.MkdirTemp("", "waitlab")
	if err != nil {
		return nil, err
	}
	l := &lab{dir: dir, model: filepath.Join(dir, "model")}
	err = errors.Join(
		netns.Make(l.model), up("lo", ""),
		pair("mdl0", "198.51.100.1/24", l.model, "198.51.100.2/24"),
		netns.Do(l.model, func() error {
			return errors.Join(netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("198.51.100.1"), RtoMin: patientRTO, RtoMinLock: true}),
				os.WriteFile("/proc/sys/net/ipv4/tcp_early_retrans", []byte("0"), 0))
		}),
		os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	return l, err
}

func up(name, addr string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	if addr != "" {
		a, err := netlink.ParseAddr(addr)
		if err == nil {
			err = netlink.AddrAdd(link, a)
		}
		if err != nil {
			return err
		}
	}
	return netlink.LinkSetUp(link)
}

// pair makes a veth pair of one name, here and in a namespace.
func pair(name, here, ns, there string) error {
	f, err := os.Open(ns)
	if err != nil {
		return err
	}
	defer f.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = name
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: name, PeerNamespace: netlink.NsFd(int(f.Fd()))}); err != nil {
		return err
	}
	if err := up(name, here); err != nil {
		return err
	}
	return netns.Do(ns, func() error { return errors.Join(up("lo", ""), up(name, there)) })
}

func route(gateway string) error {
	return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP(gateway)})
}

// guest is a namespace that plays a sandbox, and what was asked of it.
type guest struct {
	t    testing.TB
	ns   string
	veth string
	addr netip.Addr

	cpu   atomic.Int64
	stuck atomic.Bool // Resume fails

	mu     sync.Mutex
	paused bool
	pauses int
	wakes  []woke
	change chan struct{} // closed with each change
}

type woke struct {
	Wake
	at time.Time
}

func (l *lab) guest(t testing.TB) *guest {
	t.Helper()
	n := l.guests.Add(1)
	g := &guest{
		t: t, ns: filepath.Join(l.dir, fmt.Sprint("guest", n)), veth: fmt.Sprint("gst", n),
		addr: netip.AddrFrom4([4]byte{10, 9, byte(n), 2}), change: make(chan struct{}),
	}
	gateway := netip.AddrFrom4([4]byte{10, 9, byte(n), 1}).String()
	err := errors.Join(netns.Make(g.ns), pair(g.veth, gateway+"/24", g.ns, g.addr.String()+"/24"),
		netns.Do(g.ns, func() error { return route(gateway) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if link, err := netlink.LinkByName(g.veth); err == nil {
			netlink.LinkDel(link)
		}
		unix.Unmount(g.ns, unix.MNT_DETACH)
	})
	return g
}

func (g *guest) sandbox() Sandbox {
	return Sandbox{
		ID: g.veth, Veth: g.veth, Addr: g.addr,
		CPU: func() (time.Duration, error) { return time.Duration(g.cpu.Load()), nil },
		Pause: func(context.Context) error {
			g.set(func() { g.paused = true; g.pauses++ })
			return nil
		},
		Resume: func(_ context.Context, w Wake) error {
			if g.stuck.Load() {
				return errors.New("the test says so")
			}
			g.set(func() {
				if !g.paused {
					g.t.Errorf("%s is resumed (%s) and was not paused", g.veth, w.Why)
				}
				g.paused = false
				g.wakes = append(g.wakes, woke{w, time.Now()})
			})
			return nil
		},
	}
}

func (g *guest) set(fn func()) {
	g.mu.Lock()
	defer g.mu.Unlock()
	fn()
	close(g.change)
	g.change = make(chan struct{})
}

// patience is how long a test waits for what has to come, on a machine that has much
// else to do.
const patience = time.Minute

// until waits for what ok says of the guest.
func (g *guest) until(what string, ok func() bool) {
	g.t.Helper()
	if !g.comes(ok) {
		g.t.Fatalf("%s: not so within %s", what, patience)
	}
}

// comes is until for those who do not run the test.
func (g *guest) comes(ok func() bool) bool {
	deadline := time.After(patience)
	for {
		g.mu.Lock()
		yes, change := ok(), g.change
		g.mu.Unlock()
		if yes {
			return true
		}
		select {
		case <-change:
		case <-deadline:
			return false
		}
	}
}

// eventually waits for what nobody tells.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not so within %s", what, patience)
		}
	}
}

func (g *guest) isPaused() bool { return g.paused }

// woken waits for the nth resumption and returns it.
func (g *guest) woken(n int) woke {
	g.t.Helper()
	g.until(fmt.Sprint("resumption ", n), func() bool { return len(g.wakes) >= n })
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.wakes[n-1]
}

// dial connects from the guest's namespace.
func (g *guest) dial(to netip.AddrPort) (net.Conn, error) { return g.dialFor(to, patience) }

func (g *guest) dialFor(to netip.AddrPort, limit time.Duration) (c net.Conn, err error) {
	err = netns.Do(g.ns, func() error {
		c, err = net.DialTimeout("tcp4", to.String(), limit)
		return err
	})
	return c, err
}

func (g *guest) client() *http.Client {
	tr := &http.Transport{DialContext: func(_ context.Context, _, addr string) (net.Conn, error) {
		to, err := netip.ParseAddrPort(addr)
		if err != nil {
			return nil, err
		}
		return g.dial(to)
	}}
	g.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: time.Minute}
}

// stub is a model, and what it did: when it began to answer each request.
type stub struct {
	addr netip.AddrPort
	say  chan struct{} // one for each answer that is held back
	mu   sync.Mutex
	at   []time.Time
	conn []net.Conn
}

// stub serves /?size=1048576 at a port of the model's namespace, after a delay=200ms, or
// when the test says so for hold=1.
func (l *lab) stub(t testing.TB) *stub {
	t.Helper()
	var listener net.Listener
	if err := netns.Do(l.model, func() (err error) {
		listener, err = net.Listen("tcp4", "198.51.100.2:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	s := &stub{say: make(chan struct{}), addr: listener.Addr().(*net.TCPAddr).AddrPort()}
	s.addr = netip.AddrPortFrom(s.addr.Addr().Unmap(), s.addr.Port())
	server := &http.Server{
		Handler: s,
		ConnState: func(c net.Conn, st http.ConnState) {
			if st == http.StateNew {
				s.mu.Lock()
				s.conn = append(s.conn, c)
				s.mu.Unlock()
			}
		},
	}
	done := make(chan struct{})
	go func() { defer close(done); server.Serve(listener) }()
	t.Cleanup(func() { server.Close(); <-done })
	return s
}

func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	delay, _ := time.ParseDuration(r.FormValue("delay"))
	size, _ := strconv.Atoi(r.FormValue("size"))
	io.Copy(io.Discard, r.Body)
	time.Sleep(delay)
	if r.FormValue("hold") != "" {
		select {
		case <-s.say:
		case <-r.Context().Done():
			return
		}
	}
	s.mu.Lock()
	s.at = append(s.at, time.Now())
	s.mu.Unlock()
	w.Header().Set("Content-Length", strconv.Itoa(size))
	w.Write(make([]byte, size))
}

func (s *stub) url(delay time.Duration, size int) string {
	return fmt.Sprintf("http://%s/?delay=%s&size=%d", s.addr, delay, size)
}

// held is answered by answer.
func (s *stub) held(size int) string { return fmt.Sprintf("http://%s/?hold=1&size=%d", s.addr, size) }

// answer lets one answer that is held back go.
func (s *stub) answer(t testing.TB) {
	t.Helper()
	select {
	case s.say <- struct{}{}:
	case <-time.After(patience):
		t.Fatal("nobody waits for an answer")
	}
}

// answered has the guest ask, and the model answer some time after the guest was
// paused. It returns when it did, and when the guest was resumed for the nth time.
func (g *guest) answered(c *http.Client, s *stub, after time.Duration, size, n int) (time.Time, woke) {
	g.t.Helper()
	var all sync.WaitGroup
	all.Go(func() { g.get(c, s.held(size)) })
	g.until(fmt.Sprint("pause ", n), func() bool { return g.paused && len(g.wakes) >= n-1 })
	time.Sleep(after)
	s.answer(g.t)
	all.Wait()
	s.mu.Lock()
	at := s.at[len(s.at)-1]
	s.mu.Unlock()
	return at, g.woken(n)
}

// get asks and reads all of the answer.
func (g *guest) get(c *http.Client, url string) {
	resp, err := c.Get(url)
	if err != nil {
		g.t.Error(err)
		return
	}
	defer resp.Body.Close()
	n, err := io.Copy(io.Discard, resp.Body)
	if err != nil || n != resp.ContentLength {
		g.t.Errorf("got %d of %d bytes, %v", n, resp.ContentLength, err)
	}
}
