package main

import (
	"fmt"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/api/access"
	"quarry/store/bucket/s3/s3test"
)

// metricsOf returns the names of the metrics of a store node.
func metricsOf(t *testing.T, cfg ownerConfig) (registered []string) {
	t.Helper()
	cfg.log = warnings(os.Stderr)
	o, err := openOwner(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer o.close()
	newHandler(o, access.New(access.Config{}), false, cfg.log)
	descs := make(chan *prometheus.Desc)
	go func() { // ends when all are described
		defer close(descs)
		o.collected.Describe(descs)
	}()
	for d := range descs {
		registered = append(registered, regexp.MustCompile(`fqName: "([^"]*)"`).FindStringSubmatch(d.String())[1])
	}
	return registered
}

// What an operator reads of /metrics in docs/OPERATIONS.md is what store nodes have.
func TestMetricsAreDocumented(t *testing.T) {
	at := place{url: bucketURL("file://" + t.TempDir())}
	registered := metricsOf(t, ownerConfig{dir: dataDir(t.TempDir()), bucket: at})
	registered = append(registered, metricsOf(t, ownerConfig{dir: dataDir(t.TempDir()), bucket: at, readOnly: true})...)
	server := s3test.New(t)
	at.url = bucketURL(fmt.Sprintf("s3://%s?endpoint=%s", server.Bucket(t), url.QueryEscape(server.URL)))
	registered = append(registered, metricsOf(t, ownerConfig{dir: dataDir(t.TempDir()), bucket: at})...)
	text, err := os.ReadFile("../../docs/OPERATIONS.md")
	if err != nil {
		t.Fatal(err)
	}
	// Below is what workers have; their packages' own tests hold that.
	stores, _, found := strings.Cut(string(text), "\n## Workers\n")
	if !found {
		t.Fatal("docs/OPERATIONS.md has no section of workers")
	}
	var documented []string
	for _, row := range regexp.MustCompile("(?m)^\\| `(quarry_[a-z0-9_]*)` \\|").FindAllStringSubmatch(stores, -1) {
		documented = append(documented, row[1])
	}
	slices.Sort(registered)
	slices.Sort(documented)
	if len(registered) == 0 {
		t.Fatal("no metrics are registered")
	}
	for _, name := range registered {
		if !slices.Contains(documented, name) {
			t.Errorf("%s has no row in the table Metrics of docs/OPERATIONS.md", name)
		}
	}
	for _, name := range documented {
		if !slices.Contains(registered, name) {
			t.Errorf("docs/OPERATIONS.md has a row for %s, which a store node has not", name)
		}
	}
	if n := len(documented); len(slices.Compact(documented)) != n {
		t.Errorf("a name has two rows: %q", documented[:n])
	}
}
