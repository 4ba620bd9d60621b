package reader

import (
	"net/http"
	"sync"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"quarry/store"
)

// closedImage is the value of the label image for all images that are not open
// any more, so that sums over the label never fall, and its values are bounded.
const closedImage = "closed"

// metrics are the reader's own. They are read from the images when somebody
// asks, so that counting costs nobody a second counter.
type metrics struct {
	r *reader

	requests, wire, bucket, device *prometheus.Desc // by image
	reads, readBytes               *prometheus.Desc // by image and tier
	fetched, fetchedBytes          *prometheus.Desc // by image and tier
	failed                         *prometheus.Desc // by image and outcome
	diskBad, diskFailed            *prometheus.Desc // by image
	ahead                          *prometheus.Desc // by image and result
	hedged, hedgedBytes            *prometheus.Desc // by image and result
	hedges                         *prometheus.Desc // by image and result
	askedAgain                     *prometheus.Desc // by image

	images, connections, memoryBytes    *prometheus.Desc
	wakeups                             *prometheus.Desc
	diskOpen, diskBytes, diskLimit      *prometheus.Desc
	diskPinned, diskPaused              *prometheus.Desc
	diskRefused, diskEvicted, diskWrote *prometheus.Desc
	diskSegments, diskQueued            *prometheus.Desc
	diskEvictedBytes, diskKept          *prometheus.Desc

	mu   sync.Mutex // guards past, and is held while an image stops being open
	past Stats      // of all images that are not open any more
}

var _ prometheus.Collector = (*metrics)(nil)

func newMetrics(r *reader) *metrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("quarry_reader_"+name, help, labels, nil)
	}
	ofImage := func(name, help string, labels ...string) *prometheus.Desc {
		return desc(name, help, append([]string{"image"}, labels...)...)
	}
	return &metrics{
		r:            r,
		requests:     ofImage("requests_total", "Requests to stores."),
		wire:         ofImage("wire_bytes_total", "Bytes exchanged with stores."),
		bucket:       ofImage("bucket_bytes_total", "Bytes that stores say they read from their buckets."),
		device:       ofImage("device_bytes_total", "Bytes asked of the device."),
		reads:        ofImage("reads_total", "Reads of one chunk answered, by where its bytes were.", "tier"),
		readBytes:    ofImage("read_bytes_total", "Bytes of those reads.", "tier"),
		fetched:      ofImage("fetched_chunks_total", "Whole chunks taken from a tier.", "tier"),
		fetchedBytes: ofImage("fetched_bytes_total", "Plain bytes of those chunks.", "tier"),
		failed:       ofImage("failed_reads_total", "Chunks answered with EIO, by why.", "outcome"),
		diskBad:      ofImage("disk_bad_copies_total", "Copies on the cache disk found bad and dropped."),
		diskFailed:   ofImage("disk_failed_total", "Reads that the cache disk failed."),
		ahead:        ofImage("prefetched_chunks_total", "Chunks fetched before a read asked, by what became of them.", "result"),
		hedged:       ofImage("hedged_chunks_total", "Chunks that reads asked for although they were on their way, and those that came twice.", "result"),
		hedgedBytes:  ofImage("hedged_bytes_total", "Plain bytes of those chunks.", "result"),
		hedges:       ofImage("hedged_requests_total", "Second requests to stores for chunks that did not come, and those that brought one first.", "result"),
		askedAgain:   ofImage("asked_again_chunks_total", "Chunks that stores were asked for once more, by second requests and after failures."),

		images:           desc("open_images", "Images that are open."),
		connections:      desc("connections", "NBD connections, and pulls under way."),
		memoryBytes:      desc("memory_bytes", "Plain bytes of chunks in memory."),
		wakeups:          desc("short_wakeups_seconds_total", "Time for which the kernel was asked to have idle processors ready at once."),
		diskOpen:         desc("disk_open", "1 when there is a disk cache."),
		diskBytes:        desc("disk_bytes", "Bytes that the files of the disk cache take."),
		diskLimit:        desc("disk_limit_bytes", "Bytes that the disk cache may take."),
		diskPinned:       desc("disk_pinned_bytes", "Bytes of pinned chunks, cached or not."),
		diskPaused:       desc("disk_paused", "1 while the disk cache is not written after a fault."),
		diskRefused:      desc("disk_refused_chunks_total", "Chunks not written to the disk cache."),
		diskEvicted:      desc("disk_evicted_chunks_total", "Chunks evicted from the disk cache."),
		diskWrote:        desc("disk_write_errors_total", "Writes that the disk of the cache failed."),
		diskSegments:     desc("disk_segments", "Segments of the disk cache."),
		diskQueued:       desc("disk_queued_bytes", "Bytes of chunks on their way into the disk cache."),
		diskEvictedBytes: desc("disk_evicted_bytes_total", "Plain bytes of evicted chunks."),
		diskKept:         desc("disk_kept_chunks_total", "Chunks that were in use and survived an eviction."),
	}
}

