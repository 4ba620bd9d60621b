package main

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/converter"
	"quarry/internal/need"
	"quarry/rafs"
	"quarry/store/chunk"
	"quarry/store/image"
)

// TestMain lets the test binary be the program that again starts.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == buildInside {
		if err := run(context.Background(), os.Args[1:]); err != nil {
			os.Stderr.WriteString(err.Error() + "\n")
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// The smallest image goes the way of all: packages, a step in the image, two
// layers, a layout that appears whole. Nothing stays mounted, and a second run
// finds nothing to do.
func TestBuildOfTheSmallestImage(t *testing.T) {
	need.Root(t)
	need.Tool(t, "mmdebstrap")
	debs := os.Getenv("QUARRY_DEBS")
	if debs == "" {
		need.Missing(t, "a folder for package archives: set QUARRY_DEBS")
	}
	dir := t.TempDir()
	args := []string{"build", "--dir", dir, "--debs", debs, "busybox-1"}
	if err := run(t.Context(), args); err != nil {
		t.Fatal(err)
	}
	layout := filepath.Join(dir, "busybox-1")
	tree, err := converter.SourceTree(t.Context(), "oci:"+layout+":latest", image.Platform{}, chunk.DefaultSize)
	if err != nil {
		t.Fatal(err)
	}
	found := map[string]uint32{}
	tree.Walk(func(path string, n *rafs.Inode) error { found[path] = n.Type(); return nil })
	for path, want := range map[string]uint32{"/bin/busybox": rafs.ModeRegular, "/bin/sh": rafs.ModeSymlink, "/etc/passwd": rafs.ModeRegular, "/proc": rafs.ModeDir} {
		if found[path] != want {
			t.Errorf("%s has the type %o, want %o", path, found[path], want)
		}
	}
	for path := range found {
		for _, leftover := range []string{"/dev/", "/run/", "/tmp/", "/proc/", "/var/lib/apt/lists/", "/var/cache/apt/archives/"} {
			if strings.HasPrefix(path, leftover) {
				t.Errorf("%s of the build is in the image", path)
			}
		}
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), dir) {
		t.Error("the build has left a mount")
	}
	before, err := os.Stat(layout)
	if err != nil {
		t.Fatal(err)
	}
	if err := run(t.Context(), args); err != nil {
		t.Fatal(err)
	}
	if after, err := os.Stat(layout); err != nil || !os.SameFile(before, after) {
		t.Errorf("an image that was there is built again: %v", err)
	}
}
