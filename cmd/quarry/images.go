package main

import (
	"encoding/json"
	"fmt"
	"text/tabwriter"

	"github.com/spf13/cobra"
)

func newImages() *cobra.Command {
	var t target
	var asJSON bool
	list := func(c *cobra.Command, _ []string) error {
		cl, err := t.client(c.Context())
		if err != nil {
			return err
		}
		defer cl.Close()
		names, err := cl.Names(c.Context())
		if err != nil {
			return err
		}
		if asJSON {
			return json.NewEncoder(c.OutOrStdout()).Encode(map[string]any{"version": 1, "names": names})
		}
		w := tabwriter.NewWriter(c.OutOrStdout(), 0, 8, 2, ' ', 0)
		for _, n := range names {
			fmt.Fprintf(w, "%s\t%s\n", oneLine(n.Repo+":"+n.Tag), n.Source)
		}
		return w.Flush()
	}
	c := &cobra.Command{
		Use:   "images [ls|show|rm|pin|unpin|pins]",
		Short: "list, show, remove and pin the images of a store",
		Args:  exactArgs(0),
		RunE:  list,
	}
	ls := &cobra.Command{Use: "ls", Short: "list names and source digests", Args: exactArgs(0), RunE: list}
	show := newImagesShow(&t)
	rm := newImagesRm(&t)
	pins := newImagesPins(&t)
	for _, sub := range append([]*cobra.Command{c, ls, show, rm}, pins...) {
		t.flags(sub)
	}
	for _, sub := range []*cobra.Command{c, ls} {
		sub.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	}
	c.AddCommand(append(pins, ls, show, rm)...)
	return c
}

func newImagesShow(t *target) *cobra.Command {
	var platform string
	c := &cobra.Command{
		Use:   "show IMAGE",
		Short: "print the verified statements of an image as JSON",
		Long: `show prints the verified statements of an image. When the newest conversion of the name
did not end well it prints why as "failure", beside the statements of the image that the name
still has; that part is the store's word alone.`,
		Args: exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			v, failure, err := verifiedStatus(c.Context(), *t, args[0], platform)
			if err != nil {
				return err
			}
			doc := map[string]any{
				"version": 1, "image_id": v.ID, "key_id": v.KeyID, "statement": v.Statement, "name": v.Name,
			}
			if failure != nil {
				doc["failure"] = failure
			}
			text, err := json.MarshalIndent(doc, "", "  ")
			if err == nil {
				_, err = c.OutOrStdout().Write(append(printableJSON(text), '\n'))
			}
			return err
		},
	}
	c.Flags().StringVar(&platform, "platform", "", "OS/ARCH[/VARIANT]; default is this machine's")
	return c
}
