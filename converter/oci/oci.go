// Package oci opens OCI images where they lie: in a layout folder, in an
// archive of one, in an archive of docker save, or in a registry. It is the
// only package that knows OCI's documents; what leaves it has been checked
// against the digest and size that named it.
package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"quarry/converter/layer"
	"quarry/store/chunk"
	"quarry/store/image"
)

// Maxima of what is read into memory, checked before it is; a config's is
// image.MaxConfig.
const (
	MaxManifest = 4 << 20 // a manifest or an image index; the push limit of registries
	MaxLayers   = 1000    // 1000 descriptors are about 200 KiB of a manifest
)

// Config says how a source is opened. The zero value is right for whoever has
// no wishes.
type Config struct {
	// Platform is the one to choose. Zero means this machine's where the source
	// offers a choice, and whatever there is where it does not.
	Platform image.Platform
	// Credentials are for the registry that a registry:// source names, and are
	// sent to no other host but the token service it refers to.
	Credentials Credentials
	// Transport, when not nil, reaches the registry of a registry:// source, by plain
	// http when Plain, wherever it is, and otherwise by https alone: somebody has given
	// its URL.
	Transport *http.Transport `json:"-"`
	Plain     bool
	// TmpDir holds the plain bytes of an archive that is compressed as a whole,
	// in a file without a name. "" = os.TempDir.
	TmpDir string
	// Limits bound that file, and compressed layers inside an archive of docker
	// save, which are read once before conversion, for their length; MaxBytes,
	// MaxRatio and RatioFloor count. Zero fields are defaults.
	Limits layer.Limits
	// Spooled is told how far that file is: compressed bytes read, of all, and plain
	// bytes written. nil = nobody asks.
	Spooled func(read, size, plain int64) `json:"-"`
	// RetryWait is the first pause before a request to a registry is made again;
	// every further one is twice as long. 0 = 250 ms.
	RetryWait time.Duration
	// StallTimeout is how long a registry may send nothing, or take for 64 KiB of
	// a body. 0 = 30 s.
	StallTimeout time.Duration
}

func (c Config) withDefaults() Config {
	if c.RetryWait == 0 {
		c.RetryWait = 250 * time.Millisecond
	}
	if c.StallTimeout == 0 {
		c.StallTimeout = 30 * time.Second
	}
	return c
}

// Image is one image of a source, for one platform. Close it after the last
// LayerReader.
type Image struct {
	Source       chunk.Digest // digest of what the reference names: an image index or a manifest
	Platform     image.Platform
	Config       []byte
	ConfigDigest chunk.Digest
	Layers       []Layer

	blobs blobs
}

// Layer describes one layer. DiffID is what the config claims, no more.
type Layer struct {
	Digest, DiffID chunk.Digest
	Size           int64 // of the compressed bytes
	MediaType      string
}

// schemes are the kinds of source, by the word before the first colon.
var schemes = map[string]func(ctx context.Context, rest string, cfg Config) (blobs, error){
	"oci":            openFolder,
	"oci-archive":    openLayoutArchive,
	"docker-archive": openDockerArchive,
	"registry":       openRegistry,
}

// Forms are the forms of a source, for help and messages.
var Forms = []string{
	"oci:DIR[:TAG|@DIGEST]", "oci-archive:FILE[:TAG|@DIGEST]", "docker-archive:FILE[:REPO:TAG|@DIGEST]", "registry://HOST[:PORT]/REPO[:TAG|@DIGEST]",
}

// IsSource reports whether s begins as a source does; a name or path does not.
func IsSource(s string) bool {
	scheme, rest, ok := strings.Cut(s, ":")
	_, known := schemes[scheme]
	// REPO:TAG of a repository called as a scheme is a name, so a path or host
	// must look like one only for registry.
	return ok && known && (scheme != "registry" || strings.HasPrefix(rest, "//"))
}

// CheckSource refuses a source that has none of Forms, and one that seems to hold
// a user's name or password, as in registry://USER:PASSWORD@HOST/REPO, with an
// error that does not show them. Whoever sends, keeps or prints a source asks before.
func CheckSource(src string) error {
	if err := checkUser(src); err != nil {
		return err
	}
	scheme, rest, _ := strings.Cut(src, ":")
	if _, known := schemes[scheme]; !known || rest == "" || scheme == "registry" && !strings.HasPrefix(rest, "//") {
		return fmt.Errorf("source %q: want one of %s", src, strings.Join(Forms, ", "))
	}
	return nil
}

func checkUser(src string) error {
	scheme, rest, _ := strings.Cut(src, ":")
	_, known := schemes[scheme]
	isPath := known && scheme != "registry"
	switch {
	case isPath && !strings.HasPrefix(rest, "//"):
		return nil // a path may contain what it likes
	case !known && !strings.HasPrefix(rest, "//"):
		scheme, rest = "", src // such as USER:PASSWORD@HOST/REPO
	}
	// What may follow an @ is a digest behind a repository: it has no slash and no
	// other @, but a slash before it.
	before, after, ok := strings.Cut(strings.TrimLeft(rest, "/"), "@")
	if !ok || strings.Contains(before, "/") && !strings.ContainsAny(after, "/@") {
		return nil
	}
	if !known {
		scheme = "unknown"
	}
	return fmt.Errorf("source of the scheme %s has a user or password before an @, which is not repeated here: leave them out and use docker login HOST", scheme)
}

// Open opens the image that src names, in one of Forms.
func Open(ctx context.Context, src string, cfg Config) (*Image, error) {
	if err := CheckSource(src); err != nil {
		return nil, err
	}
	scheme, rest, _ := strings.Cut(src, ":")
	b, err := schemes[scheme](ctx, rest, cfg.withDefaults())
	if err != nil {
		return nil, fmt.Errorf("source %s: %w", src, err)
	}
	im, err := load(ctx, b, cfg.Platform)
	if err != nil {
		return nil, fmt.Errorf("source %s: %w", src, errors.Join(err, b.Close()))
	}
	return im, nil
}

// LayerReader opens the compressed bytes of layer i. They are not verified:
// converter/layer does that while it reads them. ctx ends the reading too.
func (im *Image) LayerReader(ctx context.Context, i int) (io.ReadCloser, error) {
	l := im.Layers[i]
	r, size, err := im.blobs.open(ctx, kindBlob, l.Digest)
	if errors.Is(err, ErrNoBlob) && !isDistributable(l.MediaType) {
		return nil, fmt.Errorf("layer %s of type %s is missing: its urls are never fetched, add the blob to the source", l.Digest, l.MediaType)
	}
	if err != nil {
		return nil, fmt.Errorf("layer %s: %w", l.Digest, err)
	}
	if size >= 0 && size != l.Size {
		return nil, errors.Join(fmt.Errorf("layer %s: blob has %d bytes, its descriptor says %d", l.Digest, size, l.Size), r.Close())
	}
	return r, nil
}

// Close frees the source.
func (im *Image) Close() error { return im.blobs.Close() }
