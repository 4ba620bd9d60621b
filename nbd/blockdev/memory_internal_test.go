package blockdev

import (
	"encoding/binary"
	"testing"
	"testing/synctest"
	"time"

	"quarry/store/chunk"
)

// plainOf makes a chunk of n bytes that differs from those with other numbers.
func plainOf(number uint64, n int) []byte {
	p := make([]byte, n)
	binary.LittleEndian.PutUint64(p, number)
	return p
}

func arrivalOf(number uint64, n int, ahead *aheadCounters, patient bool) arrival {
	p := plainOf(number, n)
	return arrival{d: chunk.Sum(p), p: p, tier: TierStore, ahead: ahead, patient: patient}
}

// has reports which of the chunks with these numbers are held, without using them.
func (m *Memory) has(n int, numbers ...uint64) (held []bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, k := range numbers {
		held = append(held, m.at[chunk.Sum(plainOf(k, n))] != nil)
	}
	return held
}

func checkHeld(t *testing.T, m *Memory, n int, number uint64, want bool) {
	t.Helper()
	if got := m.has(n, number)[0]; got != want {
		t.Errorf("chunk %d held: %v, want %v", number, got, want)
	}
}

func TestMemoryGivesUpFirstWhatIsOfLeastUse(t *testing.T) {
	const n = 2 * blockSize
	m := NewMemory(4 * n)
	var ahead aheadCounters
	read := func(number uint64, blocks int64) {
		m.given(chunk.Sum(plainOf(number, n)), 0, blocks*blockSize)
	}
	m.arrive(arrivalOf(1, n, nil, false))
	read(1, 1) // half of it
	m.arrive(arrivalOf(2, n, nil, false))
	read(2, 2) // all of it
	m.arrive(arrivalOf(3, n, &ahead, false))
	m.arrive(arrivalOf(4, n, nil, false))
	read(4, 1)

	m.arrive(arrivalOf(5, n, nil, false))
	checkHeld(t, m, n, 2, false) // what the kernel has goes first
	m.arrive(arrivalOf(6, n, nil, false))
	checkHeld(t, m, n, 3, false) // then what nobody asked for
	m.arrive(arrivalOf(7, n, nil, false))
	checkHeld(t, m, n, 1, false) // then what was used longest ago
	for _, k := range []uint64{4, 5, 6, 7} {
		checkHeld(t, m, n, k, true)
	}
	if got := ahead.unused.load(); got != (Count{1, n}) || ahead.used.load() != (Count{}) {
		t.Errorf("fetched ahead in vain: %+v, want 1 chunk", got)
	}
	if m.Bytes() != 4*n {
		t.Errorf("%d bytes held, want %d", m.Bytes(), 4*n)
	}
}

func TestChunksThatWaitForRoomPushOutNone(t *testing.T) {
	const n = blockSize
	m := NewMemory(8 * n)
	var ahead aheadCounters
	for k := range uint64(6) {
		m.arrive(arrivalOf(k, n, &ahead, true))
	}
	for k := range uint64(6) { // half of the room is for them
		checkHeld(t, m, n, k, k < 4)
	}
	for k := range uint64(6) {
		m.arrive(arrivalOf(10+k, n, nil, false)) // demanded
	}
	checkHeld(t, m, n, 0, false)
	for k := range uint64(6) {
		checkHeld(t, m, n, 10+k, true)
	}
	m.arrive(arrivalOf(20, n, &ahead, true))
	checkHeld(t, m, n, 20, false)
	// Neighbours, which are newer than what was fetched ahead before, take its place.
	m.arrive(arrivalOf(21, n, &ahead, false))
	checkHeld(t, m, n, 21, true)
}

func TestWhatTheKernelHasIsNotKeptTwice(t *testing.T) {
	const n = chunk.DefaultSize
	m := NewMemory(0)
	for k := range uint64(256) { // 64 MiB
		a := arrivalOf(k, n, nil, false)
		m.arrive(a)
		m.given(a.d, 0, n)
	}
	if got := m.Bytes(); got != DefaultMemoryBytes/spentShare {
		t.Errorf("%d bytes are kept of 64 MiB read, want %d", got, DefaultMemoryBytes/spentShare)
	}
}

