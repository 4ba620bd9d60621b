package page

import (
	"fmt"
	"html/template"
	"time"

	dto "github.com/prometheus/client_model/go"
)

// group is figures that belong together.
type group struct {
	Title   string
	Figures []figure
}

// figure is one line of them.
type figure struct {
	Label   string
	Value   string
	Percent int64 // of a bar; -1: none
}

// counters are the node's metrics by name and, of those with one label, its value.
type counters map[string]map[string]float64

func (p *Page) counters() counters {
	c := counters{}
	if p.cfg.Metrics == nil {
		return c
	}
	all, err := p.cfg.Metrics.Gather()
	if err != nil {
		p.log.Warn("the page has not all metrics", "error", err)
	}
	for _, f := range all {
		values := map[string]float64{}
		for _, m := range f.GetMetric() {
			label := ""
			if ls := m.GetLabel(); len(ls) == 1 {
				label = ls[0].GetValue()
			}
			values[label] += valueOf(m)
		}
		c[f.GetName()] = values
	}
	return c
}

func valueOf(m *dto.Metric) float64 {
	if m.Counter != nil {
		return m.GetCounter().GetValue()
	}
	return m.GetGauge().GetValue()
}

func (c counters) has(name string) bool { return len(c[name]) > 0 }

// rate is one share of a metric with a label: of what was asked, what hit.
func (c counters) rate(label, name, hit string, more ...string) (figure, bool) {
	part, all := c[name][hit], c[name][hit]
	for _, m := range more {
		all += c[name][m]
	}
	if all == 0 {
		return figure{}, false
	}
	return figure{label, fmt.Sprintf("%d %% (%s of %s)", int64(part*100/all), number(int64(part)), number(int64(all))), int64(part * 100 / all)}, true
}

// figures are what the node does for all together.
func (p *Page) figures(names int) []group {
	c := p.counters()
	packs, size := 0, int64(0)
	for _, pk := range p.cfg.Catalog.Packs() {
		packs++
		size += pk.Size
	}
	store := group{"Packs", []figure{
		{"names", number(names), -1},
		{"packs", number(packs), -1},
		{"bytes in packs", bytesText(size), -1},
	}}
	for _, f := range []struct{ name, label string }{
		{"quarry_gc_waiting_bytes", "retired, to be deleted after the grace"},
		{"quarry_gc_deleted_bytes_total", "deleted by gc since this node started"},
	} {
		if c.has(f.name) {
			store.Figures = append(store.Figures, figure{f.label, bytesText(int64(c.sum(f.name))), -1})
		}
	}
	rates := group{Title: "Hit rates since this node started"}
	for _, r := range []struct {
		label, name, hit string
		more             []string
	}{
		{"chunks of conversions that were known", "quarry_packed_chunks_total", "known", []string{"new"}},
		{"chunks that workers asked for and got", "quarry_api_chunks_total", "ok", []string{"not_found", "corrupt", "error"}},
		{"pack ranges that another request had read", "quarry_packed_ranges_total", "shared", []string{"bucket", "disk"}},
		{"blocks of packs on this node's disk", "quarry_ranges_blocks_total", "disk", []string{"shared", "bucket"}},
		{"starts with a prefetch list of the image", "quarry_api_hints_total", "own", []string{"sibling", "none"}},
		{"starts with the list of a sibling", "quarry_api_hints_total", "sibling", []string{"own", "none"}},
	} {
		if f, ok := c.rate(r.label, r.name, r.hit, r.more...); ok {
			rates.Figures = append(rates.Figures, f)
		}
	}
	if c.has("quarry_packed_read_chunks_total") {
		rates.Figures = append(rates.Figures, figure{"chunks read from packs", number(int64(c.sum("quarry_packed_read_chunks_total"))), -1})
	}
	return []group{store, rates}
}

func (c counters) sum(name string) (n float64) {
	for _, v := range c[name] {
		n += v
	}
	return n
}

// funcs are what the template calls.
var funcs = template.FuncMap{
	"bytes":  bytesText,
	"number": number,
	"time":   func(t time.Time) string { return t.UTC().Format("2006-01-02 15:04 UTC") },
}

// bytesText writes a size in binary units with three digits.
func bytesText(n int64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"}
	v, u := float64(n), 0
	for v >= 1000 && u < len(units)-1 {
		v, u = v/1024, u+1
	}
	switch {
	case u == 0 || v >= 100:
		return fmt.Sprintf("%.0f %s", v, units[u])
	case v >= 10:
		return fmt.Sprintf("%.1f %s", v, units[u])
	}
	return fmt.Sprintf("%.2f %s", v, units[u])
}

// number writes a count, an integer of any type, with a thin space between thousands.
func number(n any) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "\u202f" + s[i:]
	}
	return s
}
