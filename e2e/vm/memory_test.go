package vm_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"quarry/e2e/vm"
	"quarry/internal/need"
)

// memoryScript runs worker/memory's tests with real sandboxes: the guest has version 2
// of control groups, and swap on zram.
const memoryScript = `
set -eu
cd /tmp
export REQUIRE_ALL=1
memory.test -test.v -test.timeout 10m -test.run 'TestAGuestThatWaits.*/zram|TestAPart|TestWhatIsAlwaysUsed|TestAKilled|TestAWatch|TestHoles'
`

// TestMemoryOfWaitingSandboxes takes the memory of a paused sandbox and brings it back
// on the kernels that people have, with memory.reclaim.
func TestMemoryOfWaitingSandboxes(t *testing.T) {
	t.Parallel()
	kernels := []*vm.Kernel{kernel(t, vm.Linux6_1), kernel(t, vm.Linux6_12)}
	dir := t.TempDir()
	programs := []string{need.Tool(t, "runsc")}
	for name, args := range map[string][]string{
		"memory.test":      {"test", "-c", "quarry/worker/memory"},
		"quarry-test-hold": {"build", "quarry/worker/memory/testdata/hold"},
	} {
		programs = append(programs, filepath.Join(dir, name))
		cmd := exec.CommandContext(t.Context(), "go", append(args[:len(args)-1:len(args)-1], "-o", filepath.Join(dir, name), args[len(args)-1])...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", name, err, out)
		}
	}
	for _, k := range kernels {
		t.Run(k.Suite, func(t *testing.T) {
			t.Parallel()
			runGuest(t, vm.Machine{Kernel: k, Share: dir, Programs: programs, Processors: 1, Script: memoryScript, Modules: []string{"lzo-rle", "zram"}})
		})
	}
}
