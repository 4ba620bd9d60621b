package folder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"time"

	"quarry/internal/proc"
	"quarry/rafs"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/worker/timeline"
)

// Source is where images come from: a store node, near or far. What it answers
// is not trusted.
type Source interface {
	// Start returns config and bootstrap of an image, or nil for both when the
	// image has the id have. It hands the envelopes of the name statement, nil for
	// a ref by digest, and of the image statement to verify, reads nothing more
	// when that fails, and returns its error. What it returns is of the image
	// that the last call of verify proved. With prefetch, rest is what the source
	// has to say of the chunks that are touched first, or nil: for the caller to
	// close, ending with ctx, unverified, and a hint alone.
	Start(ctx context.Context, ref image.Ref, p image.Platform, have *chunk.Digest, prefetch bool,
		verify func(name, statement []byte) (*image.Verified, error)) (config, bootstrap []byte, rest io.ReadCloser, err error)
}

// Origin says where an image's chunks are fetched from, in a form that a reader
// process started later understands.
type Origin struct {
	Stores []string `json:"stores,omitempty"` // URLs of store nodes, the preferred one first
	Data   string   `json:"data,omitempty"`   // data folder on this machine
}

func (o Origin) equal(other Origin) bool {
	return o.Data == other.Data && slices.Equal(o.Stores, other.Stores)
}

// Image is one verified image on this worker.
type Image struct {
	ID        chunk.Digest
	Statement image.Statement
	Config    []byte
	Bootstrap []byte
	RAFS      *rafs.Image
}

// Images fetches and keeps verified images.
type Images struct {
	Dir    Dir
	Source Source
	Origin Origin
	Trust  signer.Trust
	Log    *slog.Logger
}

// Fetch resolves ref, verifies its statements and returns the image, in one
// request. The source is told which image ref was the last time, when that is
// here and intact, and sends its content only when ref is another one now.
// Errors are those of image.Verify, the source's, and mismatches of digest or
// size.
func (s *Images) Fetch(ctx context.Context, ref image.Ref, p image.Platform) (*Image, error) {
	im, _, err := s.fetch(ctx, ref, p, false)
	return im, err
}

// FetchStart is Fetch, and returns the rest of the source's answer, see
// Source.Start. It is there as soon as the image is kept, and may be nil.
func (s *Images) FetchStart(ctx context.Context, ref image.Ref, p image.Platform) (*Image, io.ReadCloser, error) {
	return s.fetch(ctx, ref, p, true)
}

func (s *Images) fetch(ctx context.Context, ref image.Ref, p image.Platform, prefetch bool) (im *Image, rest io.ReadCloser, err error) {
	looked := timeline.Begin(ctx, timeline.Local)
	local := s.latest(ctx, ref, p)
	looked()
	var have *chunk.Digest
	if local != nil {
		have = &local.ID
	}
	var v *image.Verified
	started := timeline.Begin(ctx, timeline.Start)
	config, boot, rest, err := s.Source.Start(ctx, ref, p, have, prefetch, func(nameEnv, stmtEnv []byte) (_ *image.Verified, err error) {
		v, err = s.verify(ctx, nameEnv, stmtEnv, ref, p)
		return v, err
	})
	started()
	switch {
	case err != nil:
	case config != nil || boot != nil:
		im, err = s.keep(ctx, ref, p, v, config, boot)
	case local == nil || v == nil || v.ID != local.ID:
		err = fmt.Errorf("image %s: the store left out the content of an image that is not here", ref)
	default:
		im, err = local, s.writeOrigin(local.ID)
	}
	if err != nil && rest != nil {
		rest.Close()
		rest = nil
	}
	return im, rest, err
}

