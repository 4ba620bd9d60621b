package api

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the handler's own. Labels have few values: routes of the table,
// status codes of the error table.
type metrics struct {
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	sent     prometheus.Counter
	chunks   *prometheus.CounterVec
	byStatus [4]prometheus.Counter // of chunks, by Status
	inFlight prometheus.Gauge
	hints    *prometheus.CounterVec

	refusals    *prometheus.CounterVec
	connections prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "quarry_api_requests_total", Help: "Requests answered, by route and status.",
		}, []string{"route", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "quarry_api_request_seconds", Help: "Time to answer a request, by route.",
			Buckets: prometheus.ExponentialBuckets(0.001, 4, 9), // 1 ms to 65 s
		}, []string{"route"}),
		sent: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "quarry_api_sent_bytes_total", Help: "Bytes of answer bodies.",
		}),
		chunks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "quarry_api_chunks_total", Help: "Frames of batch answers, by status.",
		}, []string{"status"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "quarry_api_requests_in_flight", Help: "Requests being answered.",
		}),
	}
	m.hints = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "quarry_api_hints_total", Help: "Starts that asked for a prefetch list, by whose they got: own, sibling, none.",
	}, []string{"list"})
	m.refusals = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "quarry_api_refusals_total", Help: "Requests and connections that were not served, by reason: a code of the error table, or bad_request_head.",
	}, []string{"reason"})
	m.connections = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "quarry_api_connections", Help: "Connections within the limit.",
	})
	for s, name := range []string{"ok", "not_found", "corrupt", "error"} {
		m.byStatus[s] = m.chunks.WithLabelValues(name)
	}
	if reg != nil {
		reg.MustRegister(m.requests, m.seconds, m.sent, m.chunks, m.inFlight, m.hints, m.refusals, m.connections)
	}
	return m
}

// observe counts one finished request.
func (m *metrics) observe(route string, status int, took time.Duration) {
	m.requests.WithLabelValues(route, strconv.Itoa(status)).Inc()
	m.seconds.WithLabelValues(route).Observe(took.Seconds())
}

// refused counts what was not served.
func (m *metrics) refused(reason string) { m.refusals.WithLabelValues(reason).Inc() }

// frame counts one frame of a batch answer.
func (m *metrics) frame(s Status) { m.byStatus[s].Inc() }

// records counts the chunks of a batch answer that were sent as records of packs.
func (m *metrics) records(n int) { m.byStatus[StatusOK].Add(float64(n)) }
