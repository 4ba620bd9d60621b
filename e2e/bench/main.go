// Command bench measures what quarry claims about speed and memory, each as a
// ratio to a peer or a limit in the same run, and fails when one does not hold.
// make bench runs the part of it that takes five minutes, make bench-all all of
// it.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"quarry/e2e/lab"
	"quarry/internal/storm"
)

func main() {
	storm.Main()
	if len(os.Args) == 3 && os.Args[1] == readTreeWord {
		if err := readTree(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// bench is one run: what it measures on, and what it found.
type bench struct {
	report
	lab    *lab.Lab
	all    bool   // every image, and more rounds
	cache  string // folder of generated images and of the filled index, kept between runs
	images []layout
	spent  map[string]conversion // by image, for what is compared with a conversion
	cold   *cold                 // made by the first part that needs it
}

// part is one group of figures.
type part struct {
	name    string
	measure func(context.Context, *bench) error
	live    bool // times of short commands, which a busy machine makes long
}

var parts = []part{
	{"convert", measureConvert, false},
	{"entries", measureEntries, false},
	{"index", measureIndex, false},
	{"sharing", measureSharing, false},
	{"cold", measureWirePages, false},
	{"full", measureFullRead, true},
	{"start", measureStart, true},
	{"hits", measureHits, true},
	{"replay", measureReplay, false},
	{"serve", measureServe, true},
	{"burst", measureBurst, false},
	{"names", measureNames, true},
	{"push", measurePush, true},
	{"sandboxes", measureSandboxes, true},
	{"agents", measureAgents, true},
}

func run(ctx context.Context) (err error) {
	all := flag.Bool("all", false, "measure every image of the corpus, also as new content, in more rounds")
	only := flag.String("only", "", "comma-separated parts to measure: convert, entries, index, sharing, cold, full, start, hits, replay, serve, burst, names, push, sandboxes, agents")
	printLive := flag.Bool("print-live", false, "print the figures of the parts full, start, hits, serve, names, push, sandboxes and agents without judging them")
	flag.Parse()
	b := &bench{all: *all, cache: os.Getenv("QUARRY_BENCH_CACHE"), spent: map[string]conversion{}}
	if b.cache == "" {
		b.cache = filepath.Join(os.Getenv("QUARRY_IMAGES"), "..", "bench")
	}
	if b.images, err = layouts(); err != nil {
		return err
	}
	if b.lab, err = lab.New(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.lab.Close()) }()
	for _, p := range parts {
		if *only != "" && !slices.Contains(strings.Split(*only, ","), p.name) {
			continue
		}
		b.lenient = *printLive && p.live
		if err := p.measure(ctx, b); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return errors.Join(b.failed...)
}

// report collects figures and the claims that do not hold.
type report struct {
	failed  []error
	lenient bool // a claim that does not hold is only printed
}

// figure prints a figure that has no limit.
func (r *report) figure(name, value string) { fmt.Printf("     %-66s %s\n", name, value) }

// atMost prints a figure with its limit.
func (r *report) atMost(name string, got, limit float64, unit string) {
	r.judge(name, got <= limit, fmt.Sprintf("%.3g %s (limit %.3g)", got, unit, limit))
}

// atLeast prints a figure with its lower limit.
func (r *report) atLeast(name string, got, limit float64, unit string) {
	r.judge(name, got >= limit, fmt.Sprintf("%.4g %s (at least %.4g)", got, unit, limit))
}

func (r *report) judge(name string, ok bool, value string) {
	word := "ok"
	switch {
	case !ok && r.lenient:
		word = "over"
	case !ok:
		word = "FAIL"
		r.failed = append(r.failed, fmt.Errorf("%s: %s", name, value))
	}
	fmt.Printf("%-4s %-66s %s\n", word, name, value)
}

func median[T float64 | int64](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
