package reader

import (
	"os"
	"path/filepath"
	"testing"

	"quarry/internal/need"
)

// A socket that was closed is not closed again: its path, and the number of its inode,
// may be those of the next reader's by then.
func TestASocketIsRemovedOnce(t *testing.T) {
	path := filepath.Join(need.ShortDir(t), "s")
	first, err := listenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	first.Close()
	if _, err := os.Stat(path); err == nil {
		t.Error("a socket that was closed is still there")
	}
	next, err := listenUnix(path)
	if err != nil {
		t.Fatal(err)
	}
	defer next.Close()
	first.made = next.made
	first.Close()
	if err := next.stands(); err != nil {
		t.Errorf("the next reader's socket: %v", err)
	}
}
