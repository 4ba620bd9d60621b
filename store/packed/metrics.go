package packed

import "github.com/prometheus/client_golang/prometheus"

// Metrics are the counters of a store. The owner registers Collectors.
type Metrics struct {
	chunks      *prometheus.CounterVec // by result: new, known
	plainBytes  *prometheus.CounterVec // by result: new, known
	storedBytes prometheus.Counter
	packs       prometheus.Counter
	readChunks  prometheus.Counter
	damaged     prometheus.Counter
	damagedHere prometheus.Gauge
	alarms      prometheus.Counter
	ranges      *prometheus.CounterVec // by tier: bucket, shared, disk
	rangeBytes  *prometheus.CounterVec // by tier: bucket, shared, disk
}

// NewMetrics returns counters at zero.
func NewMetrics() *Metrics {
	opts := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Name: "quarry_packed_" + name, Help: help}
	}
	return &Metrics{
		chunks:      prometheus.NewCounterVec(opts("chunks_total", "Chunks put, by whether they were new."), []string{"result"}),
		plainBytes:  prometheus.NewCounterVec(opts("plain_bytes_total", "Plain bytes of chunks put, by whether they were new."), []string{"result"}),
		storedBytes: prometheus.NewCounter(opts("stored_bytes_total", "Stored bytes of new chunks.")),
		packs:       prometheus.NewCounter(opts("packs_total", "Packs added to the store.")),
		readChunks:  prometheus.NewCounter(opts("read_chunks_total", "Chunks read from packs.")),
		damagedHere: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "quarry_packed_damaged_copies", Help: "Damaged copies that a node which only reads has found and the writer has not condemned.",
		}),
		damaged:    prometheus.NewCounter(opts("damaged_chunks_total", "Reads that found a copy damaged or its pack missing.")),
		alarms:     prometheus.NewCounter(opts("condemned_reads_total", "Alarms: reads of chunks that gc found to be needed by nobody.")),
		ranges:     prometheus.NewCounterVec(opts("ranges_total", "Ranges of packs that batches used, by whether the bucket was asked, another batch had them, the node's disk, or the kernel sent them from a file."), []string{"tier"}),
		rangeBytes: prometheus.NewCounterVec(opts("range_bytes_total", "Bytes of these ranges, gaps included."), []string{"tier"}),
	}
}

// Collectors returns what to register.
func (m *Metrics) Collectors() []prometheus.Collector {
	return []prometheus.Collector{m.chunks, m.plainBytes, m.storedBytes, m.packs, m.readChunks, m.damaged, m.damagedHere, m.alarms, m.ranges, m.rangeBytes}
}

// used counts a range that a batch had from a tier.
func (m *Metrics) used(tier string, size int64) {
	m.ranges.WithLabelValues(tier).Inc()
	m.rangeBytes.WithLabelValues(tier).Add(float64(size))
}

func (m *Metrics) wrote(s Stats) {
	m.chunks.WithLabelValues("new").Add(float64(s.NewChunks))
	m.chunks.WithLabelValues("known").Add(float64(s.Chunks - s.NewChunks))
	m.plainBytes.WithLabelValues("new").Add(float64(s.NewPlainBytes))
	m.plainBytes.WithLabelValues("known").Add(float64(s.PlainBytes - s.NewPlainBytes))
	m.storedBytes.Add(float64(s.NewStoredBytes))
}
