package trace

import (
	"cmp"
	"slices"
)

const (
	// MaxRuns is how many records of one image count, the newest ones: enough for
	// a median, and few enough that a list follows when the work changes.
	MaxRuns = 8
	// MinRuns is how many of them must have touched a chunk for it to be in the
	// list: what one run alone touched may be its own matter, or a lie.
	MinRuns = 2
)

// Merge returns the list that runs agree on: the chunks that at least MinRuns of
// them touched, ordered by the median of their places in those runs. It is empty
// when there are fewer runs. Numbers in a run are different ones.
func Merge(runs [][]uint32) []uint32 {
	places := map[uint32][]int{}
	for _, run := range runs {
		for at, n := range run {
			places[n] = append(places[n], at)
		}
	}
	type entry struct {
		number uint32
		place  int // twice the median
	}
	var all []entry
	for n, at := range places {
		if len(at) < MinRuns {
			continue
		}
		slices.Sort(at)
		all = append(all, entry{n, at[(len(at)-1)/2] + at[len(at)/2]})
	}
	slices.SortFunc(all, func(a, b entry) int {
		return cmp.Or(cmp.Compare(a.place, b.place), cmp.Compare(a.number, b.number))
	})
	list := make([]uint32, len(all))
	for i, e := range all {
		list[i] = e.number
	}
	return list
}

// Cut returns the longest beginning of a list that has at most count numbers, whose
// chunks have at most plain bytes together. size tells a chunk's.
func Cut(list []uint32, count int, plain int64, size func(uint32) int64) []uint32 {
	list = list[:min(count, len(list))]
	for i, n := range list {
		if plain -= size(n); plain < 0 {
			return list[:i]
		}
	}
	return list
}
