package folder_test

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"quarry/worker/folder"
)

// TestOnlyBoundedRegularFilesAreRead: a FIFO that nobody writes, or a device,
// holds nobody up. Waiting is a test that never ends.
func TestOnlyBoundedRegularFilesAreRead(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	if err := syscall.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{fifo, "/dev/zero", dir} {
		if b, err := folder.ReadBounded(path, 10); err == nil || len(b) > 0 {
			t.Errorf("%s: %d bytes, error %v", path, len(b), err)
		}
	}
	if _, err := folder.ReadBounded(filepath.Join(dir, "none"), 10); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no file: %v", err)
	}
	path := filepath.Join(dir, "file")
	for size := range 12 {
		want := bytes.Repeat([]byte{7}, size)
		if err := os.WriteFile(path, want, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := folder.ReadBounded(path, 10)
		if size <= 10 && (err != nil || !bytes.Equal(got, want)) {
			t.Errorf("%d bytes: %v, error %v", size, got, err)
		}
		if size > 10 && (err == nil || !strings.Contains(err.Error(), "10 bytes")) {
			t.Errorf("%d bytes: error %v", size, err)
		}
	}
	// A file that says it is empty.
	if b, err := folder.ReadBounded("/proc/self/status", 1<<20); err != nil || !bytes.Contains(b, []byte("Pid:")) {
		t.Errorf("/proc: %q, error %v", b, err)
	}
	if _, err := folder.ReadBounded("/proc/self/status", 100); err == nil {
		t.Error("a file in /proc passes the limit")
	}
}
