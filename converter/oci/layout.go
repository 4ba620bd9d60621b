package oci

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"quarry/store/chunk"
)

// files is what a layout consists of, by the names in it.
type files interface {
	// file returns a file and its size. Errors: ErrNoBlob.
	file(name string) (io.ReadCloser, int64, error)
	io.Closer
}

// layout is an OCI layout, in a folder or an archive.
type layout struct {
	files
	sel selector
}

var _ blobs = (*layout)(nil)

func openFolder(_ context.Context, rest string, _ Config) (blobs, error) {
	dir, sel, err := parseSelector(rest, func(p string) bool {
		st, err := os.Stat(p)
		return err == nil && st.IsDir()
	})
	if err != nil {
		return nil, err
	}
	if _, err := os.Stat(filepath.Join(dir, "oci-layout")); err != nil {
		return nil, fmt.Errorf("%s is not an OCI layout: %w", dir, err)
	}
	return &layout{folder(dir), sel}, nil
}

func openLayoutArchive(ctx context.Context, rest string, cfg Config) (blobs, error) {
	a, sel, err := openArchive(ctx, rest, cfg)
	if err != nil {
		return nil, err
	}
	if a.has("oci-layout") {
		return &layout{a, sel}, nil
	}
	err = fmt.Errorf("%s is not an archive of an OCI layout: it has no oci-layout", a.name)
	if a.has("manifest.json") {
		err = fmt.Errorf("%w, but a manifest.json: open it as a docker-archive: source", err)
	}
	return nil, errors.Join(err, a.Close())
}

func (l *layout) top(context.Context) (descriptor, error) {
	r, size, err := l.file("index.json")
	if err != nil {
		return descriptor{}, fmt.Errorf("index.json: %w", err)
	}
	raw, err := readLimited(r, size, MaxManifest)
	if err != nil {
		return descriptor{}, fmt.Errorf("index.json: %w", err)
	}
	top, err := parseDocument(raw, types.OCIImageIndex)
	if err != nil {
		return descriptor{}, fmt.Errorf("index.json: %w", err)
	}
	return l.choose(top.Manifests)
}

func (l *layout) open(_ context.Context, _ kind, d chunk.Digest) (io.ReadCloser, int64, error) {
	return l.file("blobs/sha256/" + d.Hex())
}

// folder is the files of a layout in a folder.
type folder string

var _ files = folder("")

func (f folder) file(name string) (io.ReadCloser, int64, error) {
	file, size, err := openRegular(filepath.Join(string(f), filepath.FromSlash(name)))
	if errors.Is(err, os.ErrNotExist) {
		return nil, 0, ErrNoBlob
	}
	if err != nil {
		return nil, 0, err
	}
	return file, size, nil
}

func (f folder) Close() error { return nil }

// openRegular opens a regular file and returns its size. Anything else is
// refused unopened, because opening a device can change it; and should a file
// become a FIFO in between, O_NONBLOCK keeps the open from waiting for a writer
// that never comes, which no context could end.
func openRegular(name string) (*os.File, int64, error) {
	st, err := os.Stat(name)
	if err != nil {
		return nil, 0, err
	}
	if !st.Mode().IsRegular() {
		return nil, 0, fmt.Errorf("%s is not a regular file", name)
	}
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, 0, err
	}
	if st, err = f.Stat(); err == nil && !st.Mode().IsRegular() {
		err = fmt.Errorf("%s is not a regular file", name)
	}
	if err != nil {
		return nil, 0, errors.Join(err, f.Close())
	}
	return f, st.Size(), nil
}

// selector says which of a source's images is meant; zero means the only one.
type selector struct {
	tag    string // of an archive of docker save: REPO:TAG
	digest *chunk.Digest
}

// parseSelector splits "PATH[:TAG|@DIGEST]". Paths and tags may both contain
// colons, so the shortest prefix that exists is the path.
func parseSelector(rest string, exists func(path string) bool) (path string, sel selector, err error) {
	if i := strings.LastIndex(rest, "@sha256:"); i >= 0 && !exists(rest) {
		d, err := chunk.Parse(rest[i+1:])
		return rest[:i], selector{digest: &d}, err
	}
	if exists(rest) {
		return rest, sel, nil
	}
	for i := range len(rest) {
		if rest[i] == ':' && exists(rest[:i]) {
			return rest[:i], selector{tag: rest[i+1:]}, nil
		}
	}
	path, tag, _ := strings.Cut(rest, ":")
	return path, selector{tag: tag}, nil
}

const (
	annotationTag       = "org.opencontainers.image.ref.name"
	annotationReference = "vnd.docker.reference.type" // buildx marks its attestations with it
)

// choose picks the descriptor of index.json that the selector means.
func (l *layout) choose(entries []descriptor) (descriptor, error) {
	sel := l.sel
	if sel.digest != nil {
		return l.chooseDigest(entries, *sel.digest)
	}
	var found []descriptor
	for _, d := range entries {
		if sel.tag == "" && !isAttestation(d) || sel.tag != "" && sel.tag == d.Annotations[annotationTag] {
			found = append(found, d)
		}
	}
	// One image under two tags is still the only one.
	found = slices.CompactFunc(found, func(a, b descriptor) bool { return a.Digest == b.Digest })
	switch {
	case len(found) == 1:
		return found[0], nil
	case len(found) > 1 && sel.tag != "":
		return descriptor{}, fmt.Errorf("tag %q is there %d times with different digests: name one by @DIGEST", sel.tag, len(found))
	case len(found) > 1:
		return descriptor{}, fmt.Errorf("there are %d images: name one of %s", len(found), listNames(namesOf(entries)))
	case sel.tag != "":
		return descriptor{}, fmt.Errorf("no tag %q: there are %s", sel.tag, listNames(namesOf(entries)))
	}
	return descriptor{}, errors.New("index.json names no image")
}

// chooseDigest finds an image by digest: named in index.json, or only stored.
func (l *layout) chooseDigest(entries []descriptor, d chunk.Digest) (descriptor, error) {
	for _, e := range entries {
		if e.Digest.String() == d.String() {
			return e, nil
		}
	}
	r, size, err := l.open(context.Background(), kindManifest, d) // a file: nothing to wait for
	if err != nil {
		return descriptor{}, fmt.Errorf("no image %s: there are %s", d, listNames(namesOf(entries)))
	}
	return descriptor{Digest: hash(d), Size: size}, r.Close()
}

// namesOf returns the entries' tags, and the digests of what has none.
func namesOf(entries []descriptor) []string {
	var names []string
	for _, d := range entries {
		name := d.Annotations[annotationTag]
		if name == "" {
			name = "@" + d.Digest.String()
		}
		names = append(names, name)
	}
	return names
}

// quoteName returns a name that a source gives, quoted when it has characters
// that a terminal might obey or that end a name in a list.
func quoteName(name string) string {
	if name == "" || !utf8.ValidString(name) || strings.ContainsFunc(name, func(r rune) bool { return !unicode.IsPrint(r) || r == ' ' || r == ',' }) {
		return strconv.Quote(name)
	}
	return name
}

// listNames lists names for a message.
func listNames(names []string) string {
	const most = 50
	slices.Sort(names)
	names = slices.Compact(names)
	for i, name := range names {
		names[i] = quoteName(name)
	}
	switch {
	case len(names) == 0:
		return "none"
	case len(names) > most:
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}
