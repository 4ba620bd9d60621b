package page

import (
	"cmp"
	"slices"

	"quarry/store/chunk"
)

// holder says which image had a chunk first, and whether another one has it too.
type holder struct {
	image  uint32
	shared bool
}

// count compares images one after the other. Of each chunk it remembers only who had
// it first, so that what it takes grows with the distinct chunks and not with the
// images.
//
// An image joins the family that had at least half of its stored bytes before it,
// else it begins one. A chunk counts for the family of the image that had it first.
type count struct {
	images   []chunk.Digest
	alone    []int64
	familyOf []int
	families []family
	first    map[uint64]holder
	most     int // chunks in first
}

func newCount(most int) *count { return &count{first: map[uint64]holder{}, most: most} }

// add takes the next image. It returns false when there are too many chunks.
func (c *count) add(bootstrap chunk.Digest, list []part) bool {
	me := len(c.images)
	had := map[int]int64{} // stored bytes by family
	var alone, stored int64
	for _, p := range list {
		stored += int64(p.stored)
		h, ok := c.first[p.name]
		switch {
		case !ok:
			if len(c.first) == c.most {
				return false
			}
			c.first[p.name] = holder{image: uint32(me)}
			alone += int64(p.stored)
			continue
		case h.image == uint32(me):
			continue // two of its chunks have one name here
		case !h.shared:
			c.first[p.name] = holder{h.image, true}
			c.alone[h.image] -= int64(p.stored)
		}
		had[c.familyOf[h.image]] += int64(p.stored)
	}
	mine, most := len(c.families), int64(0)
	for f, n := range had {
		if n > most || n == most && f < mine {
			mine, most = f, n
		}
	}
	if most == 0 || 2*most < stored {
		mine = len(c.families)
		c.families = append(c.families, family{})
	}
	f := &c.families[mine]
	f.members = append(f.members, bootstrap)
	f.stored += stored
	f.saved += had[mine]
	c.images, c.alone, c.familyOf = append(c.images, bootstrap), append(c.alone, alone), append(c.familyOf, mine)
	return true
}

// comparison returns the outcome: the families of several images, those first that
// save the most.
func (c *count) comparison() *comparison {
	out := &comparison{alone: make(map[chunk.Digest]int64, len(c.images))}
	for i, d := range c.images {
		out.alone[d] = c.alone[i]
	}
	for _, f := range c.families {
		if len(f.members) > 1 {
			out.families = append(out.families, f)
		}
	}
	slices.SortStableFunc(out.families, func(a, b family) int { return cmp.Compare(b.saved, a.saved) })
	return out
}
