package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"quarry/api/access"
	"quarry/api/client"
	"quarry/store/image"
)

type removeOptions struct {
	olderThan string
	repo      string
	dryRun    bool
}

func newImagesRm(t *target) *cobra.Command {
	var o removeOptions
	c := &cobra.Command{
		Use:   "rm [NAME…] [--older-than 30d [--repo PREFIX]]",
		Short: "remove names; gc deletes the images later",
		Long: `rm removes names and prints each. --older-than removes all that have been bound to the image
they have now for longer than that, to the hour; --repo only those of repositories that are
PREFIX or below it. A name whose age is not known, because an older quarry bound it, is as old
as the first change that this one made. An image goes with its last name: gc keeps it for
--retain, and for as long as it is pinned or mounted.

Exit codes: 0 all were removed, also when --older-than found none; 1 one was not there or could
not be removed, the others are; 2 usage.`,
		Args: cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			return runImagesRm(c.Context(), t, o, args, c.OutOrStdout())
		},
	}
	f := c.Flags()
	f.StringVar(&o.olderThan, "older-than", "", "remove the names that were bound longer ago, such as 30d")
	f.StringVar(&o.repo, "repo", "", "with --older-than: only of this repository, or below it")
	f.BoolVar(&o.dryRun, "dry-run", false, "print the names, remove none")
	return c
}

func runImagesRm(ctx context.Context, t *target, o removeOptions, args []string, stdout io.Writer) error {
	switch {
	case o.olderThan == "" && len(args) == 0:
		return fmt.Errorf("%w: give names, or --older-than", errUsage)
	case o.olderThan != "" && len(args) > 0:
		return fmt.Errorf("%w: give names or --older-than, not both", errUsage)
	case o.repo != "" && o.olderThan == "":
		return fmt.Errorf("%w: --repo goes with --older-than", errUsage)
	}
	var refs []image.Ref
	for _, arg := range args {
		ref, err := image.ParseName(arg)
		if err != nil {
			return fmt.Errorf("%w: %w", errUsage, err)
		}
		refs = append(refs, ref)
	}
	var age time.Duration
	if o.olderThan != "" {
		var err error
		if age, err = parseAge(o.olderThan); err != nil {
			return fmt.Errorf("%w: --older-than: %w", errUsage, err)
		}
	}
	cl, err := t.client(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	if o.olderThan != "" {
		if refs, err = olderThan(ctx, cl, time.Now().Add(-age), o.repo); err != nil {
			return err
		}
	}
	return removeNames(ctx, cl, refs, o.dryRun, stdout)
}

// olderThan returns the names that were bound before that time.
func olderThan(ctx context.Context, cl *client.Client, before time.Time, repo string) ([]image.Ref, error) {
	repo = strings.TrimSuffix(repo, "/")
	names, err := cl.Names(ctx)
	if err != nil {
		return nil, err
	}
	var refs []image.Ref
	for _, n := range names {
		if (repo == "" || access.Covers(repo, n.Repo)) && n.Since != nil && n.Since.Before(before) {
			refs = append(refs, image.Ref{Repo: n.Repo, Tag: n.Tag})
		}
	}
	return refs, nil
}

func removeNames(ctx context.Context, cl *client.Client, refs []image.Ref, dryRun bool, stdout io.Writer) error {
	var errs []error
	for _, ref := range refs {
		if !dryRun {
			if err := cl.DeleteName(ctx, ref); err != nil {
				errs = append(errs, fmt.Errorf("%s: %w", ref, err))
				continue
			}
		}
		fmt.Fprintln(stdout, oneLine(ref.String()))
	}
	return errors.Join(errs...)
}

func newImagesPins(t *target) []*cobra.Command {
	one := func(use, short string, do func(*client.Client, context.Context, image.Ref) (fmt.Stringer, error)) *cobra.Command {
		return &cobra.Command{
			Use: use, Short: short, Args: exactArgs(1),
			RunE: func(c *cobra.Command, args []string) error {
				ref, err := parsePinned(args[0])
				if err != nil {
					return fmt.Errorf("%w: %w", errUsage, err)
				}
				cl, err := t.client(c.Context())
				if err != nil {
					return err
				}
				defer cl.Close()
				source, err := do(cl, c.Context(), ref)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintln(c.OutOrStdout(), source)
				return err
			},
		}
	}
	pin := one("pin NAME|@DIGEST", "keep an image, with a name or without, until unpin",
		func(cl *client.Client, ctx context.Context, ref image.Ref) (fmt.Stringer, error) {
			return cl.Pin(ctx, ref)
		})
	unpin := one("unpin NAME|@DIGEST", "keep an image no longer than its names",
		func(cl *client.Client, ctx context.Context, ref image.Ref) (fmt.Stringer, error) {
			return cl.Unpin(ctx, ref)
		})
	pins := &cobra.Command{
		Use: "pins", Short: "list the source digests that are pinned", Args: exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := t.client(c.Context())
			if err != nil {
				return err
			}
			defer cl.Close()
			sources, err := cl.Pins(c.Context())
			for _, d := range sources {
				fmt.Fprintln(c.OutOrStdout(), d)
			}
			return err
		},
	}
	return []*cobra.Command{pin, unpin, pins}
}

// parsePinned reads a name or a digest. With a digest the repository before it says
// nothing, so one is put there when there is none.
func parsePinned(s string) (image.Ref, error) {
	if strings.HasPrefix(s, "@") {
		s = "image" + s
	}
	return image.ParseRef(s)
}
