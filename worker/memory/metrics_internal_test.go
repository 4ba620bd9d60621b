package memory

import (
	"testing"

	"quarry/internal/metricrows"
)

func TestEveryMetricHasARow(t *testing.T) {
	metricrows.Check(t, "quarry_paused_memory_", NewMetrics())
}
