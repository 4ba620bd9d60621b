// Package need states what a test needs beyond Go: a right, a program, a
// fixture. Without it the test is skipped with the name of what is missing, or
// fails when REQUIRE_ALL=1, so that a complete machine can prove it ran all.
package need

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// Root needs uid 0.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Missing(t, "root rights")
	}
}

// Tool needs a program on the PATH and returns where it is.
func Tool(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		Missing(t, "the program "+name+" (make setup installs it)")
	}
	return path
}

// Fixtures needs the folder of foreign images that QUARRY_FIXTURES names.
func Fixtures(t testing.TB) string {
	t.Helper()
	dir := os.Getenv("QUARRY_FIXTURES")
	if dir == "" || !filepath.IsAbs(dir) {
		Missing(t, "the fixtures: set QUARRY_FIXTURES to their absolute path")
	}
	return dir
}

// Missing is for what has no function here.
func Missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("REQUIRE_ALL") == "1" {
		t.Fatalf("missing and required by REQUIRE_ALL=1: %s", what)
	}
	t.Skipf("missing: %s", what)
}

// ShortDir returns a folder like t.TempDir with a short path: that of a socket is
// limited.
func ShortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "q")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}
