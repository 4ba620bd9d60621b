package main

import (
	"math"
	"testing"
)

func TestTheHeapGrowsLessTheLargerItIs(t *testing.T) {
	for _, tt := range []struct {
		live uint64
		want int
	}{
		{0, 100}, {4 << 20, 100}, {heapRoom, 100}, {2 * heapRoom, 50}, {4 * heapRoom, 25}, {10 * heapRoom, 10}, {20 * heapRoom, leastPercent},
		{1 << 30, leastPercent}, {math.MaxUint64, leastPercent},
	} {
		if got := gcPercent(tt.live); got != tt.want {
			t.Errorf("gcPercent(%d): got %d, want %d", tt.live, got, tt.want)
		}
	}
}

func TestTheLiveHeapIsKnown(t *testing.T) {
	if got := liveHeap(); got > 1<<40 {
		t.Errorf("got %d bytes live", got)
	}
}
