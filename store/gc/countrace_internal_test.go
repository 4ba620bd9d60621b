//go:build race

package gc

// simDefault is fewer under the race detector, which is ten times slower: it looks for
// races, and the run without it for interleavings.
const simDefault = 300
