package main

import (
	"bufio"
	"context"
	"io"
	"os"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"quarry/converter/tree"
)

func newExport() *cobra.Command {
	var t target
	var platform string
	c := &cobra.Command{
		Use:   "export IMAGE > FILE.tar",
		Short: "write an image's files as a tar archive",
		Long: `export verifies the image and writes its tree to stdout as a PAX tar, in bytewise path
order, every chunk verified. A read error ends it non-zero and without the archive's end
blocks, so that no tool takes it for complete.`,
		Args: exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			return runExport(c.Context(), t, args[0], platform, c.OutOrStdout())
		},
	}
	t.flags(c)
	c.Flags().StringVar(&platform, "platform", "", "OS/ARCH[/VARIANT]; default is this machine's")
	return c
}

func runExport(ctx context.Context, t target, name, platform string, stdout io.Writer) error {
	if f, ok := stdout.(*os.File); ok && term.IsTerminal(int(f.Fd())) {
		return usageError("a tar archive does not go to a terminal: quarry export IMAGE > FILE.tar")
	}
	_, im, c, err := storedTree(ctx, t, name, platform)
	if err != nil {
		return err
	}
	defer c.Close()
	out := bufio.NewWriterSize(stdout, 1<<20)
	if err := tree.Export(ctx, out, im.Tree, c); err != nil {
		return lost(err)
	}
	return out.Flush()
}
