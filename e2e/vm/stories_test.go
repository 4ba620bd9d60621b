package vm_test

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"quarry/api/client"
	"quarry/e2e/vm"
	"quarry/internal/testimage"
	"quarry/nbd/attach"
)

var (
	//go:embed lib.sh
	libScript string
	//go:embed stories.sh
	storiesScript string
	//go:embed workers.sh
	workersScript string
	//go:embed sandboxes.sh
	sandboxesScript string
	//go:embed waits.sh
	waitsScript string
	//go:embed hibernate.sh
	hibernateScript string
	//go:embed agents.sh
	agentsScript string
)

// storyRig is a share with a data folder of two images.
type storyRig struct {
	share
	one, two string // tree digests, as signed
}

func newStoryRig(t *testing.T) storyRig {
	t.Helper()
	r := storyRig{share: newShare(t)}
	data := filepath.Join(r.dir, "store")
	for seed, name := range []string{"t/one", "t/two"} {
		im := testimage.Build(t, testimage.Layer{Entries: oddEntries(t, byte(seed))})
		_, err := r.lab.Convert(t.Context(), data, im.Source(""), name)
		check(t, err)
	}
	s, err := r.lab.Serve(t.Context(), data)
	check(t, err)
	c, err := client.New(client.Config{URL: s.URL})
	check(t, err)
	defer c.Close()
	keys := filepath.Join(data, "keys")
	r.one = signedImage(t, c, keys, "t/one").Statement.Tree.String()
	r.two = signedImage(t, c, keys, "t/two").Statement.Tree.String()
	check(t, s.Stop())
	return r
}

// script is stories for an attach mode, with their data in the folder work.
func (r storyRig) script(mode attach.Mode, work, store string, stories ...string) string {
	return fmt.Sprintf("ATTACH=%s WORK=%s STORE=%s ONE=%s TWO=%s\n", mode, work, store, r.one, r.two) + libScript + strings.Join(stories, "")
}

// networkModules are what the network of sandboxes takes of a kernel.
var networkModules = []string{"nf_tables", "nft_ct", "nft_chain_nat", "nft_masq", "nft_limit", "nft_connlimit", "nft_log", "nft_reject_ipv4", "nf_conntrack_netlink", "veth"}

// TestKernelNBD attaches through the kernel's NBD on the kernels that people have, in
// guests that run beside each other: nbd/attach's own tests, and the stories. Those of
// sandboxes, with version 2 of control groups, are shared out between the two: what they
// wait for on the newer one, which takes memory without page cache, and what goes to disk
// on the older one.
func TestKernelNBD(t *testing.T) {
	t.Parallel()
	older, newer := kernel(t, vm.Linux6_1), kernel(t, vm.Linux6_12)
	r := newStoryRig(t)
	r.bringAttachTests(t)
	bringTool(t, r.dir, "mkfs.ext4")
	const setUp = "set -eu\ncp -a /host/store /tmp/store\nmkdir /tmp/w\n"
	for _, g := range []struct {
		kernel  *vm.Kernel
		stories []string
		modules []string
	}{
		{older, []string{hibernateScript, agentsScript}, []string{"nft_objref", "nfnetlink_log", "ext4"}}, // nft_objref is a part of nf_tables since 6.2
		{newer, []string{sandboxesScript, waitsScript}, nil},
	} {
		t.Run(g.kernel.Suite, func(t *testing.T) {
			t.Parallel()
			stories := append([]string{storiesScript, workersScript}, g.stories...)
			runGuest(t, vm.Machine{
				Kernel: g.kernel, Share: r.dir, Programs: r.programs, Modules: slices.Concat([]string{nbdModule, "lzo-rle", "zram"}, networkModules, g.modules),
				Script: setUp + attachTests + attachScript + r.script(attach.ModeNBD, "/tmp/w", "/tmp/store", stories...),
			})
		})
	}
}

// TestStoriesHere tells them on this machine, through FUSE.
func TestStoriesHere(t *testing.T) {
	t.Parallel()
	r := newStoryRig(t)
	work := t.TempDir()
	console, done := logLines(t)
	cmd := exec.CommandContext(t.Context(), "sh")
	cmd.Args = append(cmd.Args, "-c", r.script(attach.ModeFUSE, work, filepath.Join(r.dir, "store"), storiesScript, workersScript, sandboxesScript))
	cmd.Stdout, cmd.Stderr = console, console
	cmd.WaitDelay = 5 * time.Second // after a story that failed, others may keep the console
	err := cmd.Run()
	console.Close()
	<-done
	if err != nil {
		t.Error(err)
	}
	// After a story that failed: what it has left must not keep this machine.
	if err := r.lab.EndBelow(work); err != nil {
		t.Error(err)
	}
	mounts, err := os.ReadFile("/proc/mounts")
	check(t, err)
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); strings.HasPrefix(f[1], work+"/") {
			t.Errorf("left: %s", line)
			unix.Unmount(f[1], unix.MNT_DETACH)
		}
	}
}
