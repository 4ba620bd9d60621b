package oci

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"quarry/store/chunk"
	"quarry/store/image"
)

const (
	maxIndexDepth = 4    // an index in an index in an index in an index
	maxManifests  = 1000 // of all nested indexes together
)

// picker finds the manifest of a platform below a descriptor.
type picker struct {
	blobs blobs
	want  image.Platform // zero: not asked for

	visited int
	found   []*candidate // in index order
	skipped []error      // why an entry is no candidate
}

// pick returns the image that d describes or, when it is an index, the one of
// its images that suits the platform best.
func (p *picker) pick(ctx context.Context, d descriptor) (*candidate, error) {
	doc, digest, err := p.read(ctx, d)
	if err != nil {
		return nil, err
	}
	if !doc.isIndex() {
		c, err := readImage(ctx, p.blobs, digest, doc)
		if err != nil {
			return nil, err
		}
		return p.only(c)
	}
	if err := p.walk(ctx, doc, 1); err != nil {
		return nil, err
	}
	return p.best(digest)
}

// wanted is the platform to choose where there is a choice.
func (p *picker) wanted() image.Platform {
	if p.want == (image.Platform{}) {
		return image.HostPlatform()
	}
	return p.want
}

// only accepts the one image there is, for any platform when none is asked for.
func (p *picker) only(c *candidate) (*candidate, error) {
	switch {
	case c.platform == image.Platform{}:
		if p.want == (image.Platform{}) {
			return nil, fmt.Errorf("config %s names no os and architecture: say which with --platform", c.config)
		}
		c.platform = p.want
	case p.want != image.Platform{} && score(p.want, c.platform) < 0:
		return nil, fmt.Errorf("image is for %s, not for %s", c.platform, p.want)
	}
	return c, nil
}

func (p *picker) read(ctx context.Context, d descriptor) (*document, chunk.Digest, error) {
	digest, err := digestOf(d)
	if err != nil {
		return nil, digest, err
	}
	raw, err := readVerified(ctx, p.blobs, kindManifest, d, MaxManifest)
	if err != nil {
		return nil, digest, fmt.Errorf("manifest %s: %w", digest, err)
	}
	doc, err := parseDocument(raw, d.MediaType)
	if err != nil {
		return nil, digest, fmt.Errorf("manifest %s: %w", digest, err)
	}
	return doc, digest, nil
}

// walk gathers the candidates of an index. Only entries that may match are
// read, so a layout that holds one platform of a larger index is enough.
func (p *picker) walk(ctx context.Context, index *document, depth int) error {
	if depth > maxIndexDepth {
		return fmt.Errorf("image indexes are nested more than %d deep", maxIndexDepth)
	}
	for _, d := range index.Manifests {
		if p.visited++; p.visited > maxManifests {
			return fmt.Errorf("image index has more than %d manifests", maxManifests)
		}
		if isAttestation(d) {
			continue
		}
		if !d.MediaType.IsIndex() && !d.MediaType.IsImage() {
			p.skipped = append(p.skipped, fmt.Errorf("%s is of type %q", d.Digest, d.MediaType))
			continue
		}
		if err := p.enter(ctx, d, depth); err != nil {
			return err
		}
	}
	return nil
}

// enter reads one entry of an index: a nested index, or a manifest whose
// platform is the wanted one or not told.
func (p *picker) enter(ctx context.Context, d descriptor, depth int) error {
	if declared := platformOf(d); declared != (image.Platform{}) && d.MediaType.IsImage() {
		if score(p.wanted(), declared) < 0 {
			p.found = append(p.found, &candidate{platform: declared}) // for the message, never chosen
			return nil
		}
	}
	doc, digest, err := p.read(ctx, d)
	if err != nil {
		return err
	}
	if doc.isIndex() {
		return p.walk(ctx, doc, depth+1)
	}
	if !doc.Config.MediaType.IsConfig() {
		p.skipped = append(p.skipped, fmt.Errorf("%s is an artifact, not an image: its config is of type %q", digest, doc.Config.MediaType))
		return nil
	}
	c, err := readImage(ctx, p.blobs, digest, doc)
	if err != nil {
		return err
	}
	if declared := platformOf(d); declared != (image.Platform{}) {
		c.platform = declared // the index is what the reference names, and what is asked
	}
	if c.platform == (image.Platform{}) {
		p.skipped = append(p.skipped, fmt.Errorf("%s: neither the index nor config %s names its os and architecture", digest, c.config))
		return nil
	}
	p.found = append(p.found, c)
	return nil
}

// best returns the candidate with the highest score, the first of equals.
func (p *picker) best(index chunk.Digest) (*candidate, error) {
	want := p.wanted()
	var best *candidate
	for _, c := range p.found {
		if score(want, c.platform) >= 0 && (best == nil || score(want, c.platform) > score(want, best.platform)) {
			best = c
		}
	}
	if best != nil {
		return best, nil
	}
	var there []string
	for _, c := range p.found {
		there = append(there, c.platform.String())
	}
	slices.Sort(there)
	there = slices.Compact(there)
	if len(there) == 0 {
		return nil, errors.Join(append([]error{fmt.Errorf("image index %s has no runnable platform", index)}, p.skipped...)...)
	}
	return nil, fmt.Errorf("image index %s has nothing for %s: there are %s", index, want, strings.Join(there, ", "))
}

func isAttestation(d descriptor) bool {
	if d.Annotations[annotationReference] != "" {
		return true
	}
	return d.Platform != nil && d.Platform.OS == "unknown" && d.Platform.Architecture == "unknown"
}

// platformOf is the platform that an index declares for an entry, if it does.
func platformOf(d descriptor) image.Platform {
	if d.Platform == nil {
		return image.Platform{}
	}
	return platform(d.Platform.OS, d.Platform.Architecture, d.Platform.Variant)
}

// platform returns the zero value for what is no platform.
func platform(os, arch, variant string) image.Platform {
	p, err := image.NewPlatform(os, arch, variant)
	if err != nil {
		return image.Platform{}
	}
	return p
}

// score says how well an image suits a wanted platform: below 0 not at all,
// otherwise higher is better. A machine of a higher variant runs lower ones.
func score(want, have image.Platform) int {
	if want.OS != have.OS || want.Arch != have.Arch {
		return -1
	}
	w, h := level(want), level(have)
	switch {
	case want.Variant == have.Variant:
		return 1000
	case w < 0 || h < 0 || h > w:
		return -1
	}
	return h
}

// level is the number of a variant, of "" the base's, or -1.
func level(p image.Platform) int {
	if p.Variant == "" {
		switch p.Arch {
		case "amd64":
			return 1
		case "arm64":
			return 8
		}
		return -1
	}
	n, err := strconv.Atoi(strings.TrimPrefix(p.Variant, "v"))
	if err != nil || n < 0 || n > 99 {
		return -1
	}
	return n
}
