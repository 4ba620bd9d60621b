package vm_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"quarry/e2e/vm"
)

// waitModules are what copies of headers need of kernels that have it in modules.
var waitModules = []string{"nf_tables", "nfnetlink_log", "nft_log", "nft_limit", "veth"}

// waitScript runs worker/network/wait's own tests of a kernel, without those that
// need runsc and those whose model answers sooner than an emulated guest is paused.
const waitScript = `
set -eu
cd /tmp
REQUIRE_ALL=1 wait.test -test.v -test.timeout 10m \
	-test.run 'Order|EndsAConnection|ICMP|Flush|Removed|OtherTables|Reader|Overrun|Two|NeverMade|SendsMuch|PausedUntil' -test.skip 'PausedUntilTheAnswerComes/.*200ms'
`

// TestWaitsAreSeen runs the tests of pauses for the model on the kernels people have:
// tables with an owner, nfnetlink_log and its overruns, notices of changed rules.
func TestWaitsAreSeen(t *testing.T) {
	t.Parallel()
	for _, suite := range []vm.Suite{vm.Linux6_1, vm.Linux6_12} {
		t.Run(suite.Name, func(t *testing.T) {
			t.Parallel()
			test := filepath.Join(t.TempDir(), "wait.test")
			cmd := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", test, "quarry/worker/network/wait")
			cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("build the tests: %v: %s", err, out)
			}
			runGuest(t, vm.Machine{Kernel: kernel(t, suite), Share: t.TempDir(), Programs: []string{test}, Processors: 1, Modules: waitModules, Script: waitScript})
		})
	}
}
