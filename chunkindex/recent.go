package chunkindex

import (
	"sync"

	"quarry/store/chunk"
)

// recentGeneration bounds each of the two generations of recent: 128 Ki places of
// some 130 bytes, so that both take 34 MiB at most. That is the chunks of about four
// images of 20 000 files.
const recentGeneration = 128 << 10

// recent remembers the places that were asked for last, so that the chunks of an
// image that hundreds of workers read are looked up in Pebble once: a place found
// here costs a tenth. A generation that is full becomes the old one, and what the old
// one had that is not asked for again is forgotten. Changes of the index take out
// what they change, while nobody looks up.
type recent struct {
	mu       sync.Mutex // guards both
	now, old map[chunk.Digest]Location
}

// find fills in what is remembered, and returns the indexes of the rest.
func (r *recent) find(ds []chunk.Digest, locs []Location, found []bool) (rest []int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, d := range ds {
		loc, ok := r.now[d]
		if !ok {
			if loc, ok = r.old[d]; ok {
				r.set(d, loc)
			}
		}
		if locs[i], found[i] = loc, ok; !ok {
			rest = append(rest, i)
		}
	}
	return rest
}

// add remembers what was found.
func (r *recent) add(ds []chunk.Digest, locs []Location, found []bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for i, d := range ds {
		if found[i] {
			r.set(d, locs[i])
		}
	}
}

// set is for a holder of mu.
func (r *recent) set(d chunk.Digest, loc Location) {
	if len(r.now) >= recentGeneration || r.now == nil {
		r.now, r.old = make(map[chunk.Digest]Location), r.now
	}
	r.now[d] = loc
}

// forget takes out one place.
func (r *recent) forget(d chunk.Digest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.now, d)
	delete(r.old, d)
}

// clear takes out all.
func (r *recent) clear() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.now, r.old = nil, nil
}
