package node

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"quarry/internal/need"
	"quarry/worker/holder"
	"quarry/worker/network"
	"quarry/worker/sandbox"
)

// apart runs the test that calls it in a network namespace of its own, and reports false
// where that is done.
func apart(t *testing.T) bool {
	t.Helper()
	need.Root(t)
	const inside = "QUARRY_NODE_APART"
	if os.Getenv(inside) != "" {
		return true
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
	return false
}

// rename gives an interface another name.
func rename(t *testing.T, from, to string) {
	t.Helper()
	l, err := netlink.LinkByName(from)
	if err == nil {
		err = errors.Join(netlink.LinkSetDown(l), netlink.LinkSetName(l, to), netlink.LinkSetUp(l))
	}
	if err != nil {
		t.Fatal(err)
	}
}

// shut reports whether no packet reaches a sandbox.
func shut(t *testing.T, veth string) bool {
	t.Helper()
	l, err := netlink.LinkByName(veth)
	if err != nil {
		t.Fatal(err)
	}
	list, err := netlink.QdiscList(l)
	if err != nil {
		t.Fatal(err)
	}
	for _, q := range list {
		if q.Type() == "blackhole" {
			return true
		}
	}
	return false
}

// A hibernation that is refused lets packets through again, and a resume does where that
// failed.
func TestARefusedHibernationLetsPacketsThrough(t *testing.T) {
	if !apart(t) {
		return
	}
	net, err := network.New(t.Context(), network.Config{Folder: t.TempDir(), Range: netip.MustParsePrefix("10.231.0.0/24"), Ready: -1, Bare: -1, Forward: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(net.Sweep(context.Background(), nil), net.Close()); err != nil {
			t.Error(err)
		}
	})
	link, err := net.Take(t.Context(), "test", sandbox.Policy{Allow: []sandbox.Rule{{CIDR: "192.0.2.1"}}})
	if err != nil {
		t.Fatal(err)
	}
	r := newBoxRig(t)
	r.b.link = link
	spec := sandbox.ExecSpec{ID: "runs", Role: sandbox.ExecAgent, Shell: "sleep 1000"} // which a restore would kill
	if _, err := r.b.h.Exec(t.Context(), spec, holder.Process{Argv: []string{"/bin/sleep", "1000"}, Env: []string{"PATH=/bin"}, WorkDir: "/"}); err != nil {
		t.Fatal(err)
	}
	nap := func() error { return r.locked(func() error { return errors.Join(r.b.hold(byCall), r.b.hibernate()) }) }
	if err := nap(); !errors.Is(err, holder.ErrNotHibernated) || shut(t, link.Veth) || r.b.shut {
		t.Fatalf("refused with %v, and shut: %v, %v", err, shut(t, link.Veth), r.b.shut)
	}

	// Its interface cannot be found by then.
	r.stopHolder()
	done := make(chan error, 1)
	go func() { done <- nap() }() // ends with the sandbox
	r.until("no packet to reach it", func() bool { return shut(t, link.Veth) })
	rename(t, link.Veth, "away")
	r.goOn()
	if err := r.soon("a hibernation", done); !errors.Is(err, holder.ErrNotHibernated) || !r.b.shut {
		t.Fatalf("refused with %v, and shut: %v", err, r.b.shut)
	}
	resume := func() error { return r.locked(func() error { return r.b.letGo(byCall) }) }
	if err := resume(); err == nil {
		t.Error("it is told to run, and no packet reaches it")
	}
	rename(t, "away", link.Veth)
	if !shut(t, link.Veth) {
		t.Fatal("who let packets through?")
	}
	if err := resume(); err != nil || shut(t, link.Veth) || r.b.shut {
		t.Errorf("resumed: %v, and shut: %v, %v", err, shut(t, link.Veth), r.b.shut)
	}
}
