package network_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"quarry/worker/network"
	"quarry/worker/sandbox"
)

// remains lists everything that networks of a folder have in the kernel and on disk.
func remains(t testing.TB, folder string) []string {
	t.Helper()
	var out []string
	table, prefix := network.Names(folder)
	links, err := network.List(netlink.LinkList)
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range links {
		if strings.HasPrefix(l.Attrs().Name, prefix) {
			out = append(out, "interface "+l.Attrs().Name)
		}
	}
	mounts, err := os.ReadFile("/proc/thread-self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, folder+"/") {
			out = append(out, "mount "+strings.TrimSpace(line))
		}
	}
	for _, dir := range []string{"ns", "sandboxes"} {
		files, err := os.ReadDir(filepath.Join(folder, dir))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			out = append(out, dir+"/"+f.Name())
		}
	}
	return append(append(out, rulesOf(t, table)...), flowsOf(t)...)
}

// rulesOf lists what a table has of sandboxes.
func rulesOf(t testing.TB, name string) []string {
	t.Helper()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	tab := &nftables.Table{Name: name, Family: nftables.TableFamilyIPv4}
	var out []string
	tables, err := c.ListTablesOfFamily(tab.Family)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.ContainsFunc(tables, func(x *nftables.Table) bool { return x.Name == name }) {
		return nil
	}
	chains, err := c.ListChainsOfTableFamily(tab.Family)
	if err != nil {
		t.Fatal(err)
	}
	for _, ch := range chains {
		if ch.Table.Name == name && ch.Hooknum == nil {
			out = append(out, "chain "+ch.Name)
		}
	}
	sets, err := c.GetSets(tab)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range sets {
		if strings.Contains(s.Name, ".") {
			out = append(out, "set "+s.Name)
		}
		if slices.Contains([]string{"out", "in", "deny"}, s.Name) {
			s.IsMap, s.DataType, s.KeyType = true, nftables.TypeVerdict, nftables.TypeIFName
			elements, err := c.GetSetElements(s)
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range elements {
				out = append(out, "element of "+s.Name+" "+string(e.Key))
			}
		}
	}
	objects, err := c.GetNamedObjects(tab)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range objects {
		out = append(out, "counter "+o.(*nftables.NamedObj).Name)
	}
	return out
}

func flowsOf(t testing.TB) []string {
	t.Helper()
	list, err := netlink.ConntrackTableList(netlink.ConntrackTable, unix.AF_INET)
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range list {
		if a, _ := netip.AddrFromSlice(f.Forward.SrcIP); network.DefaultRange.Contains(a.Unmap()) {
			out = append(out, "flow "+f.String())
		}
	}
	return out
}

