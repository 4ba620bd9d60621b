package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"quarry/worker/sandbox"
)

type psOptions struct {
	node   nodeTarget
	labels []string
	group  string
	all    bool
	asJSON bool
}

func newPs() *cobra.Command {
	var o psOptions
	c := &cobra.Command{
		Use:   "ps [--all] [--label K=V]… [--group G]",
		Short: "list the sandboxes of a worker",
		Args:  exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			return runPs(c.Context(), o, c.OutOrStdout())
		},
	}
	o.node.flags(c)
	f := c.Flags()
	f.BoolVarP(&o.all, "all", "a", false, "those that have ended, too, with how")
	f.StringArrayVar(&o.labels, "label", nil, "only those with this label, K=V; may be repeated")
	f.StringVar(&o.group, "group", "", "only those of this group")
	f.BoolVar(&o.asJSON, "json", false, "print JSON, one document a line")
	return c
}

func runPs(ctx context.Context, o psOptions, stdout io.Writer) error {
	f := sandbox.Filter{Group: o.group, Labels: map[string]string{}}
	for _, text := range o.labels {
		k, v, ok := strings.Cut(text, "=")
		if !ok {
			return fmt.Errorf("%w: --label %q: want K=V", errUsage, text)
		}
		f.Labels[k] = v
	}
	c, err := o.node.dial()
	if err != nil {
		return err
	}
	list, err := c.List(ctx, f)
	if err == nil && o.all {
		var ended []sandbox.Sandbox
		f.State = sandbox.StateEnded
		ended, err = c.List(ctx, f)
		list = append(list, ended...)
	}
	if err != nil {
		return err
	}
	slices.SortFunc(list, func(a, b sandbox.Sandbox) int { return cmp.Or(a.Created.Compare(b.Created), cmp.Compare(a.ID, b.ID)) })
	if o.asJSON {
		enc := json.NewEncoder(stdout)
		for _, sb := range list {
			if err := enc.Encode(sb); err != nil {
				return err
			}
		}
		return nil
	}
	w := tabwriter.NewWriter(stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "SANDBOX\tSTATE\tAGE\tIMAGE\tEND")
	for _, sb := range list {
		end := ""
		if sb.End != nil {
			end = sb.End.Reason + ": " + sb.End.Message
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", oneLine(sb.ID), sb.State, time.Since(sb.Created).Round(time.Second), oneLine(sb.Image), oneLine(end))
	}
	return w.Flush()
}

func newStats() *cobra.Command {
	var node nodeTarget
	c := &cobra.Command{
		Use:   "stats [SANDBOX…]",
		Short: "print what sandboxes of a worker use now",
		Args:  cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, ids []string) error {
			return runStats(c.Context(), node, ids, c.OutOrStdout())
		},
	}
	node.flags(c)
	return c
}

func runStats(ctx context.Context, node nodeTarget, ids []string, stdout io.Writer) error {
	c, err := node.dial()
	if err != nil {
		return err
	}
	all := len(ids) == 0
	if all {
		list, err := c.List(ctx, sandbox.Filter{})
		if err != nil {
			return err
		}
		for _, sb := range list {
			ids = append(ids, sb.ID)
		}
	}
	w := tabwriter.NewWriter(stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "SANDBOX\tMEMORY MiB\tLIMIT MiB\tCPU s\tPROCESSES\tDISK MiB\tOUTPUT KiB\tIMAGE ERRORS")
	for _, id := range ids {
		u, err := c.Usage(ctx, id)
		if all && (errors.Is(err, sandbox.ErrEnded) || errors.Is(err, sandbox.ErrUnknown) || errors.Is(err, sandbox.ErrNotReady)) {
			continue // since it was listed
		}
		if err != nil {
			return err
		}
		fmt.Fprintf(w, "%s\t%.1f\t%.1f\t%.2f\t%d\t%.1f\t%.1f\t%d\n", oneLine(id), mib(u.MemoryBytes), mib(u.MemoryLimit),
			float64(u.CPUMicros)/1e6, u.PIDs, mib(u.DiskBytes), float64(u.OutputBytes)/1024, u.ImageErrors)
	}
	return w.Flush()
}

func mib(n int64) float64 { return float64(n) / (1 << 20) }
