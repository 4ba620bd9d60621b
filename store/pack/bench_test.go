package pack_test

import (
	"fmt"
	"io"
	"os"
	"testing"

	"quarry/store/chunk"
	"quarry/store/pack"
)

// benchPlain is n bytes of this test's own program: machine code and tables, as
// most of a layer's bytes are.
func benchPlain(b *testing.B, n int) []byte {
	b.Helper()
	exe, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	p, err := os.ReadFile(exe)
	if err != nil {
		b.Fatal(err)
	}
	const start = 1 << 20 // behind the headers
	return p[start : start+n]
}

// benchSizes are a short source file and a whole chunk.
var benchSizes = []int{4 << 10, chunk.DefaultSize}

func BenchmarkCompress(b *testing.B) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			p := benchPlain(b, n)
			b.SetBytes(int64(n))
			var frame []byte
			for b.Loop() {
				_, frame = pack.Compress(frame, p)
			}
			b.ReportMetric(float64(n)/float64(len(frame)), "ratio")
		})
	}
}

func BenchmarkDecode(b *testing.B) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			codec, stored := pack.Compress(nil, benchPlain(b, n))
			b.SetBytes(int64(n))
			var plain []byte
			for b.Loop() {
				var err error
				if plain, err = pack.Decode(plain, codec, stored, uint32(n)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkWriter is what a pack costs beside compression: checksum, digest of
// the pack and footer.
func BenchmarkWriter(b *testing.B) {
	for _, n := range benchSizes {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			codec, stored := pack.Compress(nil, benchPlain(b, n))
			d := chunk.Sum(stored)
			b.SetBytes(int64(len(stored)))
			w := pack.NewWriter(io.Discard)
			for b.Loop() {
				if w.Count() == pack.MaxCount || w.Size() > pack.TargetSize {
					w = pack.NewWriter(io.Discard)
				}
				if _, err := w.Add(d, codec, uint32(n), stored); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
