package lab

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
)

// ReaderMetric adds up a metric of a worker folder's reader over all its series
// that have the label, such as `tier="memory"`; "" is all of them.
func ReaderMetric(ctx context.Context, worker, name, label string) (float64, error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(worker, "reader.http"))
	}
	client := &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	rq, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://reader/metrics", nil)
	if err != nil {
		return 0, err
	}
	res, err := client.Do(rq)
	if err != nil {
		return 0, err
	}
	defer res.Body.Close()
	sum, found := 0.0, false
	lines := bufio.NewScanner(res.Body)
	for lines.Scan() {
		series, value, ok := strings.Cut(lines.Text(), " ")
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
	if err := lines.Err(); err != nil {
		return 0, err
	}
	if !found {
		return 0, fmt.Errorf("the reader has no metric %s with %s", name, label)
	}
	return sum, nil
}
