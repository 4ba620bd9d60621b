package chunk

import "hash/maphash"

// Numbers finds the numbers 0, 1, 2, … of distinct digests that are kept
// elsewhere: images have millions, for each of which a map takes 60 bytes and
// this 5 to 11. Find changes nothing; Add is not safe for concurrent use.
type Numbers struct {
	at    func(n uint32) *Digest
	seed  maphash.Seed // nobody can choose digests that collide
	slots []uint32     // the number plus 1, or 0; a power of two
	count uint32
}

// NewNumbers returns an empty Numbers with room for hint digests. at must return
// the digest that was given a number.
func NewNumbers(hint int, at func(n uint32) *Digest) *Numbers {
	t := &Numbers{at: at, seed: maphash.MakeSeed()}
	t.resize(hint)
	return t
}

// resize makes room for n digests, at three quarters of the slots.
func (t *Numbers) resize(n int) {
	size := 16
	for size/4*3 < n {
		size *= 2
	}
	t.slots = make([]uint32, size)
	for k := range t.count {
		t.slots[t.slot(t.at(k))] = k + 1
	}
}

// slot returns where d is, or the free slot where it belongs.
func (t *Numbers) slot(d *Digest) uint64 {
	mask := uint64(len(t.slots) - 1)
	i := maphash.Bytes(t.seed, d[:]) & mask
	for t.slots[i] != 0 && *t.at(t.slots[i] - 1) != *d {
		i = (i + 1) & mask
	}
	return i
}

// Find returns the number of d and whether it has one.
func (t *Numbers) Find(d *Digest) (n uint32, ok bool) {
	n = t.slots[t.slot(d)]
	return n - 1, n != 0
}

// Add gives a digest that has no number the next one. From then on at must
// return it.
func (t *Numbers) Add(d *Digest) uint32 {
	if int(t.count) >= len(t.slots)/4*3 {
		t.resize(int(t.count) + 1)
	}
	n := t.count
	t.slots[t.slot(d)] = n + 1
	t.count++
	return n
}
