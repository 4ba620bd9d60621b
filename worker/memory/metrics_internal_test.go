package memory

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// TestEveryMetricHasARow holds the metrics and the operator's table together.
func TestEveryMetricHasARow(t *testing.T) {
	text, err := os.ReadFile("../../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, "| `quarry_paused_memory_"); ok {
			name, _, _ := strings.Cut(rest, "`")
			want = append(want, "quarry_paused_memory_"+name)
		}
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(NewMetrics())
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range families {
		got = append(got, f.GetName())
	}
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("metrics %q\nrows %q", got, want)
	}
}
