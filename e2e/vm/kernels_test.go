package vm_test

import (
	"bufio"
	_ "embed"
	"flag"
	"fmt"
	"io"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/e2e/vm"
	"quarry/internal/erofstest"
)

//go:embed guest.sh
var guestScript string

var full = flag.Bool("full", false, "mount the whole Debian image in the guests too, which takes them minutes")

// TestKernelsSeeTheSameTree mounts image files on the kernels people have, and on
// this machine's, and compares each mount with what the signed statement says.
// Linux before 6.4 takes bootstrap and data as two devices; later ones the
// flattened device too.
func TestKernelsSeeTheSameTree(t *testing.T) {
	t.Parallel()
	guests := []struct {
		suite vm.Suite
		forms []string
		last  string // a script about NBD
	}{
		{vm.Linux6_1, []string{"split"}, withoutScript},
		{vm.Linux6_12, []string{"split", "flat"}, withoutScript + lastScript},
	}
	kernels := map[string]*vm.Kernel{}
	for _, g := range guests {
		kernels[g.suite.Name] = kernel(t, g.suite)
	}
	r := newRig(t)
	r.bringAttachTests(t)
	t.Run("native", r.native)
	for _, g := range guests {
		t.Run(g.suite.Name, func(t *testing.T) {
			t.Parallel()
			runGuest(t, vm.Machine{
				Kernel: kernels[g.suite.Name], Share: r.dir, Programs: r.programs, Loadable: []string{"nbd"},
				Script: fmt.Sprintf("CHECKS=%q\n", r.checks(g.forms)) + guestScript + attachTests + g.last,
			})
		})
	}
}

// guestLimit ends a guest that hangs. Boot and script take an eighth of it on an idle
// machine of two cores, and several times that where others use them too.
const guestLimit = 25 * time.Minute

// checks are the images that a guest mounts, in each of the forms, as guest.sh
// takes them.
func (r rig) checks(forms []string) string {
	var checks []string
	for _, im := range r.disks {
		for _, form := range forms {
			if im.name != "debian" || *full {
				checks = append(checks, im.name+":"+form+":"+im.tree.String())
			}
		}
	}
	return strings.Join(checks, " ")
}

// logLines returns a writer whose lines go to the test's log as they come, and
// when the last is there.
func logLines(t *testing.T) (io.WriteCloser, <-chan struct{}) {
	r, w := io.Pipe()
	done := make(chan struct{})
	go func() { // ends when w is closed
		defer close(done)
		lines := bufio.NewScanner(r)
		for lines.Scan() {
			t.Log(strings.TrimRight(lines.Text(), "\r"))
		}
		io.Copy(io.Discard, r) // after a line that is too long
	}()
	return w, done
}

func (r rig) native(t *testing.T) {
	for _, im := range r.disks {
		for _, form := range []string{"split", "flat"} {
			files := []string{".flat"}
			if form == "split" {
				files = []string{".boot", ".data"}
			}
			for i := range files {
				files[i] = filepath.Join(r.dir, im.name+files[i])
			}
			mnt := erofstest.Mount(t, files[0], files[1:]...)
			out, err := r.lab.Quarry(t.Context(), "treedigest", mnt)
			if err != nil {
				t.Error(err)
			}
			if got := strings.TrimSpace(out); got != im.tree.String() {
				t.Errorf("%s as %s: the mount has tree digest %s, the statement says %s", im.name, form, got, im.tree)
			}
		}
	}
}
