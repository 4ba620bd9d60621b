package memory

import (
	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are of one worker. Its owner registers them. A nil one counts for nobody.
type Metrics struct {
	waiting   prometheus.Gauge
	taken     *prometheus.CounterVec // by how
	returned  prometheus.Counter
	wakes     *prometheus.CounterVec // by result
	fetch     prometheus.Histogram
	failures  *prometheus.CounterVec // by step
	wanted    prometheus.Gauge
	available *prometheus.GaugeVec // by of
	stalled   *prometheus.GaugeVec // by of
}

// Values of labels.
const (
	byReduce = "sentry"
	bySwap   = "swap"

	wokeNothing = "nothing" // nothing had been taken
	wokeWhole   = "whole"
	wokeRest    = "rest" // the rest was brought back while the guest ran

	stepTake   = "take"
	stepReturn = "return"
)

// NewMetrics makes metrics that nobody has registered yet.
func NewMetrics() *Metrics {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "quarry", Subsystem: "paused_memory", Name: name, Help: help}
	}
	counters := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts(opts(name, help)), []string{label})
	}
	gauges := func(name, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts(opts(name, help)), []string{"of"})
	}
	m := &Metrics{
		waiting:  prometheus.NewGauge(prometheus.GaugeOpts(opts("sandboxes", "Paused sandboxes whose memory may be taken."))),
		taken:    counters("taken_bytes_total", "Memory that paused sandboxes gave for others.", "how"),
		returned: prometheus.NewCounter(prometheus.CounterOpts(opts("returned_bytes_total", "Memory and pages of images that were brought back."))),
		wakes:    counters("wakes_total", "Sandboxes that were resumed, by what was brought back before.", "result"),
		fetch: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "quarry", Subsystem: "paused_memory", Name: "fetch_seconds",
			Help:    "How long a resume waited for memory that had been taken.",
			Buckets: []float64{.001, .002, .005, .01, .02, .04, .06, .1, .2, .5, 1},
		}),
		failures:  counters("failures_total", "Calls that failed to take memory or to bring it back.", "step"),
		wanted:    prometheus.NewGauge(prometheus.GaugeOpts(opts("wanted_bytes", "What is to be taken now; 0 while there is enough."))),
		available: gauges("available_bytes", "Memory that can be had without swapping."),
		stalled:   gauges("stalled_seconds", "How long some task has waited for memory since the machine or the group began."),
	}
	for v, values := range map[*prometheus.CounterVec][]string{
		m.taken: {byReduce, bySwap}, m.wakes: {wokeNothing, wokeWhole, wokeRest}, m.failures: {stepTake, stepReturn},
	} {
		for _, value := range values {
			v.WithLabelValues(value)
		}
	}
	for _, v := range []*prometheus.GaugeVec{m.available, m.stalled} {
		v.WithLabelValues(Machine{}.Name())
	}
	return m
}

func (m *Metrics) collectors() []prometheus.Collector {
	return []prometheus.Collector{m.waiting, m.taken, m.returned, m.wakes, m.fetch, m.failures, m.wanted, m.available, m.stalled}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.collectors() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.collectors() {
		c.Collect(ch)
	}
}

func (m *Metrics) add(isNew bool) {
	if m != nil && isNew {
		m.waiting.Inc()
	}
}

func (m *Metrics) remove(was bool) {
	if m != nil && was {
		m.waiting.Dec()
	}
}

func (m *Metrics) took(f Freed, err error) {
	if m == nil {
		return
	}
	m.taken.WithLabelValues(byReduce).Add(float64(f.Reduced))
	m.taken.WithLabelValues(bySwap).Add(float64(f.Swapped))
	if err != nil {
		m.failures.WithLabelValues(stepTake).Inc()
	}
}

func (m *Metrics) woke(f Fetched, err error) {
	if m == nil {
		return
	}
	m.returned.Add(float64(f.Bytes))
	result := wokeWhole
	switch {
	case f.Rest:
		result = wokeRest
	case f.Bytes == 0:
		result = wokeNothing
	}
	m.wakes.WithLabelValues(result).Inc()
	if result != wokeNothing {
		m.fetch.Observe(f.Took.Seconds())
	}
	if err != nil {
		m.failures.WithLabelValues(stepReturn).Inc()
	}
}

// rest counts what was brought back after the guest ran.
func (m *Metrics) rest(bytes int64) {
	if m != nil {
		m.returned.Add(float64(bytes))
	}
}

// saw notes a reading. Of several groups the one with least counts.
func (m *Metrics) saw(of map[string]Reading) {
	if m == nil {
		return
	}
	for name, r := range of {
		m.available.WithLabelValues(name).Set(float64(r.Available))
		m.stalled.WithLabelValues(name).Set(r.Stalled.Seconds())
	}
}

func (m *Metrics) wants(bytes int64) {
	if m != nil {
		m.wanted.Set(float64(bytes))
	}
}
