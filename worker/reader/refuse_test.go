package reader_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"quarry/nbd"
	"quarry/store/cache"
	"quarry/store/chunk"
)

// flip changes one bit in the middle of a file of an image.
func (r *rig) flip(t *testing.T, id chunk.Digest, name string) {
	t.Helper()
	path := filepath.Join(r.dir.Path(), "images", id.Hex(), name)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// A reader that finds an image damaged in its folder has it again from the store.
func TestADamagedImageIsFetchedAgain(t *testing.T) {
	r := newRig(t)
	img, id := r.fetch(t, "a/b", 2)
	for _, name := range []string{"bootstrap", "config", "statement", "origin.json"} {
		r.flip(t, id, name)
		r.restart(t, cache.MinLimit)
		c := r.open(t, id)
		got := make([]byte, len(img.Bootstrap))
		if err := readAt(t, c, got, 0); err != nil || !bytes.Equal(got, img.Bootstrap) {
			t.Errorf("%s: the bootstrap that is served is another one, error %v", name, err)
		}
		if _, err := r.dir.Load(id); err != nil {
			t.Errorf("%s: the folder was not put right: %v", name, err)
		}
	}
	if got := lines(r.log.String(), "image is damaged", id.String()); len(got) != 3 {
		t.Errorf("%d lines, want one for each file that an image's id names:\n%s", len(got), r.log)
	}
}

// A shim asks again and again for a mounted image. When it is damaged and cannot be
// had, the reader says so in a way that is not that of a reader which is away, its
// log says why once, and the store is not asked each time.
func TestAnImageThatCannotBeHadIsRefused(t *testing.T) {
	r := newRig(t)
	_, id := r.fetch(t, "a/b", 2)
	r.patience = 300 * time.Millisecond
	r.restart(t, cache.MinLimit)
	r.stop()
	r.flip(t, id, "bootstrap")
	for range 3 {
		c, err := nbd.Dial(t.Context(), "unix", r.dir.ReaderSocket(), id.Hex())
		if err == nil {
			c.Close()
			t.Fatal("a damaged image is served")
		}
		if !errors.Is(err, nbd.ErrUnknownExport) {
			t.Errorf("refused with %v", err)
		}
	}
	log := r.log.String()
	if got := lines(log, "image cannot be served", id.String(), "bootstrap", "EIO"); len(got) != 1 {
		t.Errorf("%d lines, want 1 that names image and file:\n%s", len(got), log)
	}
	if got := lines(log, "image is damaged"); len(got) != 1 {
		t.Errorf("%d repairs were begun, want 1:\n%s", len(got), log)
	}
	r.flip(t, id, "bootstrap")
	r.open(t, id)
}

// What is here but cannot be understood is not an image that never was here.
func TestAnImageWithoutAnOriginIsRefused(t *testing.T) {
	r := newRig(t)
	_, id := r.fetch(t, "a/b", 2)
	r.flip(t, id, "origin.json")
	if err := os.Remove(filepath.Join(r.dir.Path(), "images", id.Hex()+".json")); err != nil {
		t.Fatal(err)
	}
	if _, err := nbd.Dial(t.Context(), "unix", r.dir.ReaderSocket(), id.Hex()); !errors.Is(err, nbd.ErrUnknownExport) {
		t.Errorf("refused with %v", err)
	}
	if got := lines(r.log.String(), "image cannot be served", "origin.json"); len(got) != 1 {
		t.Errorf("the log does not name the file:\n%s", r.log)
	}
}

// What another attempt does not change is not tried again for as long as a read waits:
// an hour here, so that a reader which does is seen to hang.
func TestWhatTheFolderItselfLacksIsNotTriedAgain(t *testing.T) {
	r := newRig(t)
	_, id := r.fetch(t, "a/b", 2)
	r.patience = time.Hour
	r.restart(t, cache.MinLimit)
	r.flip(t, id, "statement")
	r.flip(t, id, "origin.json")
	// A record of a version that kept no statement says where the image is from.
	old := []byte(`{"stores":["` + r.store + `"]}`)
	if err := os.WriteFile(filepath.Join(r.dir.Path(), "images", id.Hex()+".json"), old, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := nbd.Dial(ctx, "unix", r.dir.ReaderSocket(), id.Hex()); !errors.Is(err, nbd.ErrUnknownExport) {
		t.Errorf("got %v, want it refused", err)
	}
}
