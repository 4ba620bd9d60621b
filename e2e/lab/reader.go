package lab

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
)

// ReaderMetrics returns what the reader of a worker folder answers to GET /metrics.
func ReaderMetrics(ctx context.Context, worker string) (string, error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(worker, "reader.http"))
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	rq, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://reader/metrics", nil)
	if err != nil {
		return "", err
	}
	res, err := client.Do(rq)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return "", fmt.Errorf("the reader answers %s to GET /metrics", res.Status)
	}
	text, err := io.ReadAll(res.Body)
	return string(text), err
}

// ReaderMetric adds up a metric of a worker folder's reader over all its series
// that have the label, such as `tier="memory"`; "" is all of them.
func ReaderMetric(ctx context.Context, worker, name, label string) (float64, error) {
	text, err := ReaderMetrics(ctx, worker)
	if err != nil {
		return 0, err
	}
	sum, found := 0.0, false
	for line := range strings.Lines(text) {
		series, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		labels, is := strings.CutPrefix(series, name)
		if !ok || !is || labels != "" && labels[0] != '{' || !strings.Contains(labels, label) {
			continue
		}
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			return 0, fmt.Errorf("reader's metric %s: %w", series, err)
		}
		sum, found = sum+n, true
	}
	if !found {
		return 0, fmt.Errorf("the reader has no metric %s with %s", name, label)
	}
	return sum, nil
}
