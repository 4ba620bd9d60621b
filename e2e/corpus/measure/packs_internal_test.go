package measure

import (
	"bytes"
	"testing"

	"quarry/store/chunk"
	"quarry/store/pack"
)

// What layPacks says is what a pack.Writer writes.
func TestPackSizesAreThoseOfRealPacks(t *testing.T) {
	var b bytes.Buffer
	w := pack.NewWriter(&b)
	var entries []pack.Entry
	for _, n := range []int{1, 300, 5000} {
		p := bytes.Repeat([]byte{byte(n)}, n)
		codec, stored := pack.Compress(nil, p)
		e, err := w.Add(chunk.Sum(p), codec, uint32(n), stored)
		if err != nil {
			t.Fatal(err)
		}
		entries = append(entries, pack.Entry{Digest: e.Digest, Stored: e.Stored, Len: e.Len, Codec: e.Codec})
		packs := layPacks(entries)
		if got := packs[0].entries[len(entries)-1].Off; len(packs) != 1 || got != e.Off {
			t.Errorf("chunk %d is laid at %d, written at %d", len(entries), got, e.Off)
		}
	}
	_, size, err := w.Close()
	if err != nil {
		t.Fatal(err)
	}
	if got := layPacks(entries)[0].size; got != size || size != int64(b.Len()) {
		t.Errorf("laid size %d, written %d", got, size)
	}
}

func TestPacksAreClosedAtTheTarget(t *testing.T) {
	big := pack.Entry{Stored: pack.TargetSize / 2, Len: pack.TargetSize / 2}
	if got := len(layPacks([]pack.Entry{big, big, big})); got != 2 {
		t.Errorf("three chunks of half a pack are laid in %d packs, want 2", got)
	}
	if got := len(layPacks(make([]pack.Entry, pack.MaxCount+1))); got != 2 {
		t.Errorf("one chunk more than a pack may have makes %d packs, want 2", got)
	}
	if got := layPacks(nil); got != nil {
		t.Errorf("no chunks make %d packs", len(got))
	}
}
