package agentbench

import (
	"fmt"
	"io"
	"math"
	"strings"
)

// The plot, in pixels: the frame of the curves, with room for labels around it.
const (
	plotWidth, plotHeight = 760, 420
	left, right           = 64.0, 736.0
	top, bottom           = 56.0, 366.0
)

// arms' colours are told apart by who sees few colours, and on grey paper.
var colours = map[Arm]string{ArmResident: "#6b7280", ArmPaused: "#7c3aed", ArmHibernate: "#d97706", ArmReclaim: "#2563eb"}

var armWords = map[Arm]string{
	ArmResident: "left resident", ArmPaused: "paused, memory kept", ArmHibernate: "hibernated", ArmReclaim: "paused, reclaimed, prefetched",
}

// WriteSVG draws how many of the wakes of each arm took no longer than what the axis
// says, which is of powers of ten.
func (r Report) WriteSVG(w io.Writer) error {
	low, high := r.decades()
	x := func(ms float64) float64 {
		at := (math.Log10(math.Max(ms, 1e-6)) - float64(low)) / float64(high-low)
		return left + (right-left)*math.Min(math.Max(at, 0), 1)
	}
	y := func(share float64) float64 { return bottom - (bottom-top)*share }
	var b strings.Builder
	p := func(format string, args ...any) { fmt.Fprintf(&b, format+"\n", args...) }
	p(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="sans-serif" font-size="12" fill="#374151">`, plotWidth, plotHeight, plotWidth, plotHeight)
	p(`<rect width="%d" height="%d" fill="#ffffff"/>`, plotWidth, plotHeight)
	p(`<text x="%g" y="22" font-size="15" fill="#111827">From the model's answer to an agent that has touched its working set</text>`, left)
	p(`<text x="%g" y="41">%d agents of %s, %.1f times the %s given; swap: %s; share of wakes</text>`, left, r.Agents, mib(r.AgentMemory), r.Demand, mib(r.Memory), r.Swap)
	for _, share := range []float64{0, 0.25, 0.5, 0.75, 0.95, 1} {
		dash := ""
		if share == 0.95 {
			dash = ` stroke-dasharray="4 3"`
		}
		p(`<line x1="%g" y1="%.1f" x2="%g" y2="%.1f" stroke="#e5e7eb"%s/>`, left, y(share), right, y(share), dash)
		p(`<text x="%g" y="%.1f" text-anchor="end">%g %%</text>`, left-8, y(share)+4, 100*share)
	}
	for d := low; d <= high; d++ {
		at := x(math.Pow10(d))
		p(`<line x1="%.1f" y1="%g" x2="%.1f" y2="%g" stroke="#e5e7eb"/>`, at, top, at, bottom)
		p(`<text x="%.1f" y="%g" text-anchor="middle">%s</text>`, at, bottom+18, decade(d))
	}
	for i, res := range r.Results {
		if len(res.Wakes) > 0 {
			p(`<path d="%s" fill="none" stroke="%s" stroke-width="2" stroke-linejoin="round"/>`, steps(res.Wakes, x, y), colours[res.Arm])
			p(`<circle cx="%.1f" cy="%.1f" r="4" fill="%s"/>`, x(res.P95), y(0.95), colours[res.Arm])
		}
		at := left + float64(i)*(right-left)/float64(len(r.Results))
		p(`<rect x="%.1f" y="%g" width="14" height="4" fill="%s"/>`, at, bottom+36, colours[res.Arm])
		p(`<text x="%.1f" y="%g">%s: p95 %s ms</text>`, at+20, bottom+42, armWords[res.Arm], ms(res.P95))
	}
	p(`</svg>`)
	_, err := io.WriteString(w, b.String())
	return err
}

// decades are the powers of ten, in milliseconds, that all wakes lie between.
func (r Report) decades() (low, high int) {
	low, high = math.MaxInt, math.MinInt
	for _, res := range r.Results {
		if len(res.Wakes) == 0 {
			continue
		}
		least, most := math.Max(res.Wakes[0], 0.01), math.Max(res.Wakes[len(res.Wakes)-1], 0.01)
		low, high = min(low, int(math.Floor(math.Log10(least)))), max(high, int(math.Ceil(math.Log10(most))))
	}
	if low > high {
		return 0, 4
	}
	if low == high {
		high++
	}
	return low, high
}

func decade(d int) string {
	if d >= 3 {
		return fmt.Sprintf("%g s", math.Pow10(d-3))
	}
	return fmt.Sprintf("%g ms", math.Pow10(d))
}

// steps is the path of a curve that rises at each wake.
func steps(sorted []float64, x, y func(float64) float64) string {
	var b strings.Builder
	fmt.Fprintf(&b, "M%.1f %.1f", x(sorted[0]), y(0))
	for i, v := range sorted {
		fmt.Fprintf(&b, "H%.1fV%.1f", x(v), y(float64(i+1)/float64(len(sorted))))
	}
	fmt.Fprintf(&b, "H%.1f", right)
	return b.String()
}
