package node

import (
	"fmt"
	"slices"
	"strings"
)

// PausedMemory says what becomes of the memory of sandboxes that are paused.
type PausedMemory string

const (
	PausedKeep      PausedMemory = "keep"      // it stays
	PausedReclaim   PausedMemory = "reclaim"   // it is taken when others need it, and brought back before the sandbox runs on
	PausedHibernate PausedMemory = "hibernate" // it goes to disk with every pause, and the Sentry ends
)

// pausedMemories are those that a node takes.
var pausedMemories = []PausedMemory{PausedReclaim, PausedKeep}

// PausedMemories names them, for usage texts.
func PausedMemories() string {
	names := make([]string, len(pausedMemories))
	for i, m := range pausedMemories {
		names[i] = string(m)
	}
	return strings.Join(names, ", ")
}

// ParsePausedMemory reads one of the names; "" is PausedReclaim.
func ParsePausedMemory(text string) (PausedMemory, error) {
	if text == "" {
		return PausedReclaim, nil
	}
	if m := PausedMemory(text); slices.Contains(pausedMemories, m) {
		return m, nil
	}
	return "", fmt.Errorf("memory of paused sandboxes %q: unknown, want one of %s", text, PausedMemories())
}
