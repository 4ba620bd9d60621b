package node

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// NapMetrics are of the hibernations of one node. Its owner registers them; nil counts
// for nobody.
type NapMetrics struct {
	hibernations *prometheus.CounterVec   // by result
	wakes        *prometheus.CounterVec   // by result
	seconds      *prometheus.HistogramVec // by step
	bytes        prometheus.Gauge
}

// NewNapMetrics makes metrics that nobody has registered yet.
func NewNapMetrics() *NapMetrics {
	m := &NapMetrics{
		hibernations: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "quarry_hibernate_total", Help: "Sandboxes that were to be put to disk, by what became of that.",
		}, []string{"result"}),
		wakes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "quarry_hibernate_wakes_total", Help: "Hibernated sandboxes that were to be restored, by what became of that.",
		}, []string{"result"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "quarry_hibernate_seconds", Help: "Time of one hibernation, or one wake, that succeeded.",
			Buckets: []float64{.1, .2, .5, 1, 2, 5, 10, 30, 60, 300},
		}, []string{"step"}),
		bytes: prometheus.NewGauge(prometheus.GaugeOpts{Name: "quarry_hibernate_bytes", Help: "Disk that hibernated sandboxes take."}),
	}
	for _, result := range []string{napDone, napRefused, napFailed} {
		m.hibernations.WithLabelValues(result)
		if result != napRefused {
			m.wakes.WithLabelValues(result)
		}
	}
	return m
}

// Values of labels.
const (
	napDone    = "done"
	napRefused = "refused"
	napFailed  = "failed"
	stepNap    = "hibernate"
	stepWake   = "wake"
)

var _ prometheus.Collector = (*NapMetrics)(nil)

func (m *NapMetrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.hibernations, m.wakes, m.seconds, m.bytes}
}

// Describe implements prometheus.Collector.
func (m *NapMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *NapMetrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all() {
		c.Collect(ch)
	}
}

func (m *NapMetrics) hibernated(took time.Duration, result string) {
	if m != nil {
		count(m.hibernations, m.seconds, result, stepNap, took)
	}
}

func (m *NapMetrics) woken(took time.Duration, result string) {
	if m != nil {
		count(m.wakes, m.seconds, result, stepWake, took)
	}
}

func count(c *prometheus.CounterVec, h *prometheus.HistogramVec, result, step string, took time.Duration) {
	c.WithLabelValues(result).Inc()
	if result == napDone {
		h.WithLabelValues(step).Observe(took.Seconds())
	}
}

// holds notes that so much more of the disk is taken, or less.
func (m *NapMetrics) holds(more int64) {
	if m != nil {
		m.bytes.Add(float64(more))
	}
}
