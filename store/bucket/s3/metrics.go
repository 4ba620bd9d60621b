package s3

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	awsmiddleware "github.com/aws/aws-sdk-go-v2/aws/middleware"
	awss3 "github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the counters of a bucket: one request is one attempt of one kind.
type metrics struct {
	requests *prometheus.CounterVec   // by op and outcome
	seconds  *prometheus.HistogramVec // by op
	retries  prometheus.Counter
	hedges   prometheus.Counter
	sent     prometheus.Counter
	received prometheus.Counter
}

func newMetrics() *metrics {
	opts := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Name: "quarry_s3_" + name, Help: help}
	}
	return &metrics{
		requests: prometheus.NewCounterVec(opts("requests_total", "Requests of the S3 server, by operation and how they ended."), []string{"op", "outcome"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "quarry_s3_request_seconds", Help: "Time until the answer of a request begins.", Buckets: prometheus.DefBuckets,
		}, []string{"op"}),
		retries:  prometheus.NewCounter(opts("retries_total", "Attempts that failed and were made again.")),
		hedges:   prometheus.NewCounter(opts("hedges_total", "Reads that were slow and asked for a second time.")),
		sent:     prometheus.NewCounter(opts("sent_bytes_total", "Bytes of request bodies.")),
		received: prometheus.NewCounter(opts("received_bytes_total", "Bytes of answers' bodies.")),
	}
}

// Collectors returns what the owner registers.
func (b *Bucket) Collectors() []prometheus.Collector {
	m := b.metrics
	return []prometheus.Collector{m.requests, m.seconds, m.retries, m.hedges, m.sent, m.received}
}

// counting counts the requests of the SDK's client.
type counting struct {
	awss3.HTTPClient
	m *metrics
}

// Do implements awss3.HTTPClient.
func (c counting) Do(r *http.Request) (*http.Response, error) {
	op := awsmiddleware.GetOperationName(r.Context())
	c.m.sent.Add(float64(max(0, r.ContentLength)))
	begun := time.Now()
	resp, err := c.HTTPClient.Do(r)
	c.m.requests.WithLabelValues(op, outcome(resp, err)).Inc()
	if err != nil {
		return resp, err
	}
	c.m.seconds.WithLabelValues(op).Observe(time.Since(begun).Seconds())
	resp.Body = countedBody{resp.Body, c.m.received}
	return resp, nil
}

// outcome says how a request ended, as far as its status and headers tell.
func outcome(resp *http.Response, err error) string {
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	case errors.Is(err, context.Canceled):
		return "left" // nobody needs the answer any more
	case err != nil:
		return "broken"
	case resp.StatusCode < 300:
		return "ok"
	case resp.StatusCode == http.StatusNotFound:
		return "not_found"
	case resp.StatusCode == http.StatusServiceUnavailable, resp.StatusCode == http.StatusTooManyRequests:
		return "slow_down"
	case resp.StatusCode >= 500:
		return "error"
	case resp.StatusCode == http.StatusPreconditionFailed, resp.StatusCode == http.StatusConflict:
		return "taken"
	}
	return "refused"
}

// countedBody counts what is read of a body.
type countedBody struct {
	io.ReadCloser
	n prometheus.Counter
}

// Read implements io.Reader.
func (b countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.n.Add(float64(n))
	return n, err
}
