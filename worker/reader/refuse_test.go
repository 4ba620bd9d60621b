package reader_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"quarry/nbd"
)

// A shim asks again and again for a mounted image whose folder was damaged: the
// reader refuses it, and its log says why, once.
func TestAnImageThatCannotBeOpenedIsLogged(t *testing.T) {
	r := newRig(t)
	_, id := r.fetch(t, "a/b", 2)
	path := filepath.Join(r.dir.Path(), "images", id.Hex(), "bootstrap")
	boot, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	boot[len(boot)/2] ^= 1
	if err := os.WriteFile(path, boot, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if c, err := nbd.Dial(t.Context(), "unix", r.dir.ReaderSocket(), id.Hex()); err == nil {
			c.Close()
			t.Fatal("a damaged image is served")
		}
	}
	log := r.log.String()
	if n := strings.Count(log, "image cannot be served"); n != 1 || !strings.Contains(log, id.String()) {
		t.Errorf("%d lines, want 1 that names %s:\n%s", n, id, log)
	}
	boot[len(boot)/2] ^= 1
	if err := os.WriteFile(path, boot, 0o600); err != nil {
		t.Fatal(err)
	}
	r.open(t, id)
}