var zeros [2 * blockSize]byte

func TestTagsAreOfOneBlockOfOneChunk(t *testing.T) {
	tags := newBlockTags()
	p := make([]byte, 3*blockSize+100)
	for i := range p {
		p[i] = byte(i / blockSize)
	}
	a, b := chunk.Sum(p), chunk.Sum(p[1:])
	tags.add(a, p)
	tags.add(b, p) // the same bytes under another name
	e := tags.get(a)
	for k := int64(0); k < 4; k++ {
		block := p[k*blockSize : min((k+1)*blockSize, int64(len(p)))]
		if !tags.check(e, k, block) {
			t.Errorf("block %d is refused", k)
		}
		for other := int64(0); other < 5; other++ {
			if other != k && tags.check(e, other, block) {
				t.Errorf("block %d passes for block %d", k, other)
			}
		}
		block[0] ^= 1
		if tags.check(e, k, block) {
			t.Errorf("block %d passes with a flipped bit", k)
		}
		block[0] ^= 1
	}
	if tags.check(e, 3, p[3*blockSize:3*blockSize+99]) || tags.check(e, 3, make([]byte, blockSize)) {
		t.Error("a last block of another length passes")
	}
	if !tags.check(e, 0, p) {
		t.Error("the whole chunk is refused")
	}
	same := chunk.Sum(zeros[:])
	tags.add(same, zeros[:])
	if e := tags.get(same); string(e.tags[:tagSize]) == string(e.tags[tagSize:]) {
		t.Error("two blocks with the same bytes have the same tag: nonces are used twice")
	}
	if string(tags.get(b).tags) == string(e.tags) {
		t.Error("two chunks with the same bytes have the same tags: nonces are used twice")
	}
	if other := newBlockTags(); other.check(e, 0, p[:blockSize]) {
		t.Error("tags of another process pass")
	}
}

func TestTagsAreBoundedAndKeepWhatIsUsed(t *testing.T) {
	tags := newBlockTags()
	p := make([]byte, 16*chunk.DefaultSize)
	first := chunk.Sum([]byte{1})
	tags.add(first, p)
	per := int64(len(tags.get(first).tags)) + tagsOverhead
	var d chunk.Digest
	for k := range 2 * maxTagBytes / per {
		binary.LittleEndian.PutUint64(d[:], uint64(k)+1)
		tags.keep(d, &tagged{tags: make([]byte, per-tagsOverhead)})
		if tags.get(first) == nil {
			t.Fatalf("after %d other chunks the tags of one that is always used are gone", k)
		}
		if have := int64(len(tags.young)+len(tags.old)) * per; have > maxTagBytes+per {
			t.Fatalf("%d bytes of tags, at most %d are allowed", have, maxTagBytes)
		}
	}
	binary.LittleEndian.PutUint64(d[:], 1)
	if tags.get(d) != nil {
		t.Error("nothing was forgotten")
	}
}

// TestOnlyStaleChunksMakeRoomForMoreAhead: to fetch further ahead pushes out
// nothing that may be read yet.
func TestOnlyStaleChunksMakeRoomForMoreAhead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const n = 1 << 20
		m := NewMemory(16 * n)
		var ahead aheadCounters
		for k := range uint64(6) {
			m.arrive(arrivalOf(k, n, &ahead, false))
			time.Sleep(time.Second)
		}
		if got := m.spare(); got != 2*n {
			t.Errorf("%d bytes to spare of 8 MiB with 6 in use, want 2 MiB", got)
		}
		m.ahead.take(n)
		if got := m.spare(); got != n {
			t.Errorf("%d bytes to spare while 1 MiB comes, want 1 MiB", got)
		}
		m.ahead.give(n)
		time.Sleep(staleAfter - 4*time.Second) // chunks 0 to 2 came long ago
		if got := m.spare(); got != maxStep {
			t.Errorf("%d bytes to spare beside what is stale, want a step", got)
		}
		for k := range uint64(6) {
			checkHeld(t, m, n, k, k >= 2)
		}
	})
}
