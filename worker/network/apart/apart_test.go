package apart_test

import (
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"testing"

	"quarry/internal/need"
	"quarry/worker/network/apart"
)

// play is the word by which the test's program plays a client on the node.
const play = "QUARRY_APART_GET"

func TestMain(m *testing.M) {
	if url := os.Getenv(play); url != "" {
		resp, err := http.Get(url)
		if err != nil {
			os.Stderr.WriteString(err.Error())
			os.Exit(1)
		}
		io.Copy(os.Stdout, resp.Body)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// What runs on the node reaches who listens outside, and the machine itself does not.
func TestTheNodeReachesWhoListensOutside(t *testing.T) {
	need.Root(t)
	addr := netip.MustParseAddr("203.0.113.10")
	p, err := apart.New(t.TempDir(), addr)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}()
	l, err := p.Listen(netip.AddrPortFrom(addr, 8000))
	if err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "from "+r.RemoteAddr) })}
	defer s.Close()
	go s.Serve(l) // ends with Close
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), play+"=http://203.0.113.10:8000/")
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = w, w
	if err := p.Start(cmd); err != nil {
		t.Fatal(err)
	}
	w.Close()
	said, _ := io.ReadAll(r)
	if err := cmd.Wait(); err != nil || len(said) < 14 || string(said[:14]) != "from 192.0.2.1" {
		t.Errorf("%v: %s", err, said)
	}
	if _, err := net.Listen("tcp4", "203.0.113.10:8000"); err == nil {
		t.Error("the machine has the outside's address")
	}
}
