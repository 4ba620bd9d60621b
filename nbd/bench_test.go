package nbd_test

import (
	"fmt"
	"testing"
)

// BenchmarkView reads a device in memory over a unix socket, one read after the
// other and many at once.
func BenchmarkView(b *testing.B) {
	const size = 64 << 20
	c := dial(b, serve(b, ready{&memory{data: pattern(size)}, -1}))
	for _, n := range []int{4 << 10, 128 << 10, 256 << 10} {
		view := func(i int) error {
			return c.View(b.Context(), int64(i*n)%size, n, func([]byte) error { return nil })
		}
		b.Run(fmt.Sprintf("%dk", n>>10), func(b *testing.B) {
			b.SetBytes(int64(n))
			for i := 0; b.Loop(); i++ {
				if err := view(i); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(fmt.Sprintf("%dk-parallel", n>>10), func(b *testing.B) {
			b.SetBytes(int64(n))
			b.SetParallelism(16)
			b.RunParallel(func(pb *testing.PB) {
				for i := 0; pb.Next(); i++ {
					if err := view(i); err != nil {
						b.Error(err)
					}
				}
			})
		})
	}
}
