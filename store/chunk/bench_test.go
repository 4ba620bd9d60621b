package chunk_test

import (
	"crypto/sha256"
	"testing"

	simd "github.com/minio/sha256-simd"

	"quarry/store/chunk"
)

// BenchmarkSum compares the standard library's SHA-256, which Sum uses, with
// minio/sha256-simd on one chunk; docs/decisions/sha256.md has the figures.
func BenchmarkSum(b *testing.B) {
	p := make([]byte, chunk.DefaultSize)
	for name, sum := range map[string]func([]byte) [32]byte{"std": sha256.Sum256, "simd": simd.Sum256} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(p)))
			for b.Loop() {
				sum(p)
			}
		})
	}
}
