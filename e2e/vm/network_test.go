package vm_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"quarry/e2e/vm"
	"quarry/internal/need"
)

// networkScript runs worker/network's tests. The guest has a namespace of its own as
// node, so that all of them can run.
const networkScript = `
set -eu
cd /tmp
export REQUIRE_ALL=1 QUARRY_NETWORK_SLOW=1
network.test -test.v -test.timeout 20m -test.skip 'TestFlowsAreBounded|TestGivenUpTake'
`

// TestNetworkOnKernels has guests held on the kernels that people have: the older one
// knows no table that is owned for good.
func TestNetworkOnKernels(t *testing.T) {
	t.Parallel()
	kernels := []*vm.Kernel{kernel(t, vm.Linux6_1), kernel(t, vm.Linux6_12)}
	dir := t.TempDir()
	programs := []string{need.Tool(t, "runsc"), filepath.Join(dir, "network.test")}
	cmd := exec.CommandContext(t.Context(), "go", "test", "-c", "-o", programs[1], "quarry/worker/network")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the tests: %v: %s", err, out)
	}
	for _, k := range kernels {
		modules := networkModules
		if k == kernels[0] {
			modules = append(slices.Clone(modules), "nft_objref") // a part of nf_tables since 6.2
		}
		t.Run(k.Suite, func(t *testing.T) {
			t.Parallel()
			runGuest(t, vm.Machine{Kernel: k, Share: dir, Programs: programs, Processors: 1, Script: networkScript, Modules: modules})
		})
	}
}
