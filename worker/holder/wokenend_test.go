package holder_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"quarry/worker/sandbox"
)

// slowRestore has runsc take its time after it has restored a sandbox.
func slowRestore(t *testing.T, runsc []string) []string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "runsc")
	script := fmt.Sprintf("#!/bin/sh\n%q \"$@\" || exit\ncase \" $* \" in *' restore '*) sleep 2;; esac\n", runsc[0])
	if err := os.WriteFile(path, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return append([]string{path}, runsc[1:]...)
}

// A first process whose time was over while it was hibernated ends as soon as it is
// restored, also before anybody has asked for its status: that is an end of its own.
func TestAFirstProcessThatEndsAtItsWake(t *testing.T) {
	const gap = 15 // seconds that nothing but a hibernation takes from it
	c := config(t, "sh", "-c", fmt.Sprintf("last=$(date +%%s); while now=$(date +%%s); [ $((now - last)) -lt %d ]; do last=$now; sleep 0.02; echo; done; exit 3", gap))
	c.Runsc = slowRestore(t, c.Runsc)
	r := startRig(t, c)
	r.waitFor("its output", func() bool {
		st, err := os.Stat(filepath.Join(r.dir, "init", "stdout"))
		return err == nil && st.Size() > 0
	})
	r.hibernate()
	time.Sleep((gap + 2) * time.Second)
	if err := r.c.Wake(r.ctx); err != nil && !errors.Is(err, sandbox.ErrEnded) {
		t.Errorf("its wake: %v", err)
	}
	end, err := r.c.WaitEnded(r.ctx)
	if err != nil || end.NotRestored || end.Killed || end.Message != "" || end.Init == nil || end.Init.Code != 3 {
		t.Errorf("%+v, init %+v, %v", end, end.Init, err)
	}
}
