package folder

import (
	"testing"

	"quarry/store/chunk"
)

func TestWhatIsKeptDecodedIsBounded(t *testing.T) {
	var c Decoded
	name := func(i int) chunk.Digest { return chunk.Sum([]byte{byte(i), byte(i >> 8)}) }
	for i := range 3 * maxDecoded {
		if _, mine := c.entry(name(i), 1); !mine {
			t.Fatalf("%d is there before it was decoded", i)
		}
		if _, mine := c.entry(name(0), 1); mine {
			t.Fatalf("what is used all the time is gone after %d", i)
		}
	}
	if len(c.list) != maxDecoded {
		t.Errorf("%d are kept, want %d", len(c.list), maxDecoded)
	}
	c.entry(name(1000), maxDecodedBytes-1)
	if len(c.list) != 2 || c.list[0].digest != name(0) {
		t.Errorf("%d are kept beside a large one, want the one used last", len(c.list))
	}
	c.entry(name(1001), 2)
	if len(c.list) != 1 {
		t.Errorf("%d are kept, want the last alone", len(c.list))
	}
	if _, _, err := c.decode(name(2), []byte("no bootstrap")); err == nil {
		t.Error("that is no bootstrap")
	}
	if len(c.list) != 1 {
		t.Error("what cannot be decoded is kept")
	}
}
