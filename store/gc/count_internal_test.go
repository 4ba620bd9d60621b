//go:build !race

package gc

// simDefault is how many interleavings CI runs.
const simDefault = 10_000
