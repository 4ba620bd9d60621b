package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"quarry/api/access"
)

// tokenFile says which tokens a command is about.
type tokenFile struct{ data, file string }

func (t *tokenFile) flags(c *cobra.Command) {
	c.Flags().StringVar(&t.data, "data", "", "data folder whose tokens these are, in keys/tokens.json (env QUARRY_DATA)")
	c.Flags().StringVar(&t.file, "tokens", "", "tokens file, in place of a data folder's")
}

func (t tokenFile) open() (*access.File, error) {
	if t.data == "" && t.file == "" {
		t.data = os.Getenv("QUARRY_DATA")
	}
	switch {
	case t.data != "" && t.file != "":
		return nil, fmt.Errorf("%w: give --data or --tokens, not both", errUsage)
	case t.file != "":
		return access.Open(t.file, nil), nil
	case t.data != "":
		d, err := openDataDir(t.data)
		return access.Open(d.tokens(), nil), err
	}
	return nil, fmt.Errorf("%w: give --data DIR, or --tokens FILE", errUsage)
}

func newToken() *cobra.Command {
	c := &cobra.Command{
		Use:   "token",
		Short: "make, list and remove the tokens that quarry serve asks for",
		Long: `A token lets whoever has it do what its scopes say: pull (read), push (store images, move and
delete names), trace (send what a run touched), run (make, use and end the sandboxes of a
worker), admin (everything). A server that runs sees
a change within a second; read-only nodes are given the same file with --tokens.`,
		Args: cobra.ArbitraryArgs,
		RunE: noCommand,
	}
	c.AddCommand(newTokenCreate(), newTokenList(), newTokenRemove())
	return c
}

type tokenOptions struct {
	file    tokenFile
	scopes  string
	repos   []string
	expires time.Duration
	label   string
}

func newTokenCreate() *cobra.Command {
	var o tokenOptions
	c := &cobra.Command{
		Use:   "create --scope SCOPE[,SCOPE…] [--repo PREFIX]… [--expires 720h] [--label TEXT]",
		Short: "make a token and print it, once",
		Long: `create prints the token on stdout, and what it is for on stderr. Only its SHA-256 is kept:
what is not stored now cannot be had again. --repo team/ covers team and team/x, not teamwork;
without it the token is for all repositories. Whoever pushes needs pull,push.`,
		Args: exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			return runTokenCreate(c.Context(), o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	o.file.flags(c)
	c.Flags().StringVar(&o.scopes, "scope", "", "pull, push, trace, run, admin, with commas between")
	c.Flags().StringArrayVar(&o.repos, "repo", nil, "repository, or the first components of several; may be repeated")
	c.Flags().DurationVar(&o.expires, "expires", 0, "how long the token is good, such as 720h; 0 is until it is removed")
	c.Flags().StringVar(&o.label, "label", "", "a remark for token ls")
	return c
}

func runTokenCreate(ctx context.Context, o tokenOptions, stdout, stderr io.Writer) error {
	if o.scopes == "" {
		return usageError("token create needs --scope, such as --scope pull,push")
	}
	var t access.Token
	var err error
	if t.Scopes, err = access.ParseScopes(o.scopes); err != nil {
		return fmt.Errorf("%w: --scope: %w", errUsage, err)
	}
	for _, text := range o.repos {
		repo, err := access.ParseRepo(text)
		if err != nil {
			return fmt.Errorf("%w: --repo: %w", errUsage, err)
		}
		t.Repos = append(t.Repos, repo)
	}
	if o.expires < 0 {
		return usageError(fmt.Sprintf("--expires %s is over already", o.expires))
	}
	if o.expires > 0 {
		end := time.Now().UTC().Add(o.expires).Truncate(time.Second)
		t.Expires = &end
	}
	t.Label = o.label
	if err := t.Check(); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	file, err := o.file.open()
	if err != nil {
		return err
	}
	t, secret, err := file.Create(ctx, t)
	if err != nil {
		return err
	}
	fmt.Fprintf(stderr, "token %s: %s\n", t.ID, describeToken(t))
	_, err = fmt.Fprintln(stdout, secret.Reveal())
	return err
}

// describeToken says in one line what a token is for.
func describeToken(t access.Token) string {
	text := scopeText(t) + " in " + repoText(t)
	if t.Expires != nil {
		text += ", until " + t.Expires.Format(time.RFC3339)
	}
	return text
}

func scopeText(t access.Token) string {
	words := make([]string, len(t.Scopes))
	for i, s := range t.Scopes {
		words[i] = string(s)
	}
	return strings.Join(words, ",")
}

func repoText(t access.Token) string {
	if len(t.Repos) == 0 {
		return "all repositories"
	}
	return strings.Join(t.Repos, ",")
}

func newTokenList() *cobra.Command {
	var file tokenFile
	var asJSON bool
	c := &cobra.Command{
		Use:   "ls",
		Short: "list the tokens, without their secrets",
		Args:  exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error {
			return runTokenList(file, asJSON, c.OutOrStdout())
		},
	}
	file.flags(c)
	c.Flags().BoolVar(&asJSON, "json", false, "print the list as JSON")
	return c
}

// tokenInfo is one token in token ls --json.
type tokenInfo struct {
	ID      string         `json:"id"`
	Scopes  []access.Scope `json:"scopes"`
	Repos   []string       `json:"repos"` // none: all
	Label   string         `json:"label"`
	Created time.Time      `json:"created"`
	Expires *time.Time     `json:"expires"`
	Expired bool           `json:"expired"`
}

func runTokenList(from tokenFile, asJSON bool, stdout io.Writer) error {
	file, err := from.open()
	if err != nil {
		return err
	}
	tokens, err := file.List()
	if err != nil {
		return err
	}
	now := time.Now()
	if asJSON {
		list := make([]tokenInfo, len(tokens))
		for i, t := range tokens {
			list[i] = tokenInfo{t.ID, t.Scopes, append([]string{}, t.Repos...), t.Label, t.Created, t.Expires, t.Expired(now)}
		}
		return json.NewEncoder(stdout).Encode(map[string]any{"version": 1, "tokens": list})
	}
	w := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "ID\tSCOPES\tREPOSITORIES\tEXPIRES\tLABEL")
	for _, t := range tokens {
		end := "never"
		switch {
		case t.Expired(now):
			end = "has expired"
		case t.Expires != nil:
			end = t.Expires.Format(time.RFC3339)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", t.ID, scopeText(t), repoText(t), end, oneLine(t.Label))
	}
	return w.Flush()
}

func newTokenRemove() *cobra.Command {
	var file tokenFile
	c := &cobra.Command{
		Use:   "rm ID…",
		Short: "remove tokens: whoever has one is refused from now on",
		Args: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usage(c, fmt.Errorf("no ID given: quarry token ls shows them"))
			}
			return nil
		},
		RunE: func(c *cobra.Command, args []string) error {
			f, err := file.open()
			if err != nil {
				return err
			}
			for _, id := range args {
				if err := f.Remove(c.Context(), id); err != nil {
					return err
				}
			}
			return nil
		},
	}
	file.flags(c)
	return c
}

func (d dataDir) tokens() string    { return filepath.Join(d.keys(), "tokens.json") }
func (d dataDir) bearerKey() string { return filepath.Join(d.keys(), "bearer.key") }
