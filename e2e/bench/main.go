// Command bench measures what quarry claims about speed and memory, each as a
// ratio to a peer or a limit in the same run, and fails when one does not hold.
// make bench runs it.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"

	"quarry/e2e/lab"
)

// rounds is the number of interleaved runs a median is taken of.
const rounds = 5

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// report collects figures and the claims that do not hold.
type report struct{ failed []error }

// figure prints a figure that has no limit.
func (r *report) figure(name, value string) { fmt.Printf("     %-62s %s\n", name, value) }

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
	if !ok {
		word = "FAIL"
		r.failed = append(r.failed, fmt.Errorf("%s: %s", name, value))
	}
	fmt.Printf("%-4s %-62s %s\n", word, name, value)
}

func run(ctx context.Context) (err error) {
	first, second, err := lab.DebianImages()
	if err != nil {
		return err
	}
	l, err := lab.New()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	r := &report{}
	for _, part := range []func(context.Context, *report, *lab.Lab, string, string) error{
		measureConvert, measureSharing, measureCold,
	} {
		if err := part(ctx, r, l, first, second); err != nil {
			return err
		}
	}
	return errors.Join(r.failed...)
}

func median[T float64 | int64](values []T) T {
	sorted := slices.Sorted(slices.Values(values))
	return sorted[len(sorted)/2]
}
