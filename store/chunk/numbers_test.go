package chunk_test

import (
	"encoding/binary"
	"testing"

	"quarry/store/chunk"
)

func TestNumbers(t *testing.T) {
	for _, hint := range []int{0, 1000, 5000} {
		var all []chunk.Digest
		numbers := chunk.NewNumbers(hint, func(n uint32) *chunk.Digest { return &all[n] })
		for i := range 5000 {
			d := chunk.Digest{} // the last bytes alone tell them apart
			binary.BigEndian.PutUint32(d[28:], uint32(i))
			if n, ok := numbers.Find(&d); ok {
				t.Fatalf("hint %d: digest %d has number %d before it is added", hint, i, n)
			}
			all = append(all, d)
			if n := numbers.Add(&d); n != uint32(i) {
				t.Fatalf("hint %d: digest %d got number %d", hint, i, n)
			}
		}
		for i := range all {
			if n, ok := numbers.Find(&all[i]); !ok || n != uint32(i) {
				t.Fatalf("hint %d: digest %d has number %d, %t", hint, i, n, ok)
			}
		}
	}
}
