package e2e_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"quarry/api/sandboxes"
	"quarry/api/sandboxes/client"
	"quarry/internal/netns"
	"quarry/worker/sandbox"
)

// keeper is an agent that is its sandbox's first process: it counts with the host
// outside, over one connection, and looks after what it holds: memory, a library of the
// image that is mapped, a file of the writable layer and one that has no name any more.
const keeper = `
import hashlib, os, random, socket, sqlite3, sys, time
def bad(what):
    print("bad", what, flush=True)
    time.sleep(1000)
sys.excepthook = lambda kind, err, trace: bad(repr(err))
block = random.Random(1).randbytes(32 << 20)
want = hashlib.sha1(block).digest()
nameless = open("/var/nameless", "w+b")
nameless.write(block[:100000]); nameless.flush()
os.unlink("/var/nameless")
kept = open("/var/kept", "w+b")
kept.write(block[:200000]); kept.flush()
s = socket.create_connection(("203.0.113.10", 8000))
lines = s.makefile("r")
i = 0
while True:
    i += 1
    s.sendall(b"%d\n" % i)
    if lines.readline() != "%d\n" % i: bad("answer")
    if i % 10 == 0:
        if hashlib.sha1(block).digest() != want: bad("memory")
        nameless.seek(0); kept.seek(0)
        if nameless.read() != block[:100000]: bad("nameless")
        if kept.read() != block[:200000]: bad("kept")
        if sqlite3.connect(":memory:").execute("select 1").fetchone() != (1,): bad("library")
    print(i, flush=True)
    time.sleep(0.01)
`

// napRig is a worker in a lab, and its sandboxes that are hibernated.
type napRig struct {
	*workerRig
	l     *netLab
	ctx   context.Context
	c     *client.Client
	flags []string
}

// again kills the worker and starts another one.
func (r *napRig) again() {
	r.t.Helper()
	r.killWorker()
	r.startWorkerIn(r.l.node, r.flags...)
	r.c = r.socketClient()
}

func (r *napRig) until(what string, ok func() bool) {
	r.t.Helper()
	r.await(r.ctx, what, ok)
}

func (r *napRig) state(id string) sandbox.State {
	r.t.Helper()
	sb, err := r.c.Get(r.ctx, id)
	check(r.t, err)
	return sb.State
}

func (r *napRig) hibernate(id string) {
	r.t.Helper()
	var sb sandbox.Sandbox
	err := whenReady(func() (err error) { sb, err = r.c.Hibernate(r.ctx, id); return err })
	if err != nil || sb.State != sandbox.StateHibernated {
		r.t.Fatalf("hibernated: %s, %v\n%s", sb.State, err, r.logTail())
	}
	if pids := r.processesOf(id, "boot"); len(pids) > 0 {
		r.t.Fatalf("hibernated, and processes %v run", pids)
	}
}

func (r *napRig) wake(id string) {
	r.t.Helper()
	sb, err := r.c.Wake(r.ctx, id)
	if err != nil || sb.State != sandbox.StateRunning {
		r.t.Fatalf("woken: %s, %v\n%s", sb.State, err, r.logTail())
	}
}

// counts returns how far a counter has come.
func (r *napRig) counts(id string) int {
	r.t.Helper()
	raw, err := os.ReadFile(r.path("w", "node", id, "init", "stdout"))
	if err != nil {
		sb, gone := r.c.Get(r.ctx, id)
		r.t.Fatalf("%v; the sandbox: %+v, %v", err, sb.End, gone)
	}
	whole, _, _ := strings.Cut(string(raw[:bytes.LastIndexByte(raw, '\n')+1]), "bad")
	if len(whole) != bytes.LastIndexByte(raw, '\n')+1 {
		r.t.Fatalf("the counter says %q", raw[len(whole):])
	}
	lines := strings.Fields(whole)
	for i, l := range lines {
		if l != strconv.Itoa(i+1) {
			r.t.Fatalf("line %d is %q", i+1, l)
		}
	}
	return len(lines)
}

// goesOn waits until a counter has counted on.
func (r *napRig) goesOn(id string) {
	r.t.Helper()
	n := r.counts(id)
	r.until("its counts", func() bool { return r.counts(id) > n+20 })
}