// verify checks the statements against the names seen before, and remembers a
// newer one durably before the image is used. The lock is held for that alone:
// the source calls in the middle of its request.
func (s *Images) verify(ctx context.Context, nameEnv, stmtEnv []byte, ref image.Ref, p image.Platform) (*image.Verified, error) {
	l, err := proc.TakeLock(ctx, filepath.Join(s.Dir.path, "serials.lock"))
	if err != nil {
		return nil, err
	}
	defer l.Unlock()
	path := filepath.Join(s.Dir.path, "serials.json")
	seen := map[string]image.Seen{}
	if err := ReadJSON(path, &seen); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("the highest serials seen: %w; remove the file to accept the names as the store has them now", err)
	}
	if seen == nil { // the file said null
		return nil, fmt.Errorf("the highest serials seen: %s: %w; remove the file to accept the names as the store has them now", path, errDamaged)
	}
	key := ref.Repo + ":" + ref.Tag
	v, err := image.Verify(stmtEnv, nameEnv, image.Want{
		Ref: ref, Platform: p, Trust: s.Trust, Seen: seen[key], Now: time.Now(),
	})
	if err != nil {
		return nil, err
	}
	if size := v.Statement.BootstrapSize; size > rafs.MaxBootstrap {
		return nil, fmt.Errorf("image %s: bootstrap of %d bytes, at most %d are accepted", ref, size, int64(rafs.MaxBootstrap))
	}
	if v.Name == nil || v.Name.Serial == seen[key].Serial {
		return v, nil
	}
	seen[key] = image.Seen{Serial: v.Name.Serial, Source: v.Name.Source}
	if err := writeJSON(path, seen); err != nil {
		return nil, fmt.Errorf("remember the serial of %s: %w", key, err)
	}
	return v, nil
}

// keep checks what the source sent and saves it.
func (s *Images) keep(ctx context.Context, ref image.Ref, p image.Platform, v *image.Verified, config, boot []byte) (*Image, error) {
	defer timeline.Begin(ctx, timeline.Save)()
	payload, err := image.EncodeStatement(v.Statement)
	if err != nil {
		return nil, err
	}
	im, err := assemble(v.ID, payload, config, boot)
	if err != nil {
		return nil, err
	}
	if err := s.Dir.saveImage(im.ID, payload, config, boot); err != nil {
		return nil, fmt.Errorf("keep image in %s: %w", s.Dir.path, err)
	}
	if err := s.writeOrigin(im.ID); err != nil {
		return nil, err
	}
	return im, s.remember(ctx, ref, p, im.ID)
}

const (
	// maxLatest bounds what latest.json remembers: a worker runs images of some
	// hundred refs, and a forgotten one is only fetched again.
	maxLatest = 1024
	// maxLatestBytes: maxLatest refs of at most 457 bytes, platforms of 98 and ids
	// of 71, with some 50 bytes of JSON around them, are 0.7 MB.
	maxLatestBytes = 1 << 20
)

// latestImage is one entry of latest.json: which image a ref was when it was
// last fetched. It is a hint and proves nothing: what ref is now is for the
// statements to say.
type latestImage struct {
	Ref      string       `json:"ref"`
	Platform string       `json:"platform"`
	Image    chunk.Digest `json:"image"`
}

func (d Dir) latestPath() string { return filepath.Join(d.path, "latest.json") }

// readLatest returns the entries, those fetched last at the end.
func (d Dir) readLatest() ([]latestImage, error) {
	raw, err := ReadBounded(d.latestPath(), maxLatestBytes)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var list []latestImage
	if err := json.Unmarshal(raw, &list); err != nil {
		return nil, fmt.Errorf("%s: %w", d.latestPath(), err)
	}
	return list, nil
}

// latest returns the image that ref was when it was last fetched, or nil when
// that is unknown or no longer here and intact.
func (s *Images) latest(ctx context.Context, ref image.Ref, p image.Platform) *Image {
	list, err := s.Dir.readLatest()
	if err != nil {
		logOr(s.Log).WarnContext(ctx, "list of the images last fetched is damaged, beginning a new one", "err", err)
	}
	i := slices.IndexFunc(list, func(e latestImage) bool { return e.Ref == ref.String() && e.Platform == p.String() })
	if i < 0 {
		return nil
	}
	im, err := s.Dir.Load(list[i].Image)
	if err == nil {
		return im
	}
	if !errors.Is(err, fs.ErrNotExist) {
		logOr(s.Log).WarnContext(ctx, "local copy of the image is damaged, fetching it again", "image_id", list[i].Image, "err", err)
	}
	return nil
}

