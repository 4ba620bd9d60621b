// Package metricrows holds the metrics of a worker's packages and the operator's table of
// them together, so that neither has a name that the other has not.
package metricrows

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
)

// Check compares the metrics whose names begin with a prefix with the rows of
// docs/OPERATIONS.md that do, and returns its text.
func Check(t *testing.T, prefix string, metrics prometheus.Collector) (text string) {
	t.Helper()
	text = operations(t)
	var rows []string
	for line := range strings.Lines(text) {
		if !strings.HasPrefix(line, "| `"+prefix) {
			continue
		}
		column, _, _ := strings.Cut(line[2:], " |")
		for name := range strings.SplitSeq(column, ", ") {
			rows = append(rows, strings.Trim(name, "`"))
		}
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(metrics)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range families {
		names = append(names, f.GetName())
	}
	slices.Sort(rows)
	if len(names) == 0 || !slices.Equal(names, rows) {
		t.Errorf("metrics %q\nrows %q", names, rows)
	}
	return text
}

// operations is the operator's guide, of the module that the test is in.
func operations(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	for ; err == nil; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			break
		}
		if dir == filepath.Dir(dir) {
			t.Fatal("no go.mod above this test")
		}
	}
	text, err := os.ReadFile(filepath.Join(dir, "docs/OPERATIONS.md"))
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
