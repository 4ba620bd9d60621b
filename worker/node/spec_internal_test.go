package node

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/sandbox"
)

// testNode is a node that makes nothing.
func testNode(t *testing.T, shares map[string]string) *Node {
	t.Helper()
	d, err := folder.Open(filepath.Join(need.ShortDir(t), "w"))
	if err != nil {
		t.Fatal(err)
	}
	c := Config{
		Dir: d, Worker: &worker.Worker{}, Shares: shares, Memory: 8 << 30, Disk: 8 << 30, PIDs: 8192,
		Fetch: func(ctx context.Context, ref string) (Fetched, error) { return Fetched{}, sandbox.ErrImage },
	}
	if c, err = c.withDefaults(d.Path()); err != nil {
		t.Fatal(err)
	}
	return &Node{c: c}
}

func TestASpecSaysWhatTheNodeFillsIn(t *testing.T) {
	n := testNode(t, nil)
	s, err := n.checked(sandbox.Spec{Image: "a"})
	if err != nil {
		t.Fatal(err)
	}
	if s.CPUMilli != 1000 || s.MemoryMB != 1024 || s.MemoryRequest != 1024 || s.DiskMB != 4096 || s.PIDs != 512 || s.TTL != 86400 || s.Hostname != "sandbox" || s.Role != sandbox.RoleRollout {
		t.Errorf("got %+v", s)
	}
}

func TestSpecsThatCannotBeAreRefused(t *testing.T) {
	n := testNode(t, map[string]string{"data": t.TempDir()})
	many := make([]string, maxEnv+1)
	for i := range many {
		many[i] = "A=b"
	}
	for name, c := range map[string]struct {
		s    sandbox.Spec
		want error
	}{
		"no image":           {sandbox.Spec{}, sandbox.ErrInvalid},
		"memory":             {sandbox.Spec{Image: "a", MemoryMB: 1}, sandbox.ErrInvalid},
		"more than there is": {sandbox.Spec{Image: "a", MemoryMB: 1 << 40}, sandbox.ErrInvalid},
		"request over limit": {sandbox.Spec{Image: "a", MemoryMB: 128, MemoryRequest: 129}, sandbox.ErrInvalid},
		"negative":           {sandbox.Spec{Image: "a", DiskMB: -1}, sandbox.ErrInvalid},
		"ttl":                {sandbox.Spec{Image: "a", TTL: -1}, sandbox.ErrInvalid},
		"a long ttl":         {sandbox.Spec{Image: "a", TTL: 1 << 62}, sandbox.ErrInvalid},
		"env":                {sandbox.Spec{Image: "a", Env: []string{"=b"}}, sandbox.ErrInvalid},
		"env without value":  {sandbox.Spec{Image: "a", Env: []string{"b"}}, sandbox.ErrInvalid},
		"env with NUL":       {sandbox.Spec{Image: "a", Env: []string{"b=\x00"}}, sandbox.ErrInvalid},
		"much env":           {sandbox.Spec{Image: "a", Env: many}, sandbox.ErrInvalid},
		"hostname":           {sandbox.Spec{Image: "a", Hostname: "a b"}, sandbox.ErrInvalid},
		"role":               {sandbox.Spec{Image: "a", Role: "judge"}, sandbox.ErrInvalid},
		"label":              {sandbox.Spec{Image: "a", Labels: map[string]string{"": "b"}}, sandbox.ErrInvalid},
		"network":            {sandbox.Spec{Image: "a", Network: sandbox.Policy{Allow: []sandbox.Rule{{Host: "x"}}}}, sandbox.ErrUnsupported},
		"share unknown":      {sandbox.Spec{Image: "a", Shares: []sandbox.Share{{Name: "other/x", Target: "/x"}}}, sandbox.ErrShare},
		"share at /proc":     {sandbox.Spec{Image: "a", Shares: []sandbox.Share{{Name: "data", Target: "/proc/x"}}}, sandbox.ErrInvalid},
		"share at the root":  {sandbox.Spec{Image: "a", Shares: []sandbox.Share{{Name: "data", Target: "/"}}}, sandbox.ErrInvalid},
		"share at ..":        {sandbox.Spec{Image: "a", Shares: []sandbox.Share{{Name: "data", Target: "/a/../b"}}}, sandbox.ErrInvalid},
		"two at one place":   {sandbox.Spec{Image: "a", Shares: []sandbox.Share{{Name: "data", Target: "/b"}, {Name: "data", Target: "/b"}}}, sandbox.ErrInvalid},
		"no program":         {sandbox.Spec{Image: "a", Entrypoint: []string{""}}, sandbox.ErrInvalid},
	} {
		if _, err := n.checked(c.s); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
	}
}

