package worker

import (
	"bytes"
	"log/slog"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
)

// keeperProcess starts a keeper that is a process of its own.
func (k *kept) keeperProcess() *proc.Process {
	k.t.Helper()
	k.w.KeeperCommand = []string{"/usr/bin/env", envKeeper + "=" + k.w.Dir.Path(), os.Args[0]}
	k.t.Cleanup(func() { k.killAll(envKeeper) }) // before its readers
	if _, err := k.w.startKeeper(); err != nil {
		k.t.Fatal(err)
	}
	return k.keeper(0)
}

// keeper waits for a keeper other than the given one.
func (k *kept) keeper(other int) (p *proc.Process) {
	k.t.Helper()
	k.waitFor("a keeper", func() bool {
		q, err := proc.Holder(k.w.Dir.KeeperLock())
		if err == nil && q.PID() != other {
			p = q
			k.t.Cleanup(func() { q.Close() })
			return true
		}
		if err == nil {
			q.Close()
		}
		return false
	})
	return p
}

// stop stops the process and returns when it is.
func (k *kept) stop(p *proc.Process) {
	k.t.Helper()
	if err := p.Signal(unix.SIGSTOP); err != nil {
		k.t.Fatal(err)
	}
	k.waitFor("it to be stopped", p.Stopped)
}

// TestAKeeperThatRunsIsLeftAlone, however often it is looked at while it waits, and
// one that does not is killed.
func TestAKeeperThatRunsIsLeftAlone(t *testing.T) {
	k := newKept(t)
	p := k.keeperProcess()
	k.reader(0) // which it looks after: it has nothing to do
	var log bytes.Buffer
	w := *k.w
	w.Log = slog.New(slog.NewTextHandler(&log, nil))
	watch := keeperWatch{w: &w}
	for range 2 * keeperLooks {
		before, err := p.Switches()
		if err != nil || watch.look(t.Context()) {
			t.Fatalf("a keeper that runs is killed: %s; error %v", &log, err)
		}
		k.waitFor("the keeper to run", func() bool {
			now, err := p.Switches()
			return err == nil && now != before
		})
	}
	w.killStopped(t.Context())
	if err := p.Signal(0); err != nil {
		t.Fatalf("a keeper that runs is killed: %s; error %v", &log, err)
	}
	k.stop(p)
	looks := 1
	for ; !watch.look(t.Context()); looks++ {
		if looks > keeperLooks+1 {
			t.Fatalf("a keeper that is stopped was left alone for %d looks", looks)
		}
	}
	if looks < keeperLooks {
		t.Errorf("killed after %d looks, want at least %d", looks, keeperLooks)
	}
	if err := p.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if p, err := proc.Holder(k.w.Dir.KeeperLock()); err == nil {
		t.Errorf("the dead keeper still is the holder of its lock: %d", p.PID())
	}
}

// TestAStoppedKeeperIsReplaced by a command that waits, and by one that needs it.
func TestAStoppedKeeperIsReplaced(t *testing.T) {
	k := newKept(t)
	p := k.keeperProcess()
	k.stop(p)
	end := k.w.supervised(t.Context())
	q := k.keeper(p.PID())
	end()
	k.stop(q)
	if err := k.w.EnsureReader(t.Context()); err != nil {
		t.Fatal(err)
	}
	k.keeper(q.PID())
	for _, old := range []*proc.Process{p, q} {
		if err := old.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	}
}
