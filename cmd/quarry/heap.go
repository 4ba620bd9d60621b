package main

import (
	"runtime"
	"runtime/debug"
	"runtime/metrics"
)

const (
	// heapRoom is what the heap may grow beyond its live part before it is
	// collected again, while that is less than the live part: an ordinary
	// conversion has some 40 MB live and is collected as Go does by default.
	heapRoom = 32 << 20
	// leastPercent is how much it may grow in any case, which bounds the time
	// that goes into collecting a large heap. An image of 300 000 small files has
	// 190 MB live, one of a million 560: the processes peak at 235 and 650 MiB. One
	// of 25 000 files is as quick as with Go's default.
	leastPercent = 7
	// latePercent has the first collection at 32 MiB: Go's own is at 4 MiB for 100.
	latePercent = 800
)

// lateHeap has this process collected late for the first time, and then as Go does by
// default. It is for what works at the start of a sandbox: decoding an image of 25 000
// files grows the heap past 4, 8 and 16 MiB of what is kept anyway, and collecting that
// takes the processors that the sandbox starts on.
func lateHeap() {
	debug.SetGCPercent(latePercent)
	runtime.AddCleanup(new(heapMark), func(struct{}) { debug.SetGCPercent(100) }, struct{}{})
}

// boundHeap keeps the garbage of this process small against its memory limits:
// after each collection the heap may grow by heapRoom or leastPercent, whichever
// is more, and never by more than its live part. It is for the process's life.
func boundHeap() {
	runtime.AddCleanup(new(heapMark), func(struct{}) {
		debug.SetGCPercent(gcPercent(liveHeap()))
		boundHeap()
	}, struct{}{})
}

// heapMark is unreachable at once, so that its cleanup runs after the next
// collection. It must have a size, and no pointer that keeps it in a block with
// others.
type heapMark struct{ _ [64]byte }

func gcPercent(live uint64) int {
	return int(max(leastPercent, min(100, 100*heapRoom/max(live, 1))))
}

func liveHeap() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
