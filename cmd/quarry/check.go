package main

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"quarry/api"
	"quarry/api/client"
	"quarry/worker/folder"
)

func newCheck() *cobra.Command {
	var t target
	var asJSON bool
	var o repairOptions
	c := &cobra.Command{
		Use:   "check --data DIR [--repair --from URL]",
		Short: "read and verify everything in a data folder",
		Long: `check reads every pack, layer record, bootstrap, config, statement and name of a data
folder and verifies it. It names what is damaged and which images that touches, and exits 3.
What is whole and waits for something, such as a signature, is a note and no damage. A damaged chunk is condemned: converting an image that has it stores it anew, and one that is
good again is taken back. A pack that is missing stays known: its chunks are read as soon as
it is back, or converting the images again stores them anew. --quick reads no chunk content.

--repair --from URL fetches the chunks that images lack then from another store node, which
has the same images, compares each with its digest, stores them in new packs, and checks again.
It says which chunks that node does not have either. What else is damaged is not fetched: a
bootstrap, config or statement is made anew by converting the image again. The process that
owns the data folder speaks to the other node, not this command.

Exit codes: 0 nothing is damaged, or not any more; 1 not all could be checked, or the other
node was not to be reached; 2 usage; 3 damage is left.`,
		Args: exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			req, err := o.request()
			if err != nil {
				return err
			}
			cl, err := t.client(c.Context())
			if err != nil {
				return err
			}
			defer cl.Close()
			out := c.OutOrStdout()
			sum, err := cl.Check(c.Context(), req, func(p api.Problem) {
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
			if !asJSON && sum.Repaired+sum.Unrepaired > 0 {
				fmt.Fprintf(out, "%d chunks, %d bytes repaired; %d not\n", sum.Repaired, sum.RepairedBytes, sum.Unrepaired)
			}
			if sum.Problems > 0 {
				return fmt.Errorf("%w: %d problems", errDamage, sum.Problems)
			}
			return nil
		},
	}
	t.flags(c)
	o.flags(c.Flags())
	c.Flags().BoolVar(&asJSON, "json", false, "print a JSON document a line")
	return c
}

// repairOptions are the flags of check.
type repairOptions struct {
	quick, repair       bool
	from, tokenFile, ca string
}

func (o *repairOptions) flags(f *pflag.FlagSet) {
	f.BoolVar(&o.quick, "quick", false, "verify structure only, read no chunk content")
	f.BoolVar(&o.repair, "repair", false, "store the chunks anew that images lack; needs --from")
	f.StringVar(&o.from, "from", "", "with --repair: URL of a store node that has them")
	f.StringVar(&o.tokenFile, "from-token-file", "", "file with the token for --from, of scope pull")
	f.StringVar(&o.ca, "from-ca", "", "certificates (PEM) that an https --from is held against, in place of the system's")
}

// request is what they ask for. The files are read here: the server may be elsewhere.
func (o repairOptions) request() (api.CheckRequest, error) {
	req := api.CheckRequest{Quick: o.quick, From: o.from}
	switch {
	case o.repair != (o.from != ""):
		return req, fmt.Errorf("%w: --repair and --from URL go together", errUsage)
	case !o.repair && o.tokenFile+o.ca != "":
		return req, fmt.Errorf("%w: --from-token-file and --from-ca go with --from", errUsage)
	case o.repair && o.quick:
		return req, fmt.Errorf("%w: --repair reads everything, so it does not go with --quick", errUsage)
	}
	if o.tokenFile != "" {
		tok, err := client.FileToken(o.tokenFile)
		if err == nil {
			req.FromToken, err = tok.Text()
		}
		if err != nil {
			return req, err
		}
	}
	if o.ca != "" {
		pem, err := folder.ReadBounded(o.ca, maxCA)
		if err != nil {
			return req, fmt.Errorf("--from-ca: %w", err)
		}
		req.FromCA = string(pem)
	}
	return req, nil
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
