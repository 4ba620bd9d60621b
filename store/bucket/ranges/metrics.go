package ranges

import (
	"github.com/prometheus/client_golang/prometheus"

	"quarry/store/cache"
)

// metrics are the counters of a cache.
type metrics struct {
	blocks       *prometheus.CounterVec // by tier: disk, shared, bucket
	fromDisk     prometheus.Counter     // the three of them
	shared       prometheus.Counter
	missed       prometheus.Counter
	fetches      prometheus.Counter
	fetchedBytes prometheus.Counter
	dropped      prometheus.Counter
	unkept       prometheus.Counter
	disk         []prometheus.Collector
}

func newMetrics(disk *cache.Cache) *metrics {
	opts := func(name, help string) prometheus.CounterOpts {
		return prometheus.CounterOpts{Name: "quarry_ranges_" + name, Help: help}
	}
	gauge := func(name, help string, of func(cache.Stats) int64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts(opts(name, help)), func() float64 { return float64(of(disk.Stats())) })
	}
	count := func(name, help string, of func(cache.Stats) int64) prometheus.Collector {
		return prometheus.NewCounterFunc(opts(name, help), func() float64 { return float64(of(disk.Stats())) })
	}
	blocks := prometheus.NewCounterVec(opts("blocks_total", "Blocks of packs that were read, by where they came from."), []string{"tier"})
	return &metrics{
		blocks:       blocks,
		fromDisk:     blocks.WithLabelValues("disk"),
		shared:       blocks.WithLabelValues("shared"),
		missed:       blocks.WithLabelValues("bucket"),
		fetches:      prometheus.NewCounter(opts("fetches_total", "Reads of the bucket for blocks.")),
		fetchedBytes: prometheus.NewCounter(opts("fetched_bytes_total", "Bytes of these reads.")),
		dropped:      prometheus.NewCounter(opts("dropped_total", "Blocks that were found damaged and read again.")),
		unkept:       prometheus.NewCounter(opts("unkept_total", "Blocks that the disk did not take.")),
		disk: []prometheus.Collector{
			gauge("disk_bytes", "Bytes of the cache's files.", func(s cache.Stats) int64 { return s.DiskBytes }),
			gauge("limit_bytes", "Bytes that they may have.", func(s cache.Stats) int64 { return s.Limit }),
			count("evicted_bytes_total", "Bytes of blocks that made room for others.", func(s cache.Stats) int64 { return s.EvictedBytes }),
			count("write_errors_total", "Writes to the cache's disk that failed.", func(s cache.Stats) int64 { return s.WriteErrors }),
		},
	}
}

// Collectors returns what the owner registers.
func (c *Cache) Collectors() []prometheus.Collector {
	m := c.metrics
	return append([]prometheus.Collector{m.blocks, m.fetches, m.fetchedBytes, m.dropped, m.unkept}, m.disk...)
}
