package vm_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/e2e/vm"
	"quarry/internal/need"
)

// nbdModule is the kernel's NBD client with the devices that a distribution's
// default gives.
const nbdModule = "nbd nbds_max=16"

// attachScript runs those of nbd/attach's own tests that are about the mode: what
// is mounted, refused, killed, swept, and attached by many at once. The rest is
// about FUSE and loop devices, which guests have like any machine.
const attachScript = `
(
	cp -a /host/attach.test /host/tools /tmp/
	export PATH=/tmp/tools:$PATH QUARRY_TEST_ATTACH=nbd REQUIRE_ALL=1
	cd /tmp
	./attach.test -test.v -test.timeout 5m -test.run 'NBD|TestAttached|TestReadError|TestHundred|TestDeadline|TestUnmount|TestDetach|TestAttachUndoes|TestSweepLeaves|TestProbe'
	rm -rf /tmp/attach.test /tmp/tools
)
for pid in /sys/block/nbd*/pid; do
	if [ -e $pid ]; then echo "left: $pid $(cat ${pid%pid}backend)"; exit 1; fi
done
`

// bringAttachTests puts nbd/attach's tests, and what they need, into the shared
// folder.
func bringAttachTests(t *testing.T, share string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", filepath.Join(share, "attach.test"), "quarry/nbd/attach")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the tests: %v: %s", err, out)
	}
	bringTool(t, share, "mkfs.erofs")
}

// runGuest runs a machine, with its console in the test's log, and fails unless
// its script ends with status 0.
func runGuest(t *testing.T, m vm.Machine) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), guestLimit)
	defer cancel()
	console, done := logLines(t)
	m.Console = console
	got, err := m.Run(ctx)
	console.Close()
	<-done
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("Linux %s: %s from boot to power-off", m.Kernel.Release, got.Took.Round(100*time.Millisecond))
	if got.Status != 0 {
		t.Fatalf("the guest's script ended with status %d:\n%s", got.Status, got.Tail)
	}
}

// bringTool puts a program of this machine and what it links into the shared
// folder's tools, where a guest, which has no library, can run it.
func bringTool(t *testing.T, share, name string) {
	t.Helper()
	path := need.Tool(t, name)
	linked, err := exec.Command("ldd", path).Output()
	check(t, err)
	dir := filepath.Join(share, "tools")
	check(t, os.MkdirAll(filepath.Join(dir, "lib"), 0o755))
	copyFile(t, path, filepath.Join(dir, "lib", name))
	loader := ""
	for _, word := range strings.Fields(string(linked)) {
		if !filepath.IsAbs(word) {
			continue
		}
		copyFile(t, word, filepath.Join(dir, "lib", filepath.Base(word)))
		if strings.HasPrefix(filepath.Base(word), "ld-linux") {
			loader = filepath.Base(word)
		}
	}
	lib := `"$(dirname "$0")/lib"`
	script := fmt.Sprintf("#!/bin/sh\nexec %s/%s --library-path %s %s/%s \"$@\"\n", lib, loader, lib, lib, name)
	check(t, os.WriteFile(filepath.Join(dir, name), []byte(script), 0o755))
}
