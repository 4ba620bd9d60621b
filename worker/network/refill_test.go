package network_test

import (
	"bufio"
	"io"
	"net"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"quarry/internal/need"
	"quarry/internal/netns"
	"quarry/worker/network"
	"quarry/worker/sandbox"
	"quarry/worker/sentry/sentrytest"
)

// TestARestoredGuestIsConnected has a guest put to disk in the middle of a connection
// and restored: the connection goes on, and others can be made.
func TestARestoredGuestIsConnected(t *testing.T) {
	w := lab(t)
	var l net.Listener
	if err := netns.Do(w.ns, func() (err error) { l, err = net.Listen("tcp4", hostA+":8081"); return err }); err != nil {
		t.Fatal(err)
	}
	over := make(chan struct{})
	var served sync.WaitGroup
	served.Go(func() { // ends with the test
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() { <-over; c.Close() }() // a write may wait for the guest
		for err == nil {
			_, err = io.WriteString(c, "tick\n")
			time.Sleep(50 * time.Millisecond)
		}
	})
	defer func() { close(over); l.Close(); served.Wait() }()
	n := open(t, network.Config{})
	g := take(t, n, "guest", sandbox.Rule{CIDR: hostA, Ports: tcp(8081)})
	dir := bundle(t, g.Link, "nc "+hostA+" 8081 < /dev/null")
	image := filepath.Join(need.ShortDir(t), "image")
	runsc := func(state string, args ...string) *exec.Cmd {
		return exec.Command(need.Tool(t, "runsc"), append([]string{"--root=" + state, "--network=sandbox", "--platform=systrap", "--overlay2=none", "--ignore-cgroups", "--allow-connected-on-save"}, args...)...)
	}
	var ticks atomic.Int64
	begin := func(state string, how ...string) (end func()) {
		cmd := runsc(state, append(how, "--bundle="+dir, g.ID)...)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		cmd.Stderr = t.Output()
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go func() { // ends with the sandbox
			for s := bufio.NewScanner(out); s.Scan(); {
				ticks.Add(1)
			}
			io.Copy(io.Discard, out)
		}()
		return func() {
			runsc(state, "delete", "--force", g.ID).Run()
			cmd.Wait()
		}
	}
	first, second := need.ShortDir(t), need.ShortDir(t)
	end := begin(first, "run")
	await(t, func() bool { return ticks.Load() > 5 })
	if err := g.Shut(); err != nil {
		t.Fatal(err)
	}
	if out, err := runsc(first, "pause", g.ID).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if out, err := runsc(first, "checkpoint", "--image-path="+image, "--compression=none", "--leave-running", g.ID).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	end()
	time.Sleep(300 * time.Millisecond) // the peer sends again and again, and nobody may answer
	before := ticks.Load()
	if err := g.Refill(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(1500 * time.Millisecond)
	defer begin(second, sentrytest.RestoreArgs(image)...)()
	await(t, func() bool { return exec.Command(need.Tool(t, "runsc"), "--root="+second, "ps", g.ID).Run() == nil })
	for range 2 { // the second time there is nothing to do
		if err := g.Reopen(); err != nil {
			t.Fatal(err)
		}
	}
	await(t, func() bool { return ticks.Load() > before+5 })
}
