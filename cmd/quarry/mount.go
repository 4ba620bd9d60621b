package main

import (
	"context"
	"io"

	"github.com/spf13/cobra"
)

func newMount() *cobra.Command {
	var w workerFlags
	c := &cobra.Command{
		Use:   "mount IMAGE DIR",
		Short: "mount an image on an empty folder, read lazily",
		Long: `mount verifies the image and mounts it read-only, nosuid and nodev on DIR. It returns
when the mount is there; file content is read from the store when it is touched. A read
that cannot be answered with the right bytes fails with EIO.`,
		Args: exactArgs(2),
		RunE: func(c *cobra.Command, args []string) error {
			return runMount(c.Context(), w, args[0], args[1], c.ErrOrStderr())
		},
	}
	w.mountFlags(c)
	return c
}

func runMount(ctx context.Context, w workerFlags, name, dir string, stderr io.Writer) error {
	wk, err := w.worker(ctx, stderr)
	if err != nil {
		return err
	}
	im, err := startImage(ctx, &w, wk, name, false)
	defer im.end()
	if err == nil {
		err = wk.MountAt(ctx, im.Image, dir)
	}
	if err == nil {
		im.await(ctx, handTime)
	}
	return err
}

func newUmount() *cobra.Command {
	var w workerFlags
	c := &cobra.Command{
		Use:   "umount DIR",
		Short: "end a mount made by quarry mount",
		Args:  exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			wk, err := w.worker(c.Context(), c.ErrOrStderr())
			if err != nil {
				return err
			}
			return wk.UnmountAt(c.Context(), args[0])
		},
	}
	w.dirFlag(c)
	return c
}
