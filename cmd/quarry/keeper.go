package main

import (
	"context"
	"io"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"quarry/worker"
	"quarry/worker/folder"
)

// newKeeper is hidden: mounts start it by themselves.
func newKeeper() *cobra.Command {
	var dir string
	var f readerFlags
	c := &cobra.Command{
		Use:    "keeper --worker-dir DIR",
		Short:  "start the reader of a worker folder again when it ends, and clean up behind shims",
		Hidden: true,
		Args:   exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			return runKeeper(c.Context(), dir, f, c.ErrOrStderr())
		},
	}
	c.Flags().StringVar(&dir, "worker-dir", "", "worker folder")
	f.flags(c)
	return c
}

func runKeeper(ctx context.Context, dir string, f readerFlags, stderr io.Writer) error {
	d, err := folder.Open(dir)
	if err != nil {
		return err
	}
	// By its path: after an update that is the new program.
	self, err := os.Executable()
	if err != nil {
		return err
	}
	w := &worker.Worker{
		Dir: d, ReaderCommand: background(self, "reader", d, f), Log: slog.New(slog.NewJSONHandler(stderr, nil)),
	}
	return w.Keep(ctx)
}
