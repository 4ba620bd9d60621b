package gc

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the counters of a Collector. The owner registers Collectors.
type Metrics struct {
	runs    *prometheus.CounterVec // by result: ok, error
	objects *prometheus.CounterVec // by kind
	bytes   *prometheus.CounterVec // by kind
	copied  prometheus.Counter
	waiting prometheus.Gauge
}

// NewMetrics returns counters at zero.
func NewMetrics() *Metrics {
	opts := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Name: "quarry_gc_" + name, Help: help}
	}
	return &Metrics{
		runs:    prometheus.NewCounterVec(opts("runs_total", "Collections, by result."), []string{"result"}),
		objects: prometheus.NewCounterVec(opts("deleted_objects_total", "Objects deleted, by kind."), []string{"kind"}),
		bytes:   prometheus.NewCounterVec(opts("deleted_bytes_total", "Bytes deleted, by kind."), []string{"kind"}),
		copied:  prometheus.NewCounter(opts("copied_bytes_total", "Stored bytes of live chunks copied out of condemned packs.")),
		waiting: prometheus.NewGauge(prometheus.GaugeOpts{Name: "quarry_gc_waiting_bytes", Help: "Bytes of retired packs that are deleted after the grace."}),
	}
}

// Collectors returns what to register.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.runs, m.objects, m.bytes, m.copied, m.waiting}
}

func (m *Metrics) ended(r Report, err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	m.runs.WithLabelValues(result).Inc()
	if r.DryRun {
		return
	}
	for kind, a := range r.Deleted {
		m.objects.WithLabelValues(kind).Add(float64(a.Objects))
		m.bytes.WithLabelValues(kind).Add(float64(a.Bytes))
	}
	m.copied.Add(float64(r.Repacked.Bytes))
	m.waiting.Set(float64(r.Waiting.Bytes))
}