// TestHibernated has sandboxes put to disk and woken: by calls, by commands, while
// workers are killed, while the disk is full and the files are damaged.
func TestHibernated(t *testing.T) {
	l := newNetLab(t)
	var listener net.Listener
	check(t, netns.Do(l.outside, func() (err error) { listener, err = net.Listen("tcp4", "203.0.113.10:8000"); return err }))
	t.Cleanup(func() { listener.Close() })
	go func() { // ends with the listener
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			go func() { defer c.Close(); _, _ = io.Copy(c, c) }() // ends with the sandbox
		}
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	shares := t.TempDir()
	check(t, os.WriteFile(filepath.Join(shares, "f"), []byte("shared"), 0o644))
	r := &napRig{l: l, ctx: ctx, flags: []string{"--share", "s=" + shares}}
	r.workerRig = newWorkerRigIn(t, l.node, "cold", r.flags...)
	r.c = r.socketClient()
	disk := r.path("w", "node") // a disk of their own, which can be filled
	check(t, syscall.Mount("disk", disk, "tmpfs", 0, "size=320m,mode=700"))
	t.Cleanup(func() { r.endWorker(); _ = syscall.Unmount(disk, syscall.MNT_DETACH) })
	agent, err := r.c.Create(ctx, sandbox.Spec{
		Image: "t/task", Entrypoint: []string{"python3", "-c", keeper}, Network: sandbox.Policy{Allow: []sandbox.Rule{{CIDR: "203.0.113.10/32"}}},
		Shares: []sandbox.Share{{Name: "s", Target: "/mnt"}},
	}, "agent")
	check(t, err)
	r.until("the agent", func() bool {
		said, _ := os.ReadFile(r.path("w", "node", agent.ID, "init", "stderr"))
		if len(said) > 0 {
			t.Fatalf("the agent says %s", said)
		}
		_, err := os.Stat(r.path("w", "node", agent.ID, "init", "stdout"))
		return err == nil
	})
	for name, story := range map[string]func(id string){
		"called": r.called, "refused": r.refused, "damaged": r.damaged, "lost": r.lost,
	} {
		sb, err := r.c.Create(ctx, sandbox.Spec{Image: "t/task"}, name)
		check(t, err)
		_, _, err = run(ctx, r.c, sb.ID, sandbox.ExecSpec{Argv: []string{"true"}}) // its first process has begun
		check(t, err)
		story(sb.ID)
		_, err = r.c.Delete(ctx, sb.ID)
		check(t, err)
	}
	r.goesOn(agent.ID)
	r.killed(agent.ID)
	r.imageChanges(agent.ID)
	end, err := r.c.Delete(ctx, agent.ID)
	check(t, err)
	if end.Reason != sandbox.ReasonDeleted || end.Evidence.Pauses < 4 || end.Evidence.PausedFor == 0 {
		t.Errorf("its record: %+v", end)
	}
	r.waits()
	check(t, syscall.Unmount(disk, 0))
	r.nothingLeftOf()
}

// waits has an agent put to disk each time that it waits for its model, and woken by the
// first packet of the answer, and by whoever holds the answer.
func (r *napRig) waits() {
	t := r.t
	answers := r.l.model("203.0.113.10:8001")
	r.flags = append(r.flags, "--model-endpoint", "203.0.113.10:8001", "--paused-memory", "hibernate")
	r.again()
	sb, err := r.c.Create(r.ctx, sandbox.Spec{
		Image: "t/task", DiskMB: 64, Entrypoint: []string{"python3", "-c", strings.ReplaceAll(asker, "8000", "8001")}, Network: sandbox.Policy{Allow: []sandbox.Rule{{CIDR: "203.0.113.10/32"}}},
	}, "asker")
	check(t, err)
	asleep := func() {
		t.Helper()
		r.until("a hibernation", func() bool { return r.state(sb.ID) == sandbox.StateHibernated })
	}
	for i, wake := range []bool{false, true, false} {
		asleep()
		if wake {
			r.wake(sb.ID)
		}
		if i == 2 { // nobody sees the answer; the next worker wakes it
			r.killWorker()
		}
		answer := fmt.Sprint("answer ", i)
		answers.give(r.ctx, answer)
		if i == 2 {
			r.startWorkerIn(r.l.node, r.flags...)
			r.c = r.socketClient()
		}
		r.until(answer, func() bool {
			said, _ := os.ReadFile(r.path("w", "node", sb.ID, "init", "stdout"))
			return strings.HasSuffix(string(said), answer+"\n")
		})
	}
	asleep()
	var out bytes.Buffer
	if _, err := r.c.ReadFile(r.ctx, sb.ID, "/etc/passwd", sandbox.ReadOptions{}, &out); err != nil || out.Len() == 0 {
		t.Errorf("a file of one that waits for its model: %q, %v", out.String(), err)
	}
	asleep()
	_, err = r.c.Delete(r.ctx, sb.ID)
	check(t, err)
}

