package image

import (
	"fmt"
	"regexp"
	"strings"

	"quarry/store/chunk"
)

const (
	// DefaultTag is the tag of a reference that gives neither tag nor digest.
	DefaultTag = "latest"
	// MaxRepo and MaxTag bound names in bytes, as registries do.
	MaxRepo = 255
	MaxTag  = 128
)

var (
	repoComponent = regexp.MustCompile(`^[a-z0-9]+(?:[._-]+[a-z0-9]+)*$`)
	tagText       = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9._-]*$`)
)

// Ref names an image in a store. Names are literal: there is no default
// registry host and no "library/" in front.
type Ref struct {
	Repo   string
	Tag    string        // "" when only a digest is given
	Digest *chunk.Digest // source digest; when given it decides, and Tag is a remark
}

// ParseRef reads REPO[:TAG][@sha256:…]. Without tag and digest the tag is
// DefaultTag.
func ParseRef(s string) (Ref, error) {
	name, digest, hasDigest := strings.Cut(s, "@")
	repo, tag, hasTag := strings.Cut(name, ":")
	if strings.Contains(tag, "/") {
		return Ref{}, fmt.Errorf("name %q: names are literal and have no registry host: leave out %q", s, name[:len(repo)+1+strings.Index(tag, "/")+1])
	}
	r := Ref{Repo: repo, Tag: tag}
	if err := ValidateRepo(repo); err != nil {
		return Ref{}, fmt.Errorf("name %q: %w", s, err)
	}
	if !hasTag && !hasDigest {
		r.Tag, hasTag = DefaultTag, true
	}
	if hasTag {
		if err := ValidateTag(r.Tag); err != nil {
			return Ref{}, fmt.Errorf("name %q: %w", s, err)
		}
	}
	if hasDigest {
		d, err := chunk.Parse(digest)
		if err != nil {
			return Ref{}, fmt.Errorf("name %q: %w", s, err)
		}
		r.Digest = &d
	}
	return r, nil
}

// ParseName reads REPO[:TAG], a name to give to an image. Without a tag it is
// DefaultTag. A digest is refused, as it cannot be chosen.
func ParseName(s string) (Ref, error) {
	r, err := ParseRef(s)
	if err != nil {
		return Ref{}, err
	}
	if r.Digest != nil {
		return Ref{}, fmt.Errorf("name %q: a name to give has no digest: leave out %q", s, "@"+r.Digest.String())
	}
	return r, nil
}

// String returns the text that ParseRef reads.
func (r Ref) String() string {
	s := r.Repo
	if r.Tag != "" {
		s += ":" + r.Tag
	}
	if r.Digest != nil {
		s += "@" + r.Digest.String()
	}
	return s
}

// ValidateRepo checks a repository name: components of lower-case letters and
// digits, with '.', '_' and '-' inside, separated by '/'.
func ValidateRepo(repo string) error {
	if repo == "" {
		return fmt.Errorf("the repository name is empty: want REPO[:TAG]")
	}
	if len(repo) > MaxRepo {
		return fmt.Errorf("the repository name has %d bytes, at most %d", len(repo), MaxRepo)
	}
	for component := range strings.SplitSeq(repo, "/") {
		if !repoComponent.MatchString(component) {
			return fmt.Errorf("repository name %q: part %q: want lower-case letters and digits, with '.', '_' or '-' only between them", repo, component)
		}
	}
	return nil
}

// ValidateTag checks a tag.
func ValidateTag(tag string) error {
	if len(tag) > MaxTag {
		return fmt.Errorf("the tag has %d bytes, at most %d", len(tag), MaxTag)
	}
	if !tagText.MatchString(tag) {
		return fmt.Errorf("tag %q: want letters, digits, '_', '.' and '-', and neither '.' nor '-' first", tag)
	}
	return nil
}
