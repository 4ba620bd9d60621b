package sentry_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/worker/sentry"
)

// A paused guest goes to disk and comes back, with its files, and runs; what an exec
// started does not.
func TestACheckpointComesBack(t *testing.T) {
	r := newRig(t)
	r.run("echo memory > /tmp/f; echo disk > /var/f")
	if out, _ := r.run("cat /proc/uptime"); out == "" {
		t.Fatal("no uptime")
	}
	r.exec(sentry.Exec{Argv: []string{"sleep", "1000"}})
	list, err := r.c.Processes(r.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if doomed := sentry.Doomed(list, false); len(doomed) != 1 || doomed[0].Cmd != "sleep" || doomed[0].PID == 1 {
		t.Errorf("doomed of %+v: %+v", list, doomed)
	}
	if err := r.c.Pause(r.ctx); err != nil {
		t.Fatal(err)
	}
	image := need.ShortDir(t)
	began := time.Now()
	if err := r.c.Checkpoint(r.ctx, image); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	if list, err := r.c.Processes(r.ctx); err != nil || len(list) != 2 {
		t.Errorf("the guest afterwards: %+v, %v", list, err)
	}
	if err := r.c.Checkpoint(r.ctx, image); !errors.Is(err, os.ErrExist) {
		t.Errorf("a folder that is not empty: %v", err)
	}

	began = time.Now()
	box := r.box.Restore(t, image)
	t.Logf("checkpoint %v, restore %v", took, time.Since(began))
	r.box, r.c = box, sentry.New(box.Socket, box.ID)
	t.Cleanup(r.c.Close)
	if out, st := r.run("cat /tmp/f /var/f"); out != "memory\ndisk\n" || st != (sentry.Status{}) {
		t.Errorf("got %q, %+v", out, st)
	}
	if out, _ := r.run("ps | grep -c '[s]leep 1000$'"); out != "0\n" {
		t.Errorf("%q processes of an exec live on", out)
	}
}

// A disk that fills is told, and the guest goes on.
func TestACheckpointThatFindsNoRoom(t *testing.T) {
	r := newRig(t)
	dir := need.ShortDir(t)
	if err := unix.Mount("small", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(dir, unix.MNT_DETACH) })
	if err := r.c.Pause(r.ctx); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "c"), 0o700); err != nil {
		t.Fatal(err)
	}
	err := r.c.Checkpoint(r.ctx, filepath.Join(dir, "c"))
	var refused *sentry.RemoteError
	if !errors.As(err, &refused) {
		t.Errorf("a full disk: %v", err)
	}
	t.Log(err)
	if err := r.c.Resume(r.ctx); err != nil {
		t.Fatal(err)
	}
	if out, _ := r.run("echo on"); out != "on\n" {
		t.Errorf("got %q", out)
	}
}

func TestDoomed(t *testing.T) {
	list := []sentry.Process{{PID: 1}, {PID: 2, PPID: 1}, {PID: 3, PPID: 2}, {PID: 4}, {PID: 5, PPID: 4}, {PID: 6, PPID: 99}, {PID: 7, PPID: 8}, {PID: 8, PPID: 7}}
	for execs, want := range map[bool]string{false: "[4 5 6 7 8]", true: "[2 3 4 5 6 7 8]"} {
		var got []int
		for _, p := range sentry.Doomed(list, execs) {
			got = append(got, p.PID)
		}
		if fmt.Sprint(got) != want {
			t.Errorf("execs %v: %v, want %s", execs, got, want)
		}
	}
}
