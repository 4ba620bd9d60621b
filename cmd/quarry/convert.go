package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"quarry/api"
	"quarry/converter/oci"
	"quarry/store/chunk"
	"quarry/store/image"
)

type convertOptions struct {
	target   target
	source   string
	name     string
	platform string
	json     bool
	limits   limits
}

func newConvert() *cobra.Command {
	o := convertOptions{target: target{create: true}}
	c := &cobra.Command{
		Use:   "convert SRC --name REPO[:TAG] --data DIR",
		Short: "convert an OCI image into a data folder",
		Long: `convert reads an OCI image, stores its new chunks and publishes it under --name. SRC is

  oci:DIR[:TAG|@DIGEST]                    an OCI layout in a folder
  oci-archive:FILE[:TAG|@DIGEST]           an OCI layout in a tar file
  docker-archive:FILE[:REPO:TAG|@DIGEST]   what docker save or podman save writes
  registry://HOST[:PORT]/REPO[:TAG|@DIGEST]

Tar files may be compressed with gzip or zstd. A registry is asked over https, one on this
machine over http too, with the credentials of docker's config file ($DOCKER_CONFIG or
~/.docker; credHelpers and credsStore are used). Layers that this data folder has already
read are not read again. The last line on stdout is NAME@sha256:<source digest>. A failed
conversion changes no name; images show says why it failed.

` + limitHelp(),
		Args: exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error {
			o.source = args[0]
			return runConvert(c.Context(), o, c.OutOrStdout(), c.ErrOrStderr())
		},
	}
	f := c.Flags()
	f.StringVar(&o.target.data, "data", "", "data folder, made when missing (env QUARRY_DATA)")
	f.StringVar(&o.name, "name", "", "REPO[:TAG] to publish the image under; the default tag is latest")
	f.StringVar(&o.platform, "platform", "", "OS/ARCH[/VARIANT] to take from an image index; default is this machine's")
	f.BoolVar(&o.json, "json", false, "print the result as JSON before the last line")
	f.Func("limit", limitUsage, o.limits.set)
	return c
}

func runConvert(ctx context.Context, o convertOptions, stdout, stderr io.Writer) error {
	if o.name == "" {
		return usageError("convert needs --name REPO[:TAG]")
	}
	name, err := newName(o.name)
	if err != nil {
		return err
	}
	if _, err = platformFlag(o.platform); err != nil {
		return err
	}
	if err := oci.CheckSource(o.source); err != nil {
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	source, err := absoluteSource(o.source)
	if err != nil {
		return err
	}
	if !utf8.ValidString(source) {
		return usageError(fmt.Sprintf("source %q: its name is not UTF-8, which is all that can be sent to the server and be recorded: rename it, or make a link to it that has another name", source))
	}
	creds, err := userCredentials(ctx, source)
	if err != nil {
		return err
	}
	cl, err := o.target.client(ctx)
	if err != nil {
		return err
	}
	defer cl.Close()
	bar := newProgress(stderr)
	res, err := cl.Convert(ctx, api.ConvertRequest{Source: source, Name: name.String(), Platform: o.platform, Credentials: creds, Limits: o.limits}, bar.step)
	bar.end()
	if err != nil {
		return limitHint(err)
	}
	if o.json {
		if err := json.NewEncoder(stdout).Encode(map[string]any{"version": 1, "result": res}); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintf(stdout, "%s@%s\n", res.Name, res.Source)
	return err
}

// userCredentials looks up what this user has for the registry of a source: the
// server that fetches from it may be another user's.
func userCredentials(ctx context.Context, source string) (*api.Credentials, error) {
	c, err := oci.UserCredentials(ctx, source)
	if err != nil || c == (oci.Credentials{}) {
		return nil, err
	}
	return &api.Credentials{
		Username: c.Username, Password: api.Secret(c.Password),
		IdentityToken: api.Secret(c.IdentityToken), RegistryToken: api.Secret(c.RegistryToken),
	}, nil
}

// newName reads --name. A digest alone is refused: it would be the tag of a
// repository called sha256, and read as what it looks like by everyone.
func newName(s string) (image.Ref, error) {
	if _, err := chunk.Parse(s); err == nil {
		return image.Ref{}, usageError(fmt.Sprintf("--name %s is a digest: want REPO[:TAG]", s))
	}
	name, err := image.ParseName(s)
	if err != nil {
		return name, fmt.Errorf("%w: --name: %w", errUsage, err)
	}
	return name, nil
}

// platformFlag reads --platform; empty is zero.
func platformFlag(s string) (image.Platform, error) {
	if s == "" {
		return image.Platform{}, nil
	}
	p, err := image.ParsePlatform(s)
	if err != nil {
		return p, usageError(fmt.Sprintf("--platform %s: want OS/ARCH[/VARIANT], such as linux/amd64 or linux/arm/v7", s))
	}
	return p, nil
}

// absoluteSource makes the path in SRC absolute: the data folder's server, which
// opens it, has another working directory.
func absoluteSource(src string) (string, error) {
	scheme, path, ok := strings.Cut(src, ":")
	if !ok || path == "" || strings.HasPrefix(path, "//") {
		return src, nil // the converter says what is wrong with it
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return "", err
	}
	return scheme + ":" + abs, nil
}

func usageError(text string) error { return fmt.Errorf("%w: %s", errUsage, text) }

// progress shows long work: a line that is rewritten on a terminal, a line a
// step elsewhere.
type progress struct {
	w        io.Writer
	terminal bool
	last     string
}

func newProgress(w io.Writer) *progress {
	f, ok := w.(*os.File)
	return &progress{w: w, terminal: ok && term.IsTerminal(int(f.Fd()))}
}

func (p *progress) step(s api.Progress) {
	line := oneLine(strings.TrimSpace(s.Step + " " + s.Item))
	if !p.terminal {
		if line != p.last {
			fmt.Fprintln(p.w, line)
		}
		p.last = line
		return
	}
	if s.Total > 0 {
		const width = 30
		full := int(min(s.Done, s.Total) * width / s.Total)
		line = fmt.Sprintf("[%s%s] %3d%% %s", strings.Repeat("=", full), strings.Repeat(" ", width-full), min(s.Done, s.Total)*100/s.Total, line)
	}
	const screen = 79
	fmt.Fprintf(p.w, "\r%-*.*s", screen, screen, line)
	p.last = line
}

func (p *progress) end() {
	if p.terminal && p.last != "" {
		fmt.Fprintln(p.w)
	}
}
