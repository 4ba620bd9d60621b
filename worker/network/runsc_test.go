package network_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"quarry/internal/need"
	"quarry/internal/netns"
	"quarry/worker/network"
	"quarry/worker/sandbox"
)

// bundle makes one whose root is a busybox.
func bundle(t *testing.T, l *network.Link, script string) string {
	t.Helper()
	dir := t.TempDir()
	root := filepath.Join(dir, "rootfs")
	busybox, err := os.ReadFile(need.Tool(t, "busybox"))
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range []string{"bin", "etc", "proc", "tmp"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	caps := []string{"CAP_NET_ADMIN", "CAP_NET_RAW", "CAP_NET_BIND_SERVICE"} // what a guest may have at most
	spec := specs.Spec{
		Version: "1.0.0", Root: &specs.Root{Path: "rootfs", Readonly: true}, Hostname: "guest",
		Process: &specs.Process{Args: []string{"/bin/busybox", "sh", "-c", script}, Cwd: "/", Env: []string{"PATH=/bin"},
			Capabilities: &specs.LinuxCapabilities{Bounding: caps, Effective: caps, Permitted: caps}},
		Mounts: []specs.Mount{{Destination: "/proc", Type: "proc", Source: "proc"}},
		Linux: &specs.Linux{Namespaces: []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.IPCNamespace},
			{Type: specs.UTSNamespace}, {Type: specs.NetworkNamespace, Path: l.NetnsPath}}},
	}
	config, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	for _, applet := range []string{"sh", "nc", "grep", "ping", "ip", "sleep", "nslookup", "dd", "head", "wc"} {
		if err := os.Symlink("busybox", filepath.Join(root, "bin", applet)); err != nil {
			t.Fatal(err)
		}
	}
	for name, b := range map[string][]byte{"config.json": config, "rootfs/bin/busybox": busybox, "rootfs/etc/resolv.conf": l.ResolvConf()} {
		if err := os.WriteFile(filepath.Join(dir, name), b, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// boot runs a script in a sandbox and returns what it writes.
func boot(t *testing.T, l *network.Link, script string) io.Reader {
	t.Helper()
	dir := bundle(t, l, script)
	state := need.ShortDir(t)
	runsc := func(args ...string) *exec.Cmd {
		return exec.Command(need.Tool(t, "runsc"), append([]string{"--root=" + state, "--network=sandbox", "--platform=systrap", "--overlay2=none", "--ignore-cgroups"}, args...)...)
	}
	cmd := runsc("run", "--bundle="+dir, l.ID)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		runsc("kill", l.ID, "KILL").Run()
		cmd.Wait()
		runsc("delete", "--force", l.ID).Run()
	})
	return out
}

// web starts a web server outside.
func (w *world) web(t *testing.T, addr string) {
	t.Helper()
	var l net.Listener
	if err := netns.Do(w.ns, func() (err error) { l, err = net.Listen("tcp4", addr); return err }); err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) { io.WriteString(rw, "page of "+r.Host) })}
	go s.Serve(l) // ends with Close
	t.Cleanup(func() { s.Close() })
}

// TestGuest has a real guest, which holds all rights that one can have, try.
func TestGuest(t *testing.T) {
	w := lab(t)
	w.name("a.example", hostA)
	w.web(t, hostA+":8080")
	w.web(t, metadata+":8080")
	n := open(t, network.Config{})
	g := take(t, n, "guest", sandbox.Rule{Host: "a.example", Ports: tcp(8080)}, sandbox.Rule{CIDR: "0.0.0.0/0", Ports: tcp(80)})
	tries := []struct {
		command string
		want    bool
	}{
		// nc and not wget, which looks names up by the C library: linked statically, it
		// crashes there.
		{"echo -e 'GET / HTTP/1.0\\r\\n\\r' | nc -w 1 " + hostA + " 8080 | grep page", false},
		{"nslookup -type=a b.example", false},
		{"nslookup -type=a a.example && echo -e 'GET / HTTP/1.0\\r\\n\\r' | nc -w 1 " + hostA + " 8080 | grep page", true},
		{"echo -e 'GET / HTTP/1.0\\r\\n\\r' | nc -w 1 " + metadata + " 8080 | grep page", false},
		{"echo ping | nc -w 1 " + hostB + " 80 | grep ping", true},
		{"echo ping | nc -w 1 " + hostB + " 9000 | grep ping", false},
		{"echo ping | nc -w 1 " + nodeAddr + " 80 | grep ping", false},
		{"echo ping | nc -w 1 " + g.Gateway.String() + " 80 | grep ping", false},
		{"dd if=/dev/zero bs=64k count=100 | nc -w 1 " + hostB + " 80 | head -c 6553600 | wc -c | grep 6553600", true}, // in segments of any size
		{"ping -c 1 -W 1 " + hostB, false},
		{"ip addr add 10.231.9.9/24 dev eth0 && ip addr del " + g.Addr.String() + "/31 dev eth0; ip addr; echo ping | nc -w 1 " + hostB + " 80 | grep ping", false},
	}
	var script strings.Builder
	for i, x := range tries {
		fmt.Fprintf(&script, "if %s >&2; then echo %d yes; else echo %d no; fi\n", x.command, i, i)
	}
	got := map[string]bool{}
	for lines := bufio.NewScanner(boot(t, g.Link, "export PATH=/bin; "+script.String())); lines.Scan(); {
		got[lines.Text()] = true
	}
	for i, x := range tries {
		if yes, no := got[fmt.Sprint(i, " yes")], got[fmt.Sprint(i, " no")]; yes == no || yes != x.want {
			t.Errorf("%s: got yes %v and no %v, want %v", x.command, yes, no, x.want)
		}
	}
}

// TestGuestIsCut has a connection of a real guest end by another policy.
func TestGuestIsCut(t *testing.T) {
	lab(t)
	n := open(t, network.Config{})
	g := take(t, n, "guest", sandbox.Rule{CIDR: hostA, Ports: tcp(80)})
	out := boot(t, g.Link, fmt.Sprintf("(while true; do echo tick; sleep 0.1; done) | nc %s 80", hostA))
	var ticks atomic.Int64
	go func() { // ends with the sandbox
		for s := bufio.NewScanner(out); s.Scan(); {
			ticks.Add(1)
		}
	}()
	await(t, func() bool { return ticks.Load() > 5 })
	g.apply(t, sandbox.Rule{CIDR: hostB})
	// What was on its way to the test's own pipe may still come. The guest goes on.
	for end := time.Now().Add(patience); ; {
		before := ticks.Load()
		time.Sleep(2 * time.Second)
		got := ticks.Load() - before
		if got == 0 {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("%d answers came in 2 s, long after the policy", got)
		}
	}
	if _, err := g.Apply(context.Background(), sandbox.Policy{Allow: []sandbox.Rule{{CIDR: hostA}}}); err != nil {
		t.Error(err)
	}
	if g.State().Denied == 0 {
		t.Error("nothing was counted")
	}
}

func await(t *testing.T, ok func() bool) {
	t.Helper()
	for range 1200 {
		if ok() {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatal("it does not come about")
}
