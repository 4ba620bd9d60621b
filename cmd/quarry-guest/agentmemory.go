package main

import (
	"encoding/binary"
	"errors"

	"golang.org/x/sys/unix"
)

const (
	pageSize = 4096
	// randomWords of a page's 512 are random and the rest are one word, so that it
	// compresses to half, as memory of programs does.
	randomWords = 256
	pageWords   = pageSize / 8
	// run is how many pages lie together that are touched together.
	run = 16
)

// held is memory of an agent: each page has what its number, its version and a seed
// say, so that one wrong byte is seen.
type held struct {
	b     []byte
	seed  uint64
	runs  []uint32 // in the order in which they are touched: the hot ones first
	vers  []uint32 // of each page
	next  int      // the run that touchNext reads next
	found wrong    // that nobody was told of yet
}

// wrong is how many pages were not as they were left, and the first of them.
type wrong struct{ pages, first int }

func (w *wrong) add(page int) {
	if w.pages == 0 {
		w.first = page
	}
	w.pages++
}

// hold fills memory.
func hold(size int, seed uint64) (*held, error) {
	size -= size % (run * pageSize)
	if size <= 0 {
		return nil, errors.New("agent: it needs memory to hold")
	}
	b, err := unix.Mmap(-1, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, errors.New("agent: memory: " + err.Error())
	}
	h := &held{b: b, seed: mix(seed), vers: make([]uint32, size/pageSize), runs: make([]uint32, size/pageSize/run)}
	for i := range h.runs {
		h.runs[i] = uint32(i)
	}
	for i := len(h.runs) - 1; i > 0; i-- {
		j := int(mix(h.seed+uint64(i)) % uint64(i+1))
		h.runs[i], h.runs[j] = h.runs[j], h.runs[i]
	}
	for p := range h.vers {
		h.write(p)
	}
	return h, nil
}

// mix is one step of splitmix64.
func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// base is what a page's words are made of.
func (h *held) base(page int) uint64 {
	return mix(h.seed ^ uint64(page)<<32 ^ uint64(h.vers[page]))
}

func (h *held) write(page int) {
	b, base := h.b[page*pageSize:][:pageSize], h.base(page)
	for i := range randomWords {
		binary.LittleEndian.PutUint64(b[i*8:], mix(base+uint64(i)))
	}
	for i := randomWords; i < pageWords; i++ {
		binary.LittleEndian.PutUint64(b[i*8:], base)
	}
}

func (h *held) right(page int) bool {
	b, base := h.b[page*pageSize:][:pageSize], h.base(page)
	var differs uint64
	for i := range randomWords {
		differs |= binary.LittleEndian.Uint64(b[i*8:]) ^ mix(base+uint64(i))
	}
	for i := randomWords; i < pageWords; i++ {
		differs |= binary.LittleEndian.Uint64(b[i*8:]) ^ base
	}
	return differs == 0
}

// touchHot reads so many percent, the same each time, and gives them new content.
func (h *held) touchHot(percent int) {
	for _, r := range h.runs[:len(h.runs)*percent/100] {
		h.check(int(r), true)
	}
}

// touchNext reads so many percent, the next in turn.
func (h *held) touchNext(percent int) {
	for range len(h.runs) * percent / 100 {
		h.next = (h.next + 1) % len(h.runs)
		h.check(int(h.runs[h.next]), false)
	}
}

// checkAll reads everything.
func (h *held) checkAll() {
	for r := range h.runs {
		h.check(r, false)
	}
}

// take returns what was found wrong since it was called last.
func (h *held) take() wrong {
	found := h.found
	h.found = wrong{}
	return found
}

func (h *held) check(r int, renew bool) {
	for p := r * run; p < (r+1)*run; p++ {
		if !h.right(p) {
			h.found.add(p)
		}
		if renew {
			h.vers[p]++
			h.write(p)
		}
	}
}
