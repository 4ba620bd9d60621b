package wait

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Late is how long after the first packet of an answer a sandbox should run at the
// latest.
const Late = 50 * time.Millisecond

// Metrics are of one worker. Its owner registers them.
type Metrics struct {
	pauses   *prometheus.CounterVec // by result
	resumes  *prometheus.CounterVec // by reason
	wake     prometheus.Histogram
	late     prometheus.Counter
	packets  *prometheus.CounterVec // by from
	lost     *prometheus.CounterVec // by cause
	watched  prometheus.Gauge
	paused   prometheus.Gauge
	watching prometheus.Gauge
}

// NewMetrics makes metrics that nobody has registered yet.
func NewMetrics() *Metrics {
	opts := func(name, help string) prometheus.Opts {
		return prometheus.Opts{Namespace: "quarry", Subsystem: "wait", Name: name, Help: help}
	}
	counters := func(name, help, label string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts(opts(name, help)), []string{label})
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts(opts(name, help)))
	}
	m := &Metrics{
		pauses:  counters("pauses_total", "Sandboxes found waiting for their model, by what became of the pause.", "result"),
		resumes: counters("resumes_total", "Paused sandboxes that were resumed.", "reason"),
		wake: prometheus.NewHistogram(prometheus.HistogramOpts{
			Namespace: "quarry", Subsystem: "wait", Name: "wake_seconds",
			Help:    "From the packet, or what else asked for it, until the sandbox runs.",
			Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 5},
		}),
		late:     prometheus.NewCounter(prometheus.CounterOpts(opts("late_total", "Resumed more than 50 ms after what asked for it."))),
		packets:  counters("packets_total", "Headers that were read.", "from"),
		lost:     counters("lost_total", "Times that everything was resumed because packets could be missing.", "cause"),
		watched:  gauge("sandboxes", "Sandboxes that are watched."),
		paused:   gauge("paused", "Of these, paused for their model."),
		watching: gauge("watching", "1 while packets can be seen; 0: no sandbox is paused for its model."),
	}
	for _, r := range Reasons {
		m.resumes.WithLabelValues(string(r))
	}
	for _, r := range []string{pauseDone, pauseFailed} {
		m.pauses.WithLabelValues(r)
	}
	for _, r := range []Reason{Overrun, Rules, Reader} {
		m.lost.WithLabelValues(string(r))
	}
	for _, from := range []string{fromGuest, fromModel, fromUnknown} {
		m.packets.WithLabelValues(from)
	}
	return m
}

// Values of labels.
const (
	pauseDone   = "paused"
	pauseFailed = "failed"
	fromGuest   = "guest"
	fromModel   = "model"
	fromUnknown = "unknown" // not a header, or of no sandbox that is watched
)

var _ prometheus.Collector = (*Metrics)(nil)

func (m *Metrics) all() []prometheus.Collector {
	return []prometheus.Collector{m.pauses, m.resumes, m.wake, m.late, m.packets, m.lost, m.watched, m.paused, m.watching}
}

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.all() {
		c.Describe(ch)
	}
}

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.all() {
		c.Collect(ch)
	}
}

// woken counts a sandbox that runs again.
func (m *Metrics) woken(w Wake, now time.Time) {
	m.resumes.WithLabelValues(string(w.Why)).Inc()
	took := now.Sub(w.Seen)
	m.wake.Observe(took.Seconds())
	if took > Late {
		m.late.Inc()
	}
}
