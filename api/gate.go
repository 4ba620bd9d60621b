package api

// Requests that read the bucket are admitted by what they hold while a read
// stalls: buffers of about 1 MiB each, the most that is read at once unless a
// chunk is longer.
const (
	// maxReads bounds them all: 1 GiB, besides the ranges of packed's helpers. A
	// burst of 256 workers has room for four requests each.
	maxReads = 1024
	// bulkReads is what a large request may hold: a start keeps 4 MiB of bootstrap
	// beside its buffers, a blob request a window of 1 MiB plain and stored, read in
	// 8 ranges. A batch has 1: it always has one range, and more of them only while
	// helpers are free, which no other request waits for.
	bulkReads = 8
)
