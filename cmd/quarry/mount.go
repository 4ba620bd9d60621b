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
	log := warnings(stderr)
	m, err := w.mounter(log)
	if err != nil {
		return err
	}
	if err := m.Sweep(ctx); err != nil {
		log.WarnContext(ctx, "leftovers of a killed process stay", "err", err)
	}
	im, _, err := fetchImage(ctx, &w, m.Dir, name, log)
	if err != nil {
		return err
	}
	return m.MountAt(ctx, im, dir)
}

func newUmount() *cobra.Command {
	var w workerFlags
	c := &cobra.Command{
		Use:   "umount DIR",
		Short: "end a mount made by quarry mount",
		Args:  exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			m, err := w.mounter(warnings(c.ErrOrStderr()))
			if err != nil {
				return err
			}
			return m.UnmountAt(c.Context(), args[0])
		},
	}
	w.dirFlag(c)
	return c
}
