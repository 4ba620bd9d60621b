package sandboxes

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	inFlight prometheus.Gauge
	requests *prometheus.CounterVec
	seconds  *prometheus.HistogramVec
	errors   *prometheus.CounterVec
}

func newMetrics(r *prometheus.Registry) *metrics {
	m := &metrics{
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{Name: "quarry_sandboxes_requests_in_flight", Help: "Requests being served."}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "quarry_sandboxes_requests_total", Help: "Requests, by route and status."}, []string{"route", "status"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "quarry_sandboxes_request_seconds", Help: "Time of a request, waits for execs included.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 10, 60}}, []string{"route"}),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "quarry_sandboxes_refused_total", Help: "Requests not served, by code."}, []string{"code"}),
	}
	r.MustRegister(m.inFlight, m.requests, m.seconds, m.errors)
	return m
}

func (m *metrics) observe(route string, status int, took time.Duration) {
	m.requests.WithLabelValues(route, strconv.Itoa(status)).Inc()
	m.seconds.WithLabelValues(route).Observe(took.Seconds())
}

func (m *metrics) refused(code string) { m.errors.WithLabelValues(code).Inc() }
