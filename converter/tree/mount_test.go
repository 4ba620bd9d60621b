package tree_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"quarry/converter/tree"
	"quarry/internal/need"
	"quarry/rafs"
)

// encoded returns the bootstrap of tr, and what it decodes to.
func encoded(t *testing.T, tr *rafs.Tree) ([]byte, *rafs.Image) {
	t.Helper()
	b, err := rafs.Encode(tr)
	if err != nil {
		t.Fatal(err)
	}
	m, err := rafs.Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	return b, m
}

func TestDecodedBootstrapHasTheDigestOfItsTree(t *testing.T) {
	tr := sample(t, content{})
	_, m := encoded(t, tr)
	if got, want := tree.Digest(m.Tree), tree.Digest(tr); got != want {
		t.Errorf("digest %s, want %s", got, want)
	}
}

func TestMountedImageHasTheDigestOfItsTree(t *testing.T) {
	need.Root(t)
	c := content{}
	tr := sample(t, c)
	b, m := encoded(t, tr)
	flat := make([]byte, m.DeviceSize())
	copy(flat, b)
	for _, k := range m.Blob.Chunks {
		copy(flat[m.Blob.MappedOff+k.DevOff:], c[k.Digest])
	}
	file := filepath.Join(t.TempDir(), "image")
	if err := os.WriteFile(file, flat, 0o600); err != nil {
		t.Fatal(err)
	}
	mnt := mountLoop(t, file)
	got, err := tree.FromDir(t.Context(), mnt, chunkSize)
	if err != nil {
		t.Fatal(err)
	}
	if g, w := show(got, c), show(tr, c); g != w {
		t.Errorf("mounted\n%s\nwant\n%s", g, w)
	}
	if g, w := tree.Digest(got), tree.Digest(tr); g != w {
		t.Errorf("mounted the tree has digest %s, want %s", g, w)
	}
}

// mountLoop mounts an EROFS image file and returns where. mount(8) would do,
// but it looks at all loop devices and hangs with one whose server has died.
func mountLoop(t *testing.T, file string) string {
	t.Helper()
	image, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer image.Close()
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer ctl.Close()
	var loop *os.File
	for err = unix.EBUSY; err == unix.EBUSY; { // another process took the free one
		n, ctlErr := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if ctlErr != nil {
			t.Fatal(ctlErr)
		}
		if loop, err = os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0); err != nil {
			t.Fatal(err)
		}
		defer loop.Close()
		config := unix.LoopConfig{Fd: uint32(image.Fd())}
		config.Info.Flags = unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &config)
	}
	if err != nil {
		t.Fatal(err)
	}
	mnt := t.TempDir()
	if err := unix.Mount(loop.Name(), mnt, "erofs", unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(mnt, 0); err != nil {
			t.Error(err)
		}
	})
	return mnt
}