// called has one hibernated by a call, and woken by what needs its tasks.
func (r *napRig) called(id string) {
	t := r.t
	sh := func(command string) string {
		t.Helper()
		code, out, err := run(r.ctx, r.c, id, sandbox.ExecSpec{Shell: command})
		if err != nil || code != 0 {
			t.Fatalf("%s: %d %q %v\n%s", command, code, out, err, r.logTail())
		}
		return out
	}
	sh("echo disk > /var/f; echo memory > /dev/shm/f; rm -rf /usr/share/doc; echo more >> /etc/hosts")
	before := sh("cat /etc/hosts")
	a, err := r.c.Exec(r.ctx, id, sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: "first", Argv: []string{"echo", "said"}}})
	if err != nil || string(a.Out) != "said\n" {
		t.Fatalf("%+v, %v", a, err)
	}
	r.hibernate(id)
	// What is known without the guest is told, and wakes nobody.
	var out bytes.Buffer
	_, err = r.c.Output(r.ctx, id, "first", "stdout", 0, &out)
	if again, err2 := r.c.Exec(r.ctx, id, sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: "first", Argv: []string{"echo", "said"}}}); err != nil || err2 != nil || out.String() != "said\n" || string(again.Out) != "said\n" {
		t.Errorf("the output of before: %q, %+v, %v, %v", out.String(), again, err, err2)
	}
	if u, err := r.c.Usage(r.ctx, id); err != nil || u.DiskBytes == 0 {
		t.Errorf("usage: %+v, %v", u, err)
	}
	if _, err := r.c.StatFile(r.ctx, id, "/var/f"); !errors.Is(err, sandbox.ErrNotReady) {
		t.Errorf("a file's state: %v", err)
	}
	if _, err := r.c.ReadFile(r.ctx, id, "/var/f", sandbox.ReadOptions{}, io.Discard); !errors.Is(err, sandbox.ErrNotReady) {
		t.Errorf("a file that is read: %v", err)
	}
	if _, err := r.c.Pause(r.ctx, id); err != nil || r.state(id) != sandbox.StateHibernated {
		t.Errorf("paused: %s, %v", r.state(id), err)
	}
	if got := sh("cat /var/f /dev/shm/f; ls /usr/share/doc 2>/dev/null | wc -l"); got != "disk\nmemory\n0\n" {
		t.Errorf("woken by a command: %q", got)
	}
	if got := sh("cat /etc/hosts"); got != before {
		t.Errorf("the hosts file: %q, before %q", got, before)
	}
	r.hibernate(id)
	_, err = r.c.WriteFile(r.ctx, id, "/var/g", sandbox.WriteOptions{}, strings.NewReader("text"))
	if err != nil || r.state(id) != sandbox.StateRunning {
		t.Errorf("woken by a file: %s, %v", r.state(id), err)
	}
	r.wake(id) // which is none
	r.pause(r.ctx, r.c, id)
	r.wake(id)
	r.waitsLong(id)
	r.hibernate(id) // and is deleted as it is
}

// waitsLong has one put to disk because its wait is long and there is no swap.
func (r *napRig) waitsLong(id string) {
	lock := swapLock(r.t) // another test's would have room
	defer lock.Close()
	if hasSwap() {
		return // the machine's own
	}
	check(r.t, whenReady(func() error { _, err := r.c.PauseFor(r.ctx, id, 10*time.Minute); return err }))
	r.until("a hibernation for a long wait", func() bool { return r.state(id) == sandbox.StateHibernated })
	r.wake(id)
}

