package main

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/worker/sandbox"
)

// nodeMetrics are a node's status as metrics, asked for when they are read.
type nodeMetrics struct {
	status                                          func(context.Context) (sandbox.NodeStatus, error)
	sandboxes, memory, disk, pids, refused, drained *prometheus.Desc
}

func newNodeMetrics(status func(context.Context) (sandbox.NodeStatus, error)) *nodeMetrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("quarry_node_"+name, help, labels, nil)
	}
	return &nodeMetrics{
		status:    status,
		sandboxes: desc("sandboxes", "Sandboxes, by state.", "state"),
		memory:    desc("memory_bytes", "Memory that sandboxes may be given, and what of it is.", "amount"),
		disk:      desc("disk_bytes", "Disk that sandboxes may be given, and what of it is.", "amount"),
		pids:      desc("pids", "Processes that sandboxes may have, and what is given of them.", "amount"),
		refused:   desc("refused_total", "Creates refused, by what there was no room for.", "what"),
		drained:   desc("draining", "1 while creates are refused because the node is drained."),
	}
}

// Describe implements prometheus.Collector.
func (m *nodeMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.sandboxes, m.memory, m.disk, m.pids, m.refused, m.drained} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *nodeMetrics) Collect(ch chan<- prometheus.Metric) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	s, err := m.status(ctx)
	if err != nil {
		ch <- prometheus.NewInvalidMetric(m.sandboxes, err)
		return
	}
	for state, n := range s.Sandboxes {
		ch <- prometheus.MustNewConstMetric(m.sandboxes, prometheus.GaugeValue, float64(n), string(state))
	}
	for what, n := range s.Refused {
		ch <- prometheus.MustNewConstMetric(m.refused, prometheus.CounterValue, float64(n), what)
	}
	for _, a := range []struct {
		desc   *prometheus.Desc
		amount sandbox.Amount
	}{{m.memory, s.Memory}, {m.disk, s.Disk}, {m.pids, s.PIDs}} {
		ch <- prometheus.MustNewConstMetric(a.desc, prometheus.GaugeValue, float64(a.amount.Total), "total")
		ch <- prometheus.MustNewConstMetric(a.desc, prometheus.GaugeValue, float64(a.amount.Used), "given")
	}
	draining := 0.0
	if s.Draining {
		draining = 1
	}
	ch <- prometheus.MustNewConstMetric(m.drained, prometheus.GaugeValue, draining)
}