// handler serves the metrics. The reader owns them, and a registry of its own:
// nothing of another package is in it.
func (m *metrics) handler() http.Handler {
	reg := prometheus.NewRegistry()
	reg.MustRegister(m)
	return promhttp.HandlerFor(reg, promhttp.HandlerOpts{})
}

// Describe implements prometheus.Collector.
func (m *metrics) Describe(ch chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, ch) }

// Collect implements prometheus.Collector.
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v int64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, float64(v))
	}
	counter := func(d *prometheus.Desc, v int64) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v))
	}
	m.mu.Lock()
	past := m.past
	open, conns := m.r.images()
	m.mu.Unlock()
	for id, im := range open {
		m.ofImage(ch, id, im.stats())
	}
	m.ofImage(ch, closedImage, past)
	gauge(m.images, int64(len(open)))
	gauge(m.connections, int64(conns))
	gauge(m.memoryBytes, m.r.memory.Bytes())
	ch <- prometheus.MustNewConstMetric(m.wakeups, prometheus.CounterValue, m.r.wakeups.Held().Seconds())
	if m.r.disk.Cache == nil {
		gauge(m.diskOpen, 0)
		return
	}
	st := m.r.disk.Stats()
	gauge(m.diskOpen, 1)
	gauge(m.diskBytes, st.DiskBytes)
	gauge(m.diskLimit, st.Limit)
	gauge(m.diskPinned, st.PinnedBytes)
	gauge(m.diskPaused, number(st.Paused))
	counter(m.diskRefused, st.Refused)
	counter(m.diskEvicted, st.Evicted)
	counter(m.diskWrote, st.WriteErrors)
	gauge(m.diskSegments, st.Segments)
	gauge(m.diskQueued, st.QueuedBytes)
	counter(m.diskEvictedBytes, st.EvictedBytes)
	counter(m.diskKept, st.Kept)
}

func (m *metrics) ofImage(ch chan<- prometheus.Metric, image string, st Stats) {
	counter := func(d *prometheus.Desc, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, float64(v), append([]string{image}, labels...)...)
	}
	counter(m.requests, st.Requests)
	counter(m.wire, st.WireBytes)
	counter(m.bucket, st.BucketBytes)
	counter(m.device, st.DeviceBytes)
	for _, t := range st.Tiers {
		counter(m.reads, t.Reads, t.Tier)
		counter(m.readBytes, t.ReadBytes, t.Tier)
		counter(m.fetched, t.Fetched.Chunks, t.Tier)
		counter(m.fetchedBytes, t.Fetched.Bytes, t.Tier)
	}
	for _, o := range store.Outcomes {
		counter(m.failed, st.Failed[o], string(o))
	}
	counter(m.diskBad, st.DiskBad)
	counter(m.diskFailed, st.DiskFailed)
	counter(m.ahead, st.Prefetch.Fetched.Chunks, "fetched")
	counter(m.ahead, st.Prefetch.Used.Chunks, "used")
	counter(m.ahead, st.Prefetch.Unused.Chunks, "unused")
	h := st.Hedged
	counter(m.hedged, h.Asked.Chunks, "asked")
	counter(m.hedged, h.Twice.Chunks, "twice")
	counter(m.hedgedBytes, h.Asked.Bytes, "asked")
	counter(m.hedgedBytes, h.Twice.Bytes, "twice")
	counter(m.hedges, h.Requests, "sent")
	counter(m.hedges, h.Won, "won")
	counter(m.askedAgain, h.Again)
}

// leave calls remove, which reports whether it took the image out of the open
// ones, and keeps its counts then: whoever collects sees them once.
func (m *metrics) leave(im *openImage, remove func() bool) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	last := remove()
	if last && im.loaded() {
		m.past = m.past.plus(im.stats())
	}
	return last
}

func number(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
