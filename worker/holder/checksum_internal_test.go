package holder

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// What was sealed is verified, of any size, and one wrong byte anywhere is seen.
func TestChecksums(t *testing.T) {
	random := rand.NewChaCha8([32]byte{})
	for _, size := range []int{0, 1, directAlign, sumBlock - 1, sumBlock, sumBlock + 1, 9*sumBlock + 4097} {
		dir := t.TempDir()
		path := filepath.Join(dir, "pages.img")
		b := make([]byte, size)
		random.Read(b)
		if err := errors.Join(os.WriteFile(path, b, 0o600), os.WriteFile(filepath.Join(dir, "a"), nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(seal(t.Context(), dir), verify(t.Context(), dir)); err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
		for _, at := range []int{0, size / 2, size - 1} {
			if at < 0 || at >= size {
				continue
			}
			wrong := bytes.Clone(b)
			wrong[at] ^= 1
			if err := os.WriteFile(path, wrong, 0o600); err != nil {
				t.Fatal(err)
			}
			if err := verify(t.Context(), dir); !errors.Is(err, errDamaged) {
				t.Errorf("%d bytes, byte %d is wrong: %v", size, at, err)
			}
		}
		if err := os.WriteFile(path, append(b, 0), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := verify(t.Context(), dir); !errors.Is(err, errDamaged) {
			t.Errorf("%d bytes, and one more: %v", size, err)
		}
	}
}

// Blocks that changed places are seen, and a call that is given up ends.
func TestChecksumsKnowTheOrder(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "pages.img")
	one, other := bytes.Repeat([]byte{1}, sumBlock), bytes.Repeat([]byte{2}, sumBlock)
	if err := errors.Join(os.WriteFile(path, append(bytes.Clone(one), other...), 0o600), seal(t.Context(), dir)); err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := verify(gone, dir); !errors.Is(err, context.Canceled) || errors.Is(err, errDamaged) {
		t.Errorf("given up: %v", err)
	}
	if err := os.WriteFile(path, append(other, one...), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := verify(t.Context(), dir); !errors.Is(err, errDamaged) {
		t.Errorf("got %v", err)
	}
}

func BenchmarkVerify(b *testing.B) {
	const size = 256 << 20
	dir := b.TempDir()
	f, err := os.Create(filepath.Join(dir, "pages.img"))
	if err != nil {
		b.Fatal(err)
	}
	random, part := rand.NewChaCha8([32]byte{}), make([]byte, sumBlock)
	for range size / sumBlock {
		random.Read(part)
		if _, err := f.Write(part); err != nil {
			b.Fatal(err)
		}
	}
	if err := errors.Join(f.Sync(), f.Close(), seal(b.Context(), dir)); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(size)
	for b.Loop() {
		if err := verify(b.Context(), dir); err != nil {
			b.Fatal(err)
		}
	}
}

func TestWhatCannotBeReadPastThePageCache(t *testing.T) {
	for _, path := range []string{"/proc/self/status", filepath.Join(t.TempDir(), "none")} {
		if readsDirect(path) {
			t.Errorf("%s can be read past the page cache", path)
		}
	}
}