func TestNothingIsLeft(t *testing.T) {
	w := lab(t)
	w.name("a.example", hostA)
	folder := t.TempDir()
	n, err := network.New(context.Background(), network.Config{Folder: folder, Resolvers: []netip.AddrPort{netip.MustParseAddrPort(routerAddr + ":53")}})
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range 64 {
		all.Go(func() {
			id := fmt.Sprintf("s%d", i)
			var rules []sandbox.Rule
			if i%4 > 0 {
				rules = []sandbox.Rule{{Host: "a.example", Ports: tcp(80)}, {CIDR: hostB}, {CIDR: hostB, Ports: tcp(80)}}
			}
			l, err := n.Take(context.Background(), id, sandbox.Policy{Allow: rules})
			if err != nil {
				t.Error(err)
				return
			}
			g := guest{l}
			if i%4 > 0 {
				g.resolved(t, "a.example", hostA)
				g.reaches(t, hostA+":80")
				g.reaches(t, hostB+":80")
			}
			if i%8 == 1 {
				g.apply(t, sandbox.Rule{Host: "*"})
			}
			for range 2 { // twice: the second finds nothing
				if err := n.Release(context.Background(), id); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if got := rulesOf(t, first(network.Names(folder))); len(got) > 0 {
		t.Errorf("rules are left: %v", got)
	}
	if b, err := os.ReadFile("/proc/thread-self/net/udp"); err != nil || strings.Contains(string(b), ":0035 ") {
		t.Errorf("an answerer is left: %s %v", b, err)
	}
	if err := n.Close(); err != nil {
		t.Error(err)
	}
	if got := remains(t, folder); len(got) > 0 {
		t.Errorf("left: %v", got)
	}
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	if tables, err := c.ListTables(); err != nil || slices.ContainsFunc(tables, func(x *nftables.Table) bool { return x.Name == first(network.Names(folder)) }) {
		t.Errorf("the table itself is left, %v", err)
	}
}

func first(a, _ string) string { return a }

// TestGivenUpTake has callers that are gone before, or while, a network is made.
func TestGivenUpTake(t *testing.T) {
	lab(t)
	folder := t.TempDir()
	n := open(t, network.Config{Folder: folder, Ready: -1, Bare: -1})
	for i := range 20 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*300*time.Microsecond)
		l, err := n.Take(ctx, "a", sandbox.Policy{Allow: []sandbox.Rule{{CIDR: hostA}}})
		cancel()
		if err == nil {
			if err := n.Release(context.Background(), l.ID); err != nil {
				t.Fatal(err)
			}
		}
		if got := remains(t, folder); len(got) > 0 {
			t.Fatalf("left after %v: %v", err, got)
		}
	}
}

// play is the process that is killed: a worker with sandboxes.
func play(role string) int {
	go func() { // ends with the process
		io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	n, err := network.New(context.Background(), network.Config{Folder: os.Getenv("QUARRY_NETWORK_FOLDER"),
		Resolvers: []netip.AddrPort{netip.MustParseAddrPort(routerAddr + ":53")}})
	if err != nil {
		fmt.Println(err)
		return 1
	}
	for i := range 4 {
		_, err := n.Take(context.Background(), fmt.Sprintf("s%d", i), sandbox.Policy{Allow: []sandbox.Rule{{Host: "a.example"}, {CIDR: hostB, Ports: tcp(80)}}})
		if err != nil {
			fmt.Println(err)
			return 1
		}
	}
	if _, err := n.Take(context.Background(), "bare", sandbox.Policy{}); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println("ready")
	if role == "busy" { // takes and releases until it is killed
		for i := 0; ; i++ {
			id := fmt.Sprintf("busy%d", i%16)
			go func() {
				if l, err := n.Take(context.Background(), id, sandbox.Policy{Allow: []sandbox.Rule{{Host: "a.example"}, {CIDR: hostB}}}); err == nil {
					l.Apply(context.Background(), sandbox.Policy{Allow: []sandbox.Rule{{CIDR: hostA}}})
					n.Release(context.Background(), id)
				}
			}()
			time.Sleep(3 * time.Millisecond)
		}
	}
	select {}
}

// worker starts one, and returns when it has its sandboxes.
func worker(t *testing.T, role, folder string) (kill func()) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "QUARRY_NETWORK_ROLE="+role, "QUARRY_NETWORK_FOLDER="+folder)
	// It ends with its stdin. A death signal would come from the thread that started
	// it, and those of namespaces end.
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line, _ := bufio.NewReader(out).ReadString('\n')
	if line != "ready\n" {
		t.Fatalf("the worker says %q", line)
	}
	return func() {
		cmd.Process.Kill()
		cmd.Wait()
		in.Close()
	}
}

func TestKilledAndSwept(t *testing.T) {
	lab(t)
	for i := range 4 {
		folder := t.TempDir()
		role := "idle"
		if i > 0 {
			role = "busy"
		}
		kill := worker(t, role, folder)
		time.Sleep(time.Duration(i*i*13) * time.Millisecond)
		kill()
		if len(remains(t, folder)) == 0 {
			t.Fatal("nothing was there: the test proves nothing")
		}
		n, err := network.New(context.Background(), network.Config{Folder: folder, Ready: -1, Bare: -1})
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Sweep(context.Background(), nil); err != nil {
			t.Error(err)
		}
		if got := remains(t, folder); len(got) > 0 {
			t.Errorf("%s: left: %v", role, got)
		}
		if err := n.Close(); err != nil {
			t.Error(err)
		}
	}
}

func TestKilledAndAdopted(t *testing.T) {
	w := lab(t)
	w.name("a.example", hostA)
	folder := t.TempDir()
	kill := worker(t, "idle", folder)
	g := guest{peek(t, folder, "s1")}
	g.resolved(t, "a.example", hostA)
	named, ranged := g.held(t, hostA+":443"), g.held(t, hostB+":80")
	g.denied(t, hostC+":80")
	kill()

	// Nobody is there: what was allowed goes on, nothing else does.
	alive(t, "a connection without a worker", named)
	g.reaches(t, hostB+":80")
	g.denied(t, hostC+":80")
	if _, _, err := g.askFor(t, "a.example", 300*time.Millisecond); err == nil {
		t.Error("somebody answers names")
	}

	n := open(t, network.Config{Folder: folder})
	l, err := n.Adopt(context.Background(), "s1")
	if err != nil {
		t.Fatal(err)
	}
	if l.Addr != g.Addr || l.NetnsPath != g.NetnsPath || l.Veth != g.Veth {
		t.Fatalf("got %+v, want %+v", l, g.Link)
	}
	bare, err := n.Adopt(context.Background(), "bare")
	if err != nil || bare.Veth != "" {
		t.Fatalf("got %+v %v, want the bare one", bare, err)
	}
	if err := n.Sweep(context.Background(), []string{"s1", "bare"}); err != nil {
		t.Fatal(err)
	}
	if _, err := n.Adopt(context.Background(), "s2"); !errors.Is(err, sandbox.ErrUnknown) {
		t.Errorf("got %v for one that was swept, want ErrUnknown", err)
	}
	g = guest{l}
	if s := l.State(); s.Generation != 1 || s.Applied != 1 || len(s.Policy.Allow) != 2 || s.Denied == 0 {
		t.Errorf("got %+v, want the policy as it was and what was denied", s)
	}
	alive(t, "a connection to a name after the restart", named)
	alive(t, "a connection to a range after the restart", ranged)
	g.resolved(t, "a.example", hostA)
	g.reaches(t, hostA+":80")
	g.denied(t, hostC+":80")
	// What the worker before had told is known: another policy keeps its connections.
	g.apply(t, sandbox.Rule{Host: "a.example"})
	alive(t, "a connection to a name under another policy", named)
	cut(t, "a connection to a range that was taken away", ranged)
	if err := n.Release(context.Background(), "s1"); err != nil {
		t.Fatal(err)
	}
}

// TestFirewallStartsAnew has another program flush every rule of the machine, as one
// does that is started anew.
func TestFirewallStartsAnew(t *testing.T) {
	lab(t)
	n := open(t, network.Config{})
	g := take(t, n, "a", sandbox.Rule{CIDR: hostA})
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	theirs := c.AddTable(&nftables.Table{Name: "theirs", Family: nftables.TableFamilyIPv4})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	c.FlushRuleset()
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	tables, err := c.ListTablesOfFamily(nftables.TableFamilyIPv4)
	if err != nil || slices.ContainsFunc(tables, func(x *nftables.Table) bool { return x.Name == theirs.Name }) {
		t.Fatalf("got %v %v: nothing was flushed, the test proves nothing", tables, err)
	}
	g.reaches(t, hostA+":80")
	g.denied(t, hostB+":80")
	g.denied(t, nodeAddr+":80")
}

// TestOldKernel is on a kernel whose tables nobody owns for good: one that is there
// already and has no owner stands for it. What others change is put in order again.
func TestOldKernel(t *testing.T) {
	w := lab(t)
	w.name("a.example", hostA)
	folder := t.TempDir()
	c, err := nftables.New()
	if err != nil {
		t.Fatal(err)
	}
	name, _ := network.Names(folder)
	ours := c.AddTable(&nftables.Table{Name: name, Family: nftables.TableFamilyIPv4})
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	n := open(t, network.Config{Folder: folder})
	g, b := take(t, n, "a", sandbox.Rule{Host: "a.example"}), take(t, n, "b", sandbox.Rule{CIDR: hostB})
	g.resolved(t, "a.example", hostA)
	held := g.held(t, hostA+":80")
	for what, change := range map[string]func(){
		"every table":  c.FlushRuleset,
		"our table":    func() { c.DelTable(ours) },
		"our rules":    func() { c.FlushTable(ours) },
		"a base chain": func() { c.FlushChain(&nftables.Chain{Table: ours, Name: "from"}) },
	} {
		before := rulesOf(t, name)
		change()
		if err := c.Flush(); err != nil {
			t.Fatal(err)
		}
		await(t, func() bool { // every chain and set of a policy is another
			now := rulesOf(t, name)
			return len(now) == len(before) && !slices.ContainsFunc(now, func(s string) bool {
				return strings.HasSuffix(s, ".out") && slices.Contains(before, s)
			})
		})
		alive(t, "a connection after somebody flushed "+what, held)
		g.denied(t, hostB+":80")
		g.denied(t, nodeAddr+":80")
		b.reaches(t, hostB+":80")
		b.denied(t, hostA+":80")
	}
	g.apply(t, sandbox.Rule{CIDR: hostC})
	cut(t, "a connection to a name that was taken away", held)
}

// TestStoppedAndAdopted stops a worker as an operator does, and starts the next.
func TestStoppedAndAdopted(t *testing.T) {
	lab(t)
	folder := t.TempDir()
	before, err := network.New(context.Background(), network.Config{Folder: folder})
	if err != nil {
		t.Fatal(err)
	}
	g := take(t, before, "a", sandbox.Rule{CIDR: hostA})
	held := g.held(t, hostA+":80")
	if _, err := network.New(context.Background(), network.Config{Folder: folder}); err == nil {
		t.Error("two have one folder")
	}
	if err := before.Close(); err != nil {
		t.Fatal(err)
	}
	alive(t, "a connection without a worker", held)
	g.denied(t, hostB+":80")
	n := open(t, network.Config{Folder: folder})
	l, err := n.Adopt(context.Background(), "a")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := n.Take(context.Background(), "a", sandbox.Policy{}); err == nil {
		t.Error("one sandbox has two networks")
	}
	if gen := (guest{l}).apply(t, sandbox.Rule{CIDR: hostB}); gen != 2 {
		t.Errorf("got generation %d, want 2", gen)
	}
	cut(t, "a connection that was taken away", held)
	g.reaches(t, hostB+":80")
}

// TestAdoptedOnAFullDisk has the next worker take over a network when its folder's disk has
// no room, and the one after it when there is some.
func TestAdoptedOnAFullDisk(t *testing.T) {
	lab(t)
	folder := t.TempDir()
	if err := unix.Mount("tmpfs", folder, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(folder, unix.MNT_DETACH) })
	n, err := network.New(context.Background(), network.Config{Folder: folder, Ready: -1, Bare: -1})
	if err != nil {
		t.Fatal(err)
	}
	g := take(t, n, "a", sandbox.Rule{CIDR: hostA})
	held := g.held(t, hostA+":80")
	ballast := filepath.Join(folder, "ballast")
	for _, full := range []bool{true, false} {
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
		if !full {
			err = os.Remove(ballast)
		} else if err = os.WriteFile(ballast, make([]byte, 1<<20), 0o600); errors.Is(err, unix.ENOSPC) {
			err = nil
		}
		if err != nil {
			t.Fatal(err)
		}
		if full {
			n, err = network.New(context.Background(), network.Config{Folder: folder, Ready: -1, Bare: -1})
		} else {
			n = open(t, network.Config{Folder: folder, Ready: -1, Bare: -1})
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := n.Adopt(context.Background(), "a"); err != nil {
			t.Fatalf("full %v: %v", full, err)
		}
		alive(t, "a connection under the next worker", held)
		g.reaches(t, hostA+":80")
		g.denied(t, hostB+":80")
	}
}
