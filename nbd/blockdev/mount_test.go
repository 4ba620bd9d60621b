package blockdev_test

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"quarry/internal/need"
	"quarry/nbd"
	"quarry/nbd/attach"
	"quarry/nbd/blockdev"
	"quarry/store"
	"quarry/store/chunk"
)

// TestKernelMountsTheDevice goes the whole way of a read: EROFS, loop device,
// FUSE, NBD, chunks; with one device, and with two as older kernels need it.
func TestKernelMountsTheDevice(t *testing.T) {
	t.Run("one device", func(t *testing.T) { mountAndRead(t, false) })
	t.Run("two devices", func(t *testing.T) { mountAndRead(t, true) })
}

func mountAndRead(t *testing.T, split bool) {
	need.Root(t)
	m := makeImage(t, 60)
	bad := m.img.Blob.Chunks[20].Digest
	var healed atomic.Bool
	d := m.device(t, func(c *blockdev.Config) {
		c.Chunks = getBatch(func(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
			return m.store.GetBatch(ctx, ds, func(d chunk.Digest, p []byte, err error) error {
				if d == bad && !healed.Load() {
					return fn(d, nil, &store.CorruptError{Want: bad})
				}
				return fn(d, p, err)
			})
		})
	})

	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "s"))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), time.Minute)
	t.Cleanup(cancel)
	s := &nbd.Server{Exports: func(context.Context, string) (nbd.Device, error) { return d, nil }}
	go s.Serve(ctx, l) // ends with ctx
	c, err := nbd.Dial(ctx, "unix", l.Addr().String(), "image")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	a, err := attach.Attach(ctx, attach.Config{Dir: filepath.Join(dir, "m"), Source: c, DataOff: m.img.Blob.MappedOff, Split: split, ReadAhead: -1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Detach(ctx); err != nil {
			t.Error(err)
		}
	})

	compare := func() (failed int) {
		for name, want := range m.files {
			got, err := os.ReadFile(filepath.Join(a.Root(), name))
			switch {
			case errors.Is(err, syscall.EIO):
				failed++
			case err != nil || !bytes.Equal(got, want):
				t.Errorf("%s: %v, or other bytes", name, err)
			}
		}
		return failed
	}
	if n := compare(); n != 1 {
		t.Errorf("%d files cannot be read for one damaged chunk, want 1", n)
	}
	healed.Store(true)
	if n := compare(); n != 0 {
		t.Errorf("%d files cannot be read after the store is whole again", n)
	}
}