func TestExecsThatCannotBeAreRefused(t *testing.T) {
	for name, e := range map[string]sandbox.ExecSpec{
		"no id":                {Argv: []string{"x"}},
		"an id that is a path": {ID: "../x", Argv: []string{"x"}},
		"nothing to run":       {ID: "a"},
		"two things":           {ID: "a", Argv: []string{"x"}, Shell: "y"},
		"empty session":        {ID: "a", Session: "s"},
		"empty program":        {ID: "a", Argv: []string{""}},
		"role":                 {ID: "a", Argv: []string{"x"}, Role: "boss"},
		"timeout":              {ID: "a", Argv: []string{"x"}, Timeout: -1},
		"output":               {ID: "a", Argv: []string{"x"}, MaxOutput: 1 << 40},
		"NUL":                  {ID: "a", Shell: "a\x00b"},
		"env":                  {ID: "a", Argv: []string{"x"}, Env: []string{"x"}},
	} {
		if err := checkExec(e); !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: got %v", name, err)
		}
	}
	if err := checkExec(sandbox.ExecSpec{ID: "a", Session: "s", Shell: "x"}); err != nil {
		t.Error(err)
	}
}

func TestWithEnv(t *testing.T) {
	base := []string{"A=1", "B=2"}
	got := withEnv(base, []string{"B=3", "C=4"})
	if strings.Join(got, " ") != "A=1 B=3 C=4" || strings.Join(base, " ") != "A=1 B=2" {
		t.Errorf("got %q of %q", got, base)
	}
}

// TestSharesStayBelowTheOperatorsFolder plants links that lead out of it.
func TestSharesStayBelowTheOperatorsFolder(t *testing.T) {
	dir := t.TempDir()
	inside, outside := filepath.Join(dir, "share"), filepath.Join(dir, "secret")
	for _, d := range []string{inside, outside, filepath.Join(inside, "sub")} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for path, to := range map[string]string{
		"up": "../secret", "absolute": outside, "proc": "/proc/self/root" + outside, "deep": "sub/../../secret", "fine": "sub", "loop": "loop",
	} {
		if err := os.Symlink(to, filepath.Join(inside, path)); err != nil {
			t.Fatal(err)
		}
	}
	for _, f := range []string{filepath.Join(outside, "key"), filepath.Join(inside, "sub", "file")} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(inside, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	n := testNode(t, map[string]string{"s": inside})
	for name, ok := range map[string]bool{
		"s": true, "s/": true, "s/sub": true, "s/sub/file": true, "s/fine/file": true,
		"s/up": false, "s/up/key": false, "s/absolute/key": false, "s/proc/key": false, "s/deep/key": false, "s/loop": false,
		"s/../secret/key": false, "s/sub/../../secret/key": false, "s//etc/passwd": false, "s/fifo": false, "s/none": false, "t/x": false, "": false,
	} {
		f, _, err := n.openShare(name)
		if err == nil {
			f.Close()
		}
		if (err == nil) != ok || err != nil && (!errors.Is(err, sandbox.ErrShare) || strings.Contains(err.Error(), "cross-device")) {
			t.Errorf("%q: got %v", name, err)
		}
	}
}

// clock is a node's time, with or without a step of the machine's.
type clock struct{ at time.Time }

func (c *clock) now() time.Time { return c.at }

func TestDeadlines(t *testing.T) {
	n := testNode(t, nil)
	c := &clock{time.Now()}
	n.c.Now = c.now
	n.events = newEvents(1)
	at := c.at.Add(100 * time.Second)
	b := n.newBox(journal{ID: testID, Asked: sandbox.Spec{TTL: 100, Idle: 10}, Expires: &at})
	if when, why := b.deadline(); !when.Equal(c.at.Add(10*time.Second)) || why.Reason != sandbox.ReasonIdle || why.Limit != "idle" {
		t.Errorf("unused: got %v, %+v", when, why)
	}
	first, second := b.use(), b.use()
	if when, why := b.deadline(); !when.Equal(at) || why.Reason != sandbox.ReasonTTL || why.Limit != "ttl" {
		t.Errorf("used: got %v, %+v", when, why)
	}
	c.at = c.at.Add(60 * time.Second)
	first()
	first() // once
	if when, _ := b.deadline(); !when.Equal(at) {
		t.Errorf("still used by one: got %v", when)
	}
	second()
	if when, why := b.deadline(); !when.Equal(c.at.Add(10*time.Second)) || why.Reason != sandbox.ReasonIdle {
		t.Errorf("left: got %v, %+v", when, why)
	}
	// The first cause holds.
	b.end(cause{Reason: sandbox.ReasonTTL})
	b.end(cause{Reason: sandbox.ReasonDeleted})
	if b.cause.Reason != sandbox.ReasonTTL {
		t.Errorf("got %+v", b.cause)
	}
	select {
	case <-b.ask:
	default:
		t.Error("nobody was asked for the end")
	}
}

// TestAStepOfTheClockEndsNothing: the time that a sandbox has left runs in the clock of
// this process, which no change of the date moves.
func TestAStepOfTheClockEndsNothing(t *testing.T) {
	n := testNode(t, nil)
	n.events = newEvents(1)
	if !strings.Contains(n.now().String(), "m=+") {
		t.Fatal("the node's time has no clock of its own")
	}
	b := n.newBox(journal{ID: testID, Asked: sandbox.Spec{Idle: 10}})
	b.expires = n.now().Add(100 * time.Second)
	for _, at := range []time.Time{b.expires, b.used} {
		if !strings.Contains(at.String(), "m=+") {
			t.Errorf("%v goes by the date", at)
		}
	}
	if when, _ := b.deadline(); !strings.Contains(when.String(), "m=+") {
		t.Errorf("%v goes by the date", when)
	}
}