// refused has one go on that cannot be hibernated.
func (r *napRig) refused(id string) {
	t := r.t
	reason := func(want string) {
		t.Helper()
		err := whenReady(func() error { _, err := r.c.Hibernate(r.ctx, id); return err })
		if !errors.Is(err, sandbox.ErrNotHibernated) || !strings.Contains(err.Error(), want) || r.state(id) != sandbox.StateRunning {
			t.Errorf("want %q: %v, and it is %s", want, err, r.state(id))
		}
	}
	_, err := r.c.Start(r.ctx, id, sandbox.ExecSpec{ID: "agent", Role: sandbox.ExecAgent, Argv: []string{"sleep", "1000"}})
	check(t, err)
	reason("a restore would kill")
	check(t, r.c.Signal(r.ctx, id, "agent", int(syscall.SIGKILL)))
	done(t, r.c, id, "agent")
	_, _, err = run(r.ctx, r.c, id, sandbox.ExecSpec{Session: "s", Shell: "cd /tmp"})
	check(t, err)
	reason("a restore would kill") // the shell of a session
	_, _, err = run(r.ctx, r.c, id, sandbox.ExecSpec{Session: "s", Shell: "exit"})
	check(t, err)
	check(t, r.c.Give(r.ctx, id, sandbox.Share{Name: "s", Target: "/given"}))
	reason("/given")
	check(t, r.c.Take(r.ctx, id, "/given"))
	full := r.path("w", "node", "full")
	check(t, os.WriteFile(full, make([]byte, 270<<20), 0o600))
	reason("MiB free")
	check(t, os.Remove(full))
	r.hibernate(id)
	r.wake(id)
}

// damaged has one end whose files are not what was written.
func (r *napRig) damaged(id string) {
	t := r.t
	r.hibernate(id)
	pages := r.path("w", "node", id, "hibernated", "pages.img")
	b, err := os.ReadFile(pages)
	check(t, err)
	b[len(b)/2] ^= 0xff // one byte, which a restore takes for the guest's
	check(t, os.WriteFile(pages, b, 0o600))
	_, err = r.c.Wake(r.ctx, id)
	if !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("a damaged checkpoint: %v", err)
	}
	var sb sandbox.Sandbox
	r.until("its end", func() bool {
		sb, err = r.c.Get(r.ctx, id)
		check(t, err)
		return sb.End != nil
	})
	if sb.End.Reason != sandbox.ReasonRestore || sb.End.Blame != sandbox.BlameInfra || !sb.End.Retryable || !strings.Contains(sb.End.Message, "damaged on the disk") {
		t.Errorf("its record: %+v", sb.End)
	}
}

// lost has the process killed that keeps a hibernated sandbox.
func (r *napRig) lost(id string) {
	r.hibernate(id)
	for _, pid := range r.processesOf(id, "holder") {
		check(r.t, syscall.Kill(pid, syscall.SIGKILL))
	}
	if end := ended(r.t, r.c, id); end.Reason != sandbox.ReasonNodeLost || end.Blame != sandbox.BlameInfra || !end.Retryable {
		r.t.Errorf("its record: %+v", end)
	}
}

// killed has the worker killed while a sandbox is hibernated, is being hibernated and is
// being woken.
func (r *napRig) killed(id string) {
	t := r.t
	r.hibernate(id)
	r.again()
	if st := r.state(id); st != sandbox.StateHibernated {
		t.Errorf("hibernated, under the next worker: %s", st)
	}
	r.wake(id)
	r.goesOn(id)

	folder := r.path("w", "node", id, "hibernated")
	for _, name := range []string{"", "pages.img"} {
		done := make(chan struct{})
		go func() { defer close(done); _, _ = r.c.Hibernate(r.ctx, id) }()
		r.until("a checkpoint", func() bool { _, err := os.Lstat(filepath.Join(folder, name)); return err == nil })
		r.killWorker()
		<-done
		r.startWorkerIn(r.l.node, r.flags...)
		r.c = r.socketClient()
		r.until("one state or the other", func() bool { st := r.state(id); return st == sandbox.StatePaused || st == sandbox.StateHibernated })
		r.wake(id)
		r.goesOn(id)
	}

	r.hibernate(id)
	done := make(chan struct{})
	go func() { defer close(done); _, _ = r.c.Wake(r.ctx, id) }()
	r.until("a restore", func() bool { return len(r.processesOf(id, "boot")) > 0 })
	r.killWorker()
	<-done
	r.startWorkerIn(r.l.node, r.flags...)
	r.c = r.socketClient()
	r.wake(id)
	r.goesOn(id)
	if n := len(r.processesOf(id, "boot")); n != 1 {
		t.Errorf("%d Sentries of one sandbox", n)
	}
}

