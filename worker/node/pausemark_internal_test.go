package node

import (
	"context"
	"os"
	"path/filepath"
	"testing"
)

// A pause for the model of which a mark cannot be removed is none: the watcher takes it
// for refused, and nobody would resume the sandbox.
func TestAPauseWhoseMarkStays(t *testing.T) {
	r := newBoxRig(t)
	stuck := filepath.Join(r.b.idlePath(), "stuck") // a folder that is not empty is not removed
	if err := os.MkdirAll(stuck, 0o700); err != nil {
		t.Fatal(err)
	}
	_ = r.locked(func() error { r.b.held = 0; return nil })
	if err := r.b.pauseForModel(context.Background()); err == nil {
		t.Error("paused")
	}
	st, err := r.b.h.State(t.Context())
	if err != nil || st.Paused || r.b.held != 0 {
		t.Errorf("refused, and it stands: %v, held by %d, %v", st.Paused, r.b.held, err)
	}
}
