package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"quarry/converter"
	"quarry/converter/oci"
	"quarry/converter/tree"
	"quarry/rafs"
	"quarry/store/chunk"
)

func newTreeDigest() *cobra.Command {
	var t target
	var platform string
	var size int64
	c := &cobra.Command{
		Use:   "treedigest SRC|DIR|IMAGE",
		Short: "print the tree digest of a source, a folder or a stored image",
		Long: `treedigest prints one digest over every path, its metadata and content. A folder on
disk (its path begins with / or a dot, such as ./rootfs), a mounted image, the stored image
and the OCI image it was made of (SRC as convert takes it) have the same digest when they
are the same tree.`,
		Args: exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return runTreeDigest(c.Context(), t, args[0], platform, size, c.OutOrStdout())
		},
	}
	t.flags(c)
	c.Flags().StringVar(&platform, "platform", "", "OS/ARCH[/VARIANT]; default is this machine's")
	c.Flags().Int64Var(&size, "chunk-size", chunk.DefaultSize, "chunk size of the digest of a source or folder, in bytes")
	return c
}

func runTreeDigest(ctx context.Context, t target, what, platform string, size int64, stdout io.Writer) error {
	tr, err := treeOf(ctx, t, what, platform, size)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(stdout, tree.Digest(tr))
	return err
}

func treeOf(ctx context.Context, t target, what, platform string, size int64) (*rafs.Tree, error) {
	if !chunk.ValidSize(size) {
		return nil, usageError(fmt.Sprintf("--chunk-size %d: want a power of two from %d to %d", size, chunk.MinSize, chunk.MaxSize))
	}
	// A name cannot begin so; what exists in this folder must not change the answer.
	if strings.HasPrefix(what, "/") || strings.HasPrefix(what, ".") {
		return tree.FromDir(ctx, what, uint32(size))
	}
	if oci.IsSource(what) {
		if err := oci.CheckSource(what); err != nil {
			return nil, fmt.Errorf("%w: %w", errUsage, err)
		}
		p, err := platformFlag(platform)
		if err != nil {
			return nil, err
		}
		return converter.SourceTree(ctx, what, p, uint32(size))
	}
	_, im, c, err := storedTree(ctx, t, what, platform)
	if err != nil {
		return nil, err
	}
	c.Close()
	return im.Tree, nil
}
