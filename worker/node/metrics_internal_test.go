package node

import (
	"testing"

	"quarry/internal/metricrows"
)

func TestEveryMetricOfHibernationHasARow(t *testing.T) {
	m := NewNapMetrics()
	for _, step := range []string{stepNap, stepWake} {
		m.seconds.WithLabelValues(step) // gathered once there was one
	}
	metricrows.Check(t, "quarry_hibernate_", m)
}
