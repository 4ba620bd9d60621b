package cache

import (
	"encoding/binary"
	"math/bits"
	"math/rand/v2"

	"quarry/store/chunk"
)

// place says where a chunk is: the number of its segment, from 1, and the
// entry's number in it. The zero place is none.
type place struct{ seg, i uint32 }

// slot is a place, and the hash of the digest that is there: low half the place,
// of which entryBits are the entry, high half the hash. Zero is a free slot.
type slot uint64

// entryBits hold the number of any entry: 64 MiB of chunks of one page. The other
// 18 bits hold the number of any segment, as there are at most 16384.
const entryBits = 14

func makeSlot(hash uint32, p place) slot {
	return slot(hash)<<32 | slot(p.seg)<<entryBits | slot(p.i)
}

func (s slot) hash() uint32 { return uint32(s >> 32) }

func (s slot) place() place {
	return place{uint32(s) >> entryBits, uint32(s) & (1<<entryBits - 1)}
}

// table finds the entry of a digest: open addressing with linear probing over
// slots. It takes 8 bytes a slot; the digests stand in the segments and are
// looked at only where the hash is the same. Filling it is most of the time that
// opening a folder takes, and six times as fast as with a map of digests. The
// hash is seeded, as whoever makes content can choose digests that begin alike.
type table struct {
	segs  []*segment // by number, less one; nil where a number is free
	slots []slot     // a power of two
	n     int
	seed  [2]uint64
}

// newTable returns a table with room for n entries.
func newTable(n int) *table {
	t := &table{seed: [2]uint64{rand.Uint64(), rand.Uint64()}}
	t.grow(n)
	return t
}

// grow makes room for n entries, with which at most 3/4 of the slots are in use.
func (t *table) grow(n int) {
	old := t.slots
	t.slots = make([]slot, max(1024, 1<<bits.Len(uint(n+n/3))))
	mask := len(t.slots) - 1
	for _, o := range old {
		if o == 0 {
			continue
		}
		s := int(o.hash()) & mask
		for t.slots[s] != 0 {
			s = (s + 1) & mask
		}
		t.slots[s] = o
	}
}

// at returns the entry at a place.
func (t *table) at(p place) *entry { return &t.segs[p.seg-1].entries[p.i] }

func (t *table) hash(d *chunk.Digest) uint32 {
	hi, lo := bits.Mul64(binary.LittleEndian.Uint64(d[:])^t.seed[0], binary.LittleEndian.Uint64(d[8:])^t.seed[1])
	return uint32(hi ^ lo)
}

// find returns the slot that holds d, whose hash is h, or the free one where it
// belongs.
func (t *table) find(d *chunk.Digest, h uint32) int {
	mask := len(t.slots) - 1
	for s := int(h) & mask; ; s = (s + 1) & mask {
		o := t.slots[s]
		if o == 0 || o.hash() == h && t.at(o.place()).digest == *d {
			return s
		}
	}
}

// get returns where d is; the zero place when it is not here.
func (t *table) get(d chunk.Digest) place { return t.slots[t.find(&d, t.hash(&d))].place() }

// put says that d is at p, whose entry exists, and returns where d was before.
func (t *table) put(d chunk.Digest, p place) place {
	h := t.hash(&d)
	s := t.find(&d, h)
	old := t.slots[s]
	t.slots[s] = makeSlot(h, p)
	if old == 0 {
		t.counted()
	}
	return old.place()
}

// putNew says that the digest of the entry at p is there, unless it is already
// somewhere.
func (t *table) putNew(p place) bool {
	d := &t.at(p).digest
	h := t.hash(d)
	s := t.find(d, h)
	if t.slots[s] != 0 {
		return false
	}
	t.slots[s] = makeSlot(h, p)
	t.counted()
	return true
}

func (t *table) counted() {
	if t.n++; t.n > len(t.slots)/4*3 {
		t.grow(2 * t.n)
	}
}

// remove forgets d: later members of its run move up, so that no run is cut.
func (t *table) remove(d chunk.Digest) {
	hole, mask := t.find(&d, t.hash(&d)), len(t.slots)-1
	if t.slots[hole] == 0 {
		return
	}
	t.n--
	for s := (hole + 1) & mask; t.slots[s] != 0; s = (s + 1) & mask {
		home := int(t.slots[s].hash()) & mask
		if (s-home)&mask >= (s-hole)&mask {
			t.slots[hole], hole = t.slots[s], s
		}
	}
	t.slots[hole] = 0
}

// add gives a segment a number.
func (t *table) add(s *segment) {
	for i, have := range t.segs {
		if have == nil {
			t.segs[i], s.number = s, uint32(i+1)
			return
		}
	}
	t.segs = append(t.segs, s)
	s.number = uint32(len(t.segs))
}

// live reports whether entry i of s is the one its digest leads to.
func (t *table) live(s *segment, i int) bool {
	return t.get(s.entries[i].digest) == place{s.number, uint32(i)}
}

// drop forgets a segment with all its entries, and says how many chunks and
// bytes that were.
func (t *table) drop(s *segment) (chunks, bytes int64) {
	for i := range s.entries {
		if e := &s.entries[i]; t.live(s, i) {
			t.remove(e.digest)
			chunks, bytes = chunks+1, bytes+int64(e.length)
		}
	}
	t.segs[s.number-1] = nil
	return chunks, bytes
}
