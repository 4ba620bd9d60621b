package holder_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

// fill leaves so many bytes free on the disk of the rig's folder.
func (r *rig) fill(leave int64) (filler string) {
	r.Helper()
	filler = filepath.Join(r.dir, "filler")
	var st unix.Statfs_t
	if err := unix.Statfs(r.dir, &st); err != nil {
		r.Fatal(err)
	}
	f, err := os.Create(filler)
	if err != nil {
		r.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, int64(st.Bavail)*st.Bsize-leave); err != nil {
		r.Fatal(err)
	}
	return filler
}

// wantAsleep checks that a wake was refused and that the sandbox wakes with room.
func (r *rig) wantAsleep(err error, filler string) {
	r.Helper()
	if !errors.Is(err, holder.ErrNoRoom) || !strings.Contains(err.Error(), "free some of it") {
		r.Errorf("a wake on a full disk: %v", err)
	}
	if st := r.state(); !st.Hibernated || st.Ended != nil {
		r.Fatalf("after a wake on a full disk: %+v", st)
	}
	if err := os.Remove(filler); err != nil {
		r.Fatal(err)
	}
	r.wake()
	if st := r.run(sandbox.ExecSpec{}, "cat /tmp/f; wc -c < /var/f"); r.output(st, "stdout") != "memory\n30000000\n" {
		r.Errorf("woken, it has %q", r.output(st, "stdout"))
	}
}

// A disk without room for what a restore writes, the upper layer too, refuses the wake.
func TestAWakeOnAFullDiskIsRefused(t *testing.T) {
	for _, leave := range []int64{0, 30 << 20} {
		t.Run(fmt.Sprint(leave), func(t *testing.T) {
			r := startRig(t, onSmallDisk(t, "250m"))
			r.run(sandbox.ExecSpec{}, "echo memory > /tmp/f; yes | head -c 30000000 > /var/f")
			r.hibernate()
			filler := r.fill(leave)
			r.wantAsleep(r.c.Wake(r.ctx), filler)
		})
	}
}

// A disk that fills while runsc restores is no end of the sandbox, whether runsc itself
// found no room, or somebody asks for its end afterwards.
func TestADiskThatFillsUnderAWake(t *testing.T) {
	for _, ends := range []bool{false, true} {
		t.Run(fmt.Sprintf("ended=%v", ends), func(t *testing.T) {
			c := onSmallDisk(t, "250m")
			script := filepath.Join(t.TempDir(), "runsc")
			filler := filepath.Join(c.Dir, "filler")
			text := fmt.Sprintf("#!/bin/sh\ncase \" $* \" in *' restore '*) [ -e %[1]s.once ] || { : > %[1]s.once; dd if=/dev/zero of=%[2]s bs=64k 2> /dev/null; };; esac\nexec %[3]s \"$@\"\n", script, filler, c.Runsc[0])
			if err := os.WriteFile(script, []byte(text), 0o755); err != nil {
				t.Fatal(err)
			}
			c.Runsc = append([]string{script}, c.Runsc[1:]...)
			r := startRig(t, c)
			r.run(sandbox.ExecSpec{}, "echo memory > /tmp/f; yes | head -c 30000000 > /var/f")
			r.hibernate()
			err := r.c.Wake(r.ctx)
			if !ends {
				r.wantAsleep(err, filler)
				return
			}
			if end, err := r.c.End(r.ctx); err != nil || !end.Killed || end.NotRestored {
				t.Errorf("ended: %+v, %v", end, err)
			}
		})
	}
}
