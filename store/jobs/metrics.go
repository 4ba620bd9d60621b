package jobs

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the figures of a queue. The owner registers Collectors.
type Metrics struct {
	queued  prometheus.Gauge
	running prometheus.Gauge
	ended   *prometheus.CounterVec // by state: done, failed
	retried prometheus.Counter
	// Unchanged counts, of those that were done, the jobs whose image was there already.
	// Config.Convert, which knows, counts.
	Unchanged prometheus.Counter
}

// NewMetrics returns figures at zero.
func NewMetrics() *Metrics {
	name := func(s string) string { return "quarry_jobs_" + s }
	return &Metrics{
		queued:  prometheus.NewGauge(prometheus.GaugeOpts{Name: name("queued"), Help: "Conversions that wait for their turn or for another attempt."}),
		running: prometheus.NewGauge(prometheus.GaugeOpts{Name: name("running"), Help: "Conversions under way."}),
		ended:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: name("ended_total"), Help: "Conversions that ended, by state."}, []string{"state"}),
		retried: prometheus.NewCounter(prometheus.CounterOpts{Name: name("retried_total"), Help: "Attempts that failed in a way that may pass."}),

		Unchanged: prometheus.NewCounter(prometheus.CounterOpts{Name: name("unchanged_total"), Help: "Of those done, jobs whose image was there already: no layer was read and nothing made."}),
	}
}

// Collectors returns what to register.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.queued, m.running, m.ended, m.retried, m.Unchanged}
}
