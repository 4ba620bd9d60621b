package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
)

func newLogs() *cobra.Command {
	var node nodeTarget
	var follow bool
	c := &cobra.Command{
		Use:   "logs [--follow] SANDBOX [EXEC]",
		Short: "print the output of a command in a sandbox, or list its commands",
		Args:  rangeArgs(1, 2),
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 1 {
				return runListExecs(c.Context(), node, args[0], c.OutOrStdout())
			}
			return runLogs(c.Context(), node, args[0], args[1], follow, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	node.flags(c)
	c.Flags().BoolVarP(&follow, "follow", "f", false, "until the command ends")
	return c
}

func runListExecs(ctx context.Context, node nodeTarget, id string, stdout io.Writer) error {
	c, err := node.dial()
	if err != nil {
		return err
	}
	list, err := c.Execs(ctx, id)
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(stdout, 0, 8, 2, ' ', 0)
	fmt.Fprintln(w, "EXEC\tSTATE\tEXIT\tREASON\tSTARTED\tRAN\tSTDOUT B\tSTDERR B\tDROPPED B")
	for _, e := range list {
		exit := "-"
		if e.ExitCode != nil {
			exit = fmt.Sprint(*e.ExitCode)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\n", oneLine(e.ID), e.State, exit, e.Reason, e.Started.Format(time.TimeOnly),
			time.Duration(e.Ran)*time.Millisecond, e.Stdout.Kept, e.Stderr.Kept, e.Stdout.Dropped+e.Stderr.Dropped)
	}
	return w.Flush()
}

func runLogs(ctx context.Context, node nodeTarget, id, exec string, follow bool, stdout, stderr io.Writer) error {
	c, err := node.dial()
	if err != nil {
		return err
	}
	if follow {
		_, err := running{client: c, sandbox: id, exec: exec}.follow(ctx, stdout, stderr)
		return err
	}
	if _, err := c.Output(ctx, id, exec, "stdout", 0, stdout); err != nil {
		return err
	}
	if _, err = c.Output(ctx, id, exec, "stderr", 0, stderr); err != nil {
		return err
	}
	st, err := c.ExecState(ctx, id, exec, 0)
	if err != nil {
		return err
	}
	return tellDropped(st, stderr)
}
