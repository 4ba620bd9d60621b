package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"quarry/api/client"
	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
)

func newVerify() *cobra.Command {
	var t target
	var platform string
	var deep bool
	c := &cobra.Command{
		Use:   "verify [--deep] IMAGE",
		Short: "verify an image's signatures, bootstrap and, with --deep, all content",
		Long: `verify checks the statements' signatures, that config and bootstrap are the ones they
name, and that the bootstrap has the tree digest. --deep reads every chunk as well.`,
		Args: exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return runVerify(c.Context(), t, args[0], platform, deep, c.OutOrStdout())
		},
	}
	t.flags(c)
	c.Flags().StringVar(&platform, "platform", "", "OS/ARCH[/VARIANT]; default is this machine's")
	c.Flags().BoolVar(&deep, "deep", false, "read and verify every chunk")
	return c
}

// verifiedImage asks the store for an image's statements and verifies them.
func verifiedImage(ctx context.Context, t target, name, platform string) (*image.Verified, error) {
	w := workerFlags{target: t, platform: platform}
	ref, p, err := w.wanted(name)
	if err != nil {
		return nil, err
	}
	c, err := t.client(ctx)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	trust, err := t.trusted()
	if err != nil {
		return nil, err
	}
	nameEnv, stmtEnv, err := c.Image(ctx, ref, p)
	if err != nil {
		return nil, err
	}
	return image.Verify(stmtEnv, nameEnv, image.Want{Ref: ref, Platform: p, Trust: trust, Now: time.Now()})
}

// storedTree returns the verified tree of a stored image and a client for its
// chunks, which the caller closes.
func storedTree(ctx context.Context, t target, name, platform string) (*image.Verified, *rafs.Image, *client.Client, error) {
	v, err := verifiedImage(ctx, t, name, platform)
	if err != nil {
		return nil, nil, nil, err
	}
	c, err := t.client(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	im, err := decodeVerified(ctx, c, v)
	if err != nil {
		c.Close()
		return nil, nil, nil, err
	}
	return v, im, c, nil
}

func decodeVerified(ctx context.Context, c *client.Client, v *image.Verified) (*rafs.Image, error) {
	boot, err := c.Bootstrap(ctx, v.Statement.Bootstrap, v.Statement.BootstrapSize)
	if err != nil {
		return nil, lost(err)
	}
	im, err := rafs.Decode(boot)
	if err != nil {
		return nil, fmt.Errorf("%w: bootstrap %s: %w", errDamage, v.Statement.Bootstrap, err)
	}
	if got := tree.Digest(im.Tree); got != v.Statement.Tree {
		return nil, fmt.Errorf("%w: bootstrap %s has tree digest %s, the image statement says %s", errDamage, v.Statement.Bootstrap, got, v.Statement.Tree)
	}
	return im, nil
}

// lost says of an error about a part of a stored image what to do. A part that
// is not there is damage too: a chunk that was found to be damaged is condemned,
// and not found from then on.
func lost(err error) error {
	switch {
	case errors.Is(err, store.ErrNotFound) || errors.Is(err, bucket.ErrNotFound):
		return fmt.Errorf("%w: %w: convert the image again", errDamage, err)
	case errors.As(err, new(*store.CorruptError)):
		return fmt.Errorf("%w: convert the image again", err)
	}
	return err
}

func runVerify(ctx context.Context, t target, name, platform string, deep bool, stdout io.Writer) error {
	v, im, c, err := storedTree(ctx, t, name, platform)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Config(ctx, v.Statement.Config); err != nil {
		return lost(err)
	}
	fmt.Fprintf(stdout, "image id    %s\nsource      %s\nplatform    %s\ntree        %s\nsigned by   %s\n",
		v.ID, v.Statement.Source, v.Statement.Platform, v.Statement.Tree, v.KeyID)
	if !deep || im.Blob == nil {
		return nil
	}
	n, err := readAll(ctx, c, im)
	if err != nil {
		return lost(err)
	}
	_, err = fmt.Fprintf(stdout, "content     %d chunks read and verified\n", n)
	return err
}

// verifyBatch is the number of chunks asked for at once: 16 MiB at the default
// chunk size.
const verifyBatch = 64

// readAll reads every chunk of an image and fails with the files of the first
// that is not right.
func readAll(ctx context.Context, c *client.Client, im *rafs.Image) (int, error) {
	digests := make([]chunk.Digest, 0, verifyBatch)
	n := 0
	flush := func() error {
		err := c.GetBatch(ctx, digests, func(d chunk.Digest, _ []byte, err error) error {
			if err != nil {
				return fmt.Errorf("%w (used by %s)", err, firstUser(im, d))
			}
			n++
			return nil
		})
		digests = digests[:0]
		return err
	}
	for _, ch := range im.Blob.Chunks {
		if digests = append(digests, ch.Digest); len(digests) == verifyBatch {
			if err := flush(); err != nil {
				return n, err
			}
		}
	}
	return n, flush()
}

// firstUser returns the first path whose file has the chunk.
func firstUser(im *rafs.Image, d chunk.Digest) string {
	user := "no file"
	im.Walk(func(path string, n *rafs.Inode) error {
		for _, have := range n.Chunks {
			if have == d {
				user = path
				return errFound
			}
		}
		return nil
	})
	return user
}

var errFound = fmt.Errorf("found")