// remember makes id the image that ref was last. A list that cannot be read is
// begun anew.
func (s *Images) remember(ctx context.Context, ref image.Ref, p image.Platform, id chunk.Digest) error {
	l, err := proc.TakeLock(ctx, filepath.Join(s.Dir.path, "latest.lock"))
	if err != nil {
		return err
	}
	defer l.Unlock()
	entry := latestImage{Ref: ref.String(), Platform: p.String(), Image: id}
	list, _ := s.Dir.readLatest() // latest has logged it
	if slices.Contains(list, entry) {
		return nil
	}
	list = slices.DeleteFunc(list, func(e latestImage) bool { return e.Ref == entry.Ref && e.Platform == entry.Platform })
	list = append(list, entry)
	return writeWholeJSON(s.Dir.latestPath(), list[max(0, len(list)-maxLatest):])
}

func (s *Images) writeOrigin(id chunk.Digest) error {
	have, err := s.Dir.Origin(id)
	if err == nil && have.equal(s.Origin) {
		return nil
	}
	return writeWholeJSON(s.Dir.originPath(id), s.Origin)
}

func (d Dir) originPath(id chunk.Digest) string { return filepath.Join(d.imageDir(id), "origin.json") }

// Origin says where an image's chunks are fetched from. Errors: fs.ErrNotExist.
func (d Dir) Origin(id chunk.Digest) (Origin, error) {
	var o Origin
	return o, ReadJSON(d.originPath(id), &o)
}

// assemble checks every part against the image id, which names the statement,
// which names the rest.
func assemble(id chunk.Digest, payload, config, boot []byte) (*Image, error) {
	if got := image.ID(payload); got != id {
		return nil, fmt.Errorf("image statement has digest %s, want %s", got, id)
	}
	st, err := image.DecodeStatement(payload)
	if err != nil {
		return nil, err
	}
	if got := chunk.Sum(config); got != st.Config {
		return nil, fmt.Errorf("config has digest %s, the image statement says %s", got, st.Config)
	}
	if got := chunk.Sum(boot); got != st.Bootstrap || int64(len(boot)) != st.BootstrapSize {
		return nil, fmt.Errorf("bootstrap has digest %s and %d bytes, the image statement says %s and %d", got, len(boot), st.Bootstrap, st.BootstrapSize)
	}
	ri, err := rafs.Decode(boot)
	if err != nil {
		return nil, fmt.Errorf("bootstrap %s: %w", st.Bootstrap, err)
	}
	return &Image{ID: id, Statement: st, Config: config, Bootstrap: boot, RAFS: ri}, nil
}

func (d Dir) saveImage(id chunk.Digest, payload, config, boot []byte) error {
	dir := d.imageDir(id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	// The statement is written last: with it, the image is complete.
	for _, f := range []struct {
		name string
		data []byte
	}{{"config", config}, {"bootstrap", boot}, {"statement", payload}} {
		if err := writeWhole(filepath.Join(dir, f.name), f.data); err != nil {
			return err
		}
	}
	return nil
}

// Load reads an image from the worker's folder. The disk is not trusted:
// every part is verified against the id.
func (d Dir) Load(id chunk.Digest) (*Image, error) {
	dir := d.imageDir(id)
	payload, err := ReadBounded(filepath.Join(dir, "statement"), image.MaxStatement)
	if err != nil {
		return nil, err
	}
	config, err := ReadBounded(filepath.Join(dir, "config"), image.MaxConfig)
	if err != nil {
		return nil, err
	}
	boot, err := ReadBounded(filepath.Join(dir, "bootstrap"), rafs.MaxBootstrap)
	if err != nil {
		return nil, err
	}
	return assemble(id, payload, config, boot)
}
