package wait

import (
	"strings"
	"testing"

	"quarry/internal/metricrows"
)

func TestEveryMetricHasARow(t *testing.T) {
	text := metricrows.Check(t, "quarry_wait_", NewMetrics())
	for _, r := range Reasons {
		if !strings.Contains(text, string(r)) {
			t.Errorf("no word of the reason %s", r)
		}
	}
}
