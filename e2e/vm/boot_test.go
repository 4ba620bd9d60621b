package vm_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/e2e/vm"
	"quarry/internal/need"
)

// kernel returns a kernel from the cache that make shares between runs.
func kernel(t *testing.T, s vm.Suite) *vm.Kernel {
	t.Helper()
	need.Root(t)
	for _, tool := range vm.Tools {
		need.Tool(t, tool)
	}
	cache := os.Getenv("QUARRY_VM")
	if cache == "" {
		cache = filepath.Join("..", "..", ".cache", "vm")
	}
	k, err := vm.Fetch(t.Context(), cache, s)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestAGuestThatFailsIsAFailure shows that no end but the script's own counts as
// one: what a status says, what a panic leaves, and a guest that hangs.
func TestAGuestThatFailsIsAFailure(t *testing.T) {
	t.Parallel()
	k := kernel(t, vm.Linux6_1)
	ctx, cancel := context.WithTimeout(t.Context(), guestLimit)
	t.Cleanup(cancel)
	t.Run("a script that exits 7", func(t *testing.T) {
		t.Parallel()
		share := t.TempDir()
		r, err := vm.Machine{
			Kernel: k, Share: share, Modules: []string{"nbd nbds_max=3"},
			Script: "uname -r; cat /sys/module/nbd/parameters/nbds_max > seen; exit 7",
		}.Run(ctx)
		t.Log(r.Took)
		if err != nil || r.Status != 7 || !strings.Contains(r.Tail, k.Release) {
			t.Errorf("%d, %v; console: %s", r.Status, err, r.Tail)
		}
		if got, err := os.ReadFile(filepath.Join(share, "seen")); err != nil || string(got) != "3\n" {
			t.Errorf("the guest wrote %q in the shared folder, %v, want the module's parameter 3", got, err)
		}
	})
	t.Run("a panic", func(t *testing.T) {
		t.Parallel()
		var none *vm.NoStatusError
		_, err := vm.Machine{Kernel: k, Share: t.TempDir(), Script: "echo c > /proc/sysrq-trigger; exit 0"}.Run(ctx)
		if !errors.As(err, &none) || none.Err != nil || !strings.Contains(none.Tail, "Kernel panic") {
			t.Error(err)
		}
	})
	t.Run("a guest that hangs", func(t *testing.T) {
		t.Parallel()
		hung, end := context.WithCancelCause(ctx)
		errLate := errors.New("too late")
		var said strings.Builder // a word can come in pieces
		console := writerFunc(func(p []byte) {
			said.Write(p)
			if strings.Contains(said.String(), "hangs") {
				end(errLate)
			}
		})
		var none *vm.NoStatusError
		_, err := vm.Machine{Kernel: k, Share: t.TempDir(), Script: "echo hangs; sleep 1000", Console: console}.Run(hung)
		if !errors.Is(err, errLate) || !errors.As(err, &none) || !strings.Contains(none.Tail, "hangs") {
			t.Error(err)
		}
	})
}

type writerFunc func(p []byte)

func (f writerFunc) Write(p []byte) (int, error) {
	f(p)
	return len(p), nil
}