// imageChanges has the name of the image lead elsewhere, and the processes that serve it
// killed, while a sandbox is hibernated.
func (r *napRig) imageChanges(id string) {
	t := r.t
	r.hibernate(id)
	r.quarry("convert", "oci:"+filepath.Join(os.Getenv("QUARRY_IMAGES"), "debian"), "--data", r.path("d"), "--name", "t/task")
	for _, pid := range processesNamed(t, r.path("bin", "quarry")+"\x00reader\x00") {
		check(t, syscall.Kill(pid, syscall.SIGKILL))
	}
	shims := processesNamed(t, r.path("bin", "quarry-shim")+"\x00--socket\x00")
	if len(shims) == 0 {
		t.Error("nobody serves the image")
	}
	for _, pid := range shims {
		check(t, syscall.Kill(pid, syscall.SIGKILL))
		r.until("the end of who serves the image", func() bool { return syscall.Kill(pid, 0) != nil })
	}
	r.wake(id)
	r.goesOn(id)
	time.Sleep(3 * time.Second) // as long as it takes to give a mount up
	r.goesOn(id)
	a, err := r.c.Exec(r.ctx, id, sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: "image", Argv: []string{"ls", "/usr/bin"}}})
	if err != nil || a.ExitCode == nil || *a.ExitCode != 0 || a.Infra != "" {
		t.Errorf("a command after the image was mounted anew: %+v, %v\n%s", a.ExecState, err, r.logTail())
	}
}

// TestWhatACallPausedACommandDoesNotWake pauses a sandbox by a call, which the worker puts
// to disk by itself: a command does not wake it, as it would not have resumed it before.
// One that a call has put to disk it wakes. Nothing is put to a disk that has little left.
func TestWhatACallPausedACommandDoesNotWake(t *testing.T) {
	r := newWorkerRig(t, "debian", "--paused-memory", "hibernate")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := r.client()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task"}, "key")
	check(t, err)
	command := func() error {
		_, _, err := run(ctx, c, sb.ID, sandbox.ExecSpec{Shell: "true"})
		return err
	}
	check(t, command())
	check(t, whenReady(func() error { _, err := c.Pause(ctx, sb.ID); return err }))
	asleep := func() bool {
		now, err := c.Get(ctx, sb.ID)
		check(t, err)
		return now.State == sandbox.StateHibernated
	}
	refused := func(when string) {
		t.Helper()
		if err := command(); !errors.Is(err, sandbox.ErrNotReady) || !strings.Contains(err.Error(), "resume it first") {
			t.Errorf("a command, %s: %v", when, err)
		}
	}
	r.await(ctx, "a hibernation", asleep)
	refused("put to disk by the worker")
	r.killWorker()
	r.startWorker("--paused-memory", "hibernate")
	c = r.client()
	refused("of the worker before")
	if !asleep() {
		t.Error("what was refused has woken it")
	}
	_, err = c.Resume(ctx, sb.ID)
	check(t, err)
	check(t, command())
	check(t, whenReady(func() error { _, err := c.Hibernate(ctx, sb.ID); return err }))
	check(t, command())
	r.killWorker()
	r.startWorker("--disk-reserve", "1000T")
	c = r.client()
	if err := whenReady(func() error { _, err := c.Hibernate(ctx, sb.ID); return err }); !errors.Is(err, sandbox.ErrNotHibernated) || !strings.Contains(err.Error(), "the disk of") {
		t.Errorf("a hibernation to a disk that is for what runs: %v", err)
	}
	check(t, command())
	_, err = c.Delete(ctx, sb.ID)
	check(t, err)
	r.nothingLeftOf()
}
