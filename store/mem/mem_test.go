package mem_test

import (
	"testing"

	"quarry/store/chunk"
	"quarry/store/mem"
	"quarry/store/storetest"
)

func TestConformance(t *testing.T) {
	storetest.Run(t, func(*testing.T) storetest.Harness {
		s := mem.New()
		return storetest.Harness{
			Getter: s, BatchGetter: s, Store: s,
			Damage: func(_ *testing.T, d chunk.Digest) { s.Plant(d, []byte("not the chunk")) },
		}
	})
}

func TestConformanceReadOnly(t *testing.T) {
	storetest.Run(t, func(*testing.T) storetest.Harness {
		s := mem.New()
		return storetest.Harness{
			Getter: s, BatchGetter: s,
			Plant:  func(_ *testing.T, p []byte) { s.Plant(chunk.Sum(p), p) },
			Damage: func(_ *testing.T, d chunk.Digest) { s.Plant(d, []byte("not the chunk")) },
		}
	})
}
