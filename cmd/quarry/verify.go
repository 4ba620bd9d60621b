package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"quarry/api/client"
	"quarry/converter/proof"
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
name, and that the bootstrap has the tree digest. --deep repeats the proof that convert made
before it published: it reads the content of every file through the device that a worker
mounts, and prints a line on stderr for every file whose content is missing or not right.
Exit code 3 says that there is damage.`,
		Args: exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return runVerify(c.Context(), t, args[0], platform, deep, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	t.flags(c)
	c.Flags().StringVar(&platform, "platform", "", "OS/ARCH[/VARIANT]; default is this machine's")
	c.Flags().BoolVar(&deep, "deep", false, "read and verify all content")
	return c
}

// verifiedImage asks the store for an image's statements and verifies them.
func verifiedImage(ctx context.Context, t target, name, platform string) (*image.Verified, error) {
	v, _, err := verifiedStatus(ctx, t, name, platform)
	return v, err
}

// verifiedStatus is verifiedImage with what the store says of the newest
// conversion when that failed, nil when it did not.
func verifiedStatus(ctx context.Context, t target, name, platform string) (*image.Verified, *image.Failure, error) {
	w := workerFlags{target: t, platform: platform}
	ref, p, err := w.wanted(name)
	if err != nil {
		return nil, nil, err
	}
	c, err := t.client(ctx)
	if err != nil {
		return nil, nil, err
	}
	defer c.Close()
	trust, err := t.trusted()
	if err != nil {
		return nil, nil, err
	}
	status, err := c.Image(ctx, ref, p)
	if err != nil {
		return nil, nil, err
	}
	v, err := image.Verify(status.Image, status.Name, image.Want{Ref: ref, Platform: p, Trust: trust, Now: time.Now()})
	return v, status.Failure, err
}

// storedTree returns the verified tree of a stored image and a client for its
// chunks, which the caller closes.
func storedTree(ctx context.Context, t target, name, platform string) (*image.Verified, *rafs.Image, *client.Client, error) {
	v, boot, c, err := storedBootstrap(ctx, t, name, platform)
	if err != nil {
		return nil, nil, nil, err
	}
	im, err := decodeVerified(boot, v)
	if err != nil {
		c.Close()
		return nil, nil, nil, err
	}
	return v, im, c, nil
}

// storedBootstrap returns the bootstrap of a stored image, whose digest is the
// one in the verified statement, and a client, which the caller closes.
func storedBootstrap(ctx context.Context, t target, name, platform string) (*image.Verified, []byte, *client.Client, error) {
	v, err := verifiedImage(ctx, t, name, platform)
	if err != nil {
		return nil, nil, nil, err
	}
	c, err := t.client(ctx)
	if err != nil {
		return nil, nil, nil, err
	}
	boot, err := c.Bootstrap(ctx, v.Statement.Bootstrap, v.Statement.BootstrapSize)
	if err != nil {
		c.Close()
		return nil, nil, nil, lost(err)
	}
	return v, boot, c, nil
}

func decodeVerified(boot []byte, v *image.Verified) (*rafs.Image, error) {
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

func runVerify(ctx context.Context, t target, name, platform string, deep bool, stdout, stderr io.Writer) error {
	v, boot, c, err := storedBootstrap(ctx, t, name, platform)
	if err != nil {
		return err
	}
	defer c.Close()
	if _, err := c.Config(ctx, v.Statement.Config); err != nil {
		return lost(err)
	}
	show := func() error {
		_, err := fmt.Fprintf(stdout, "image id    %s\nsource      %s\nplatform    %s\nconverter   %s\ntree        %s\nsigned by   %s\n",
			v.ID, v.Statement.Source, oneLine(v.Statement.Platform.String()), oneLine(v.Statement.Converter), v.Statement.Tree, v.KeyID)
		return err
	}
	if !deep {
		if _, err := decodeVerified(boot, v); err != nil {
			return err
		}
		return show()
	}
	bad := map[chunk.Digest]error{}
	res, err := proof.Run(ctx, proof.Config{
		Bootstrap: boot, Tree: v.Statement.Tree, Chunks: c,
		Bad: func(e *proof.ContentError) { bad[e.Chunk] = e.Err },
	})
	if errors.Is(err, proof.ErrTree) || errors.As(err, new(*rafs.FormatError)) {
		return fmt.Errorf("%w: bootstrap %s: %w", errDamage, v.Statement.Bootstrap, err)
	}
	if err != nil && !errors.Is(err, proof.ErrBad) {
		return lost(err)
	}
	if err := show(); err != nil {
		return err
	}
	if err != nil {
		return damagedFiles(stderr, boot, bad)
	}
	_, err = fmt.Fprintf(stdout, "content     %d chunks read and verified, %d bytes\n", res.Chunks, res.Bytes)
	return err
}

// damagedFiles prints every file that has a bad chunk, and returns what it comes
// to: damage, unless nothing more is known than that the store cannot be asked.
func damagedFiles(stderr io.Writer, boot []byte, bad map[chunk.Digest]error) error {
	im, err := rafs.Decode(boot)
	if err != nil {
		return err
	}
	files, damaged := 0, false
	var last error
	im.Walk(func(path string, n *rafs.Inode) error { // which returns only nil
		for k, d := range n.Chunks {
			err, isBad := bad[d]
			if !isBad {
				continue
			}
			err = lost(err)
			files, last, damaged = files+1, err, damaged || isDamage(err)
			fmt.Fprintf(stderr, "%s: at byte %d: %s\n", oneLine(path), int64(k)*int64(im.ChunkSize), oneLine(err.Error()))
			break
		}
		return nil
	})
	err = fmt.Errorf("%d files have content that is missing or not right", files)
	if damaged {
		return fmt.Errorf("%w: %w: convert the image again", errDamage, err)
	}
	return fmt.Errorf("%w: %w", err, last)
}
