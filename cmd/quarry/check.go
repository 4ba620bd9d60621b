package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"quarry/api"
)

func newCheck() *cobra.Command {
	var t target
	var quick, asJSON bool
	c := &cobra.Command{
		Use:   "check --data DIR",
		Short: "read and verify everything in a data folder",
		Long: `check reads every pack, layer record, bootstrap, config, statement and name of a data
folder and verifies it. It names what is damaged and which images that touches, and exits 3.
What is whole and waits for something, such as a signature, is a note and no damage. A damaged chunk is condemned: converting an image that has it stores it anew, and one that is
good again is taken back. A pack that is missing stays known: its chunks are read as soon as
it is back, or converting the images again stores them anew. --quick reads no chunk content.`,
		Args: exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := t.client(c.Context())
			if err != nil {
				return err
			}
			defer cl.Close()
			out := c.OutOrStdout()
			sum, err := cl.Check(c.Context(), api.CheckRequest{Quick: quick}, func(p api.Problem) {
				if asJSON {
					json.NewEncoder(out).Encode(p)
					return
				}
				kind := p.Kind
				if p.Note {
					kind = "note: " + kind
				}
				fmt.Fprintf(out, "%s: %s: %s\n", oneLine(kind), oneLine(p.Object), oneLine(p.Message))
				if len(p.Images) > 0 {
					fmt.Fprintf(out, "\ttouches %s\n", oneLine(strings.Join(p.Images, ", ")))
				}
			})
			if err != nil {
				return err
			}
			if asJSON {
				json.NewEncoder(out).Encode(map[string]any{"version": 1, "summary": sum})
			} else {
				fmt.Fprintf(out, "%d packs, %d chunks, %d bytes, %d images: %d problems\n", sum.Packs, sum.Chunks, sum.Bytes, sum.Images, sum.Problems)
			}
			if sum.Problems > 0 {
				return fmt.Errorf("%w: %d problems", errDamage, sum.Problems)
			}
			return nil
		},
	}
	t.flags(c)
	c.Flags().BoolVar(&quick, "quick", false, "verify structure only, read no chunk content")
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON document a line")
	return c
}

func newIndex() *cobra.Command {
	var t target
	c := &cobra.Command{Use: "index", Short: "work on the chunk index", Args: cobra.ArbitraryArgs, RunE: noCommand}
	rebuild := &cobra.Command{
		Use:   "rebuild --data DIR",
		Short: "make the chunk index anew from the journal and the packs",
		Long: `rebuild makes the chunk index anew from the journal and the packs. Chunks that are condemned
are read, and taken back where they are good again.`,
		Args: exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			cl, err := t.client(c.Context())
			if err != nil {
				return err
			}
			defer cl.Close()
			r, err := cl.Rebuild(c.Context())
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(c.OutOrStdout(), "%d packs, %d chunks\n", r.Packs, r.Chunks)
			return err
		},
	}
	t.flags(rebuild)
	c.AddCommand(rebuild)
	return c
}
