package main

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func TestHolesStayHoles(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range 200 {
		b := make([]byte, rnd.IntN(200<<10))
		for range rnd.IntN(6) {
			if len(b) > 0 {
				at := rnd.IntN(len(b))
				for j := at; j < min(at+rnd.IntN(20<<10), len(b)); j++ {
					b[j] = byte(rnd.Uint32())
				}
			}
		}
		name := filepath.Join(t.TempDir(), "f")
		f, err := os.Create(name)
		if err != nil {
			t.Fatal(err)
		}
		h := &holes{f: f}
		for rest := b; len(rest) > 0; {
			n := 1 + rnd.IntN(len(rest))
			if _, err := h.Write(rest[:n]); err != nil {
				t.Fatal(err)
			}
			rest = rest[n:]
		}
		if err := errors.Join(h.finish(), f.Close()); err != nil {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(name); err != nil || !bytes.Equal(got, b) {
			t.Fatalf("%d: %d bytes of %d are others, %v", i, len(got), len(b), err)
		}
	}
}

// sparseTar is a tar with one file of zeros and nothing after it.
func sparseTar(t *testing.T, size int64) io.Reader {
	t.Helper()
	var b bytes.Buffer
	if err := tar.NewWriter(&b).WriteHeader(&tar.Header{Name: "sparse", Typeflag: tar.TypeReg, Mode: 0o644, Size: size}); err != nil {
		t.Fatal(err)
	}
	return io.MultiReader(&b, io.LimitReader(zeroes{}, size), bytes.NewReader(make([]byte, 1024)))
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestASparseFileOfASandboxTakesNoRoom(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	const size = 64 << 20
	if err := unpack(root, sparseTar(t, size), newBudget(size), io.Discard); err != nil {
		t.Fatal(err)
	}
	st, err := os.Stat(filepath.Join(dir, "sparse"))
	if err != nil || st.Size() != size {
		t.Fatal(st, err)
	}
	if blocks := st.Sys().(*syscall.Stat_t).Blocks; blocks > 64 {
		t.Errorf("a hole takes %d blocks", blocks)
	}
	err = unpack(root, sparseTar(t, size), newBudget(size-1), io.Discard)
	if !errors.Is(err, errTooMuch) || !strings.Contains(err.Error(), "--max-bytes") {
		t.Errorf("more than is wanted: %v", err)
	}
}

func TestATarOfAHostileSandboxHasABoundOfFiles(t *testing.T) {
	dir := t.TempDir()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close()
	var b bytes.Buffer
	tw := tar.NewWriter(&b)
	for range maxUnpacked + 1 {
		if err := tw.WriteHeader(&tar.Header{Name: "s", Typeflag: tar.TypeFifo}); err != nil {
			t.Fatal(err)
		}
	}
	if err := unpack(root, &b, newBudget(1<<30), io.Discard); !errors.Is(err, errTooMuch) {
		t.Error(err)
	}
}
