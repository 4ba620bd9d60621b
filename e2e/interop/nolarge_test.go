//go:build !interop

package interop_test

import (
	"testing"

	"quarry/internal/testimage"
)

// largeImages are those that readers need minutes for; make interop has them.
func largeImages(*testing.T) map[string]*testimage.Layout { return nil }
