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

// attachTests is a function for scripts, attachTests WHICH NOT, that runs those of
// nbd/attach's own tests that one pattern matches and another does not.
const attachTests = `
set -eu
attachTests() (
	cp -a /host/tools /tmp/
	export PATH=/tmp/tools:$PATH REQUIRE_ALL=1
	cd /tmp
	attach.test -test.list "$1" | grep -q . || { echo "no test matches $1"; exit 1; }
	attach.test -test.v -test.timeout 5m -test.run "$1" -test.skip "$2"
	rm -rf /tmp/tools
)
`

// attachScript runs what is about the kernel's NBD: what is mounted, refused,
// killed, swept, and attached by many at once. The rest is about FUSE and loop
// devices, which guests have like any machine.
const attachScript = `
attachTests 'NBD|TestAttached|TestReadError|TestHundred|TestDeadline|TestUnmount|TestDetach|TestAttachUndoes|TestSweepLeaves|TestProbe' 'TestWithoutNBD|TestLastNBD'
for pid in /sys/block/nbd*/pid; do
	if [ -e $pid ]; then echo "left: $pid $(cat ${pid%pid}backend)"; exit 1; fi
done
`

// withoutScript is for a guest that has not loaded NBD.
const withoutScript = `
attachTests TestWithoutNBD none
`

// lastScript loads NBD with every device that there can be, the fewest that a
// parameter allows. That takes Linux 6.12 seconds, and 6.1 minutes.
const lastScript = `
insmod /modules/nbd.ko nbds_max=4096 max_part=255
ulimit -n 8192
attachTests TestLastNBD none
`

// bringAttachTests adds nbd/attach's tests of the kernel's NBD to the programs, and puts
// what they need into the shared folder.
func (s *share) bringAttachTests(t *testing.T) {
	t.Helper()
	path := s.lab.Path("attach.test")
	s.programs = append(s.programs, path)
	cmd := exec.CommandContext(t.Context(), "go", "test", "-c", "-tags", "vm", "-o", path, "quarry/nbd/attach")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the tests: %v: %s", err, out)
	}
	bringTool(t, s.dir, "mkfs.erofs")
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
