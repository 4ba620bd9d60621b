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

// Image is one verified image on this worker.
type Image struct {
	ID        chunk.Digest
	Statement image.Statement
	Config    []byte
	Bootstrap []byte
	RAFS      *rafs.Image // without its tree when Images.Decoded had it
	ACL       bool        // a file of it has a POSIX ACL
}

// Images fetches and keeps verified images.
type Images struct {
	Dir    Dir
	Source Source
	Origin Origin
	Trust  signer.Trust
	// Decoded keeps what was decoded from one Images to the next; nil keeps nothing.
	Decoded *Decoded
	Log     *slog.Logger
}

// Fetch resolves ref, verifies its statements and returns the image, in one
// request. The source is told which image ref was the last time, when that is
// here and intact, and sends its content only when ref is another one now.
// Errors are those of image.Verify, the source's, and mismatches of digest or
// size.
func (s *Images) Fetch(ctx context.Context, ref image.Ref, p image.Platform) (*Image, error) {
	return s.FetchStart(ctx, ref, p, false, func(chunk.Digest, io.ReadCloser) {})
}

// FetchStart is Fetch, and with prefetch asks for the rest of the source's answer, see
// Source.Start. kept is called once, as soon as the image is in the folder, so that a
// reader opens it while it is decoded here as well. rest may be nil and is for kept to
// close; the image is not to be used when FetchStart fails after.
func (s *Images) FetchStart(ctx context.Context, ref image.Ref, p image.Platform, prefetch bool, kept func(id chunk.Digest, rest io.ReadCloser)) (im *Image, err error) {
	looked := timeline.Begin(ctx, timeline.Local)
	local := s.latest(ctx, ref, p)
	looked()
	var have *chunk.Digest
	if local != nil {
		have = &local.ID
	}
	var v *image.Verified
	var envelope []byte
	started := timeline.Begin(ctx, timeline.Start)
	config, boot, rest, err := s.Source.Start(ctx, ref, p, have, prefetch, func(nameEnv, stmtEnv []byte) (_ *image.Verified, err error) {
		v, err = s.verify(ctx, nameEnv, stmtEnv, ref, p)
		envelope = stmtEnv
		return v, err
	})
	started()
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil && rest != nil {
			rest.Close()
		}
	}()
	switch {
	case config != nil || boot != nil:
		return s.keep(ctx, ref, p, v, envelope, config, boot, func() {
			its := rest
			rest = nil // kept's to close from now on
			kept(v.ID, its)
		})
	case local == nil || v == nil || v.ID != local.ID:
		return nil, fmt.Errorf("image %s: the store left out the content of an image that is not here", ref)
	}
	if err := errors.Join(s.writeRecord(local), s.Dir.writeEnvelope(local.ID, envelope)); err != nil {
		return nil, err
	}
	kept(v.ID, rest)
	return local, nil
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
	seen, err := s.Dir.readSerials()
	if err != nil {
		return nil, fmt.Errorf("the highest serials seen: %w; remove the file to accept the names as the store has them now", err)
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
	if err := s.Dir.writeSerials(seen); err != nil {
		return nil, fmt.Errorf("remember the serial of %s: %w", key, err)
	}
	return v, nil
}

// keep checks what the source sent against the image's id, saves it, calls kept, and
// decodes it.
func (s *Images) keep(ctx context.Context, ref image.Ref, p image.Platform, v *image.Verified, envelope, config, boot []byte, kept func()) (*Image, error) {
	defer timeline.Begin(ctx, timeline.Save)()
	payload, err := image.EncodeStatement(v.Statement)
	if err != nil {
		return nil, err
	}
	st, err := checkParts(v.ID, payload, config, boot)
	if err != nil {
		return nil, err
	}
	if err := s.Dir.saveImage(v.ID, payload, config, boot); err != nil {
		return nil, fmt.Errorf("keep image in %s: %w", s.Dir.path, err)
	}
	if err := errors.Join(s.Dir.writeRecord(v.ID, s.Origin, payload), s.Dir.writeEnvelope(v.ID, envelope)); err != nil {
		return nil, err
	}
	kept()
	im, err := s.Decoded.parts(v.ID, st, config, boot)
	if err != nil { // what nobody can use is not kept
		return nil, errors.Join(err, s.Dir.removeImage(v.ID))
	}
	return im, s.remember(ctx, ref, p, im.ID)
}

// writeRecord makes the record of an image that is here say where it came from now.
func (s *Images) writeRecord(im *Image) error {
	payload, err := image.EncodeStatement(im.Statement)
	if err != nil {
		return err
	}
	return s.Dir.writeRecord(im.ID, s.Origin, payload)
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
	im, err := s.load(list[i].Image)
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

// assemble makes an image of parts that it checks.
func assemble(id chunk.Digest, payload, config, boot []byte, c *Decoded) (*Image, error) {
	st, err := checkParts(id, payload, config, boot)
	if err != nil {
		return nil, err
	}
	return c.parts(id, st, config, boot)
}

// checkParts checks every part against the image id, which names the statement,
// which names the rest.
func checkParts(id chunk.Digest, payload, config, boot []byte) (st image.Statement, err error) {
	if got := image.ID(payload); got != id {
		return st, fmt.Errorf("image statement has digest %s, want %s", got, id)
	}
	if st, err = image.DecodeStatement(payload); err != nil {
		return st, err
	}
	if got := chunk.Sum(config); got != st.Config {
		return st, fmt.Errorf("config has digest %s, the image statement says %s", got, st.Config)
	}
	if got := chunk.Sum(boot); got != st.Bootstrap || int64(len(boot)) != st.BootstrapSize {
		return st, fmt.Errorf("bootstrap has digest %s and %d bytes, the image statement says %s and %d", got, len(boot), st.Bootstrap, st.BootstrapSize)
	}
	return st, nil
}

// parts makes an image of checked parts.
func (c *Decoded) parts(id chunk.Digest, st image.Statement, config, boot []byte) (*Image, error) {
	ri, acl, err := c.decode(st.Bootstrap, boot)
	if err != nil {
		return nil, fmt.Errorf("bootstrap %s: %w", st.Bootstrap, err)
	}
	return &Image{ID: id, Statement: st, Config: config, Bootstrap: boot, RAFS: ri, ACL: acl}, nil
}

func (d Dir) saveImage(id chunk.Digest, payload, config, boot []byte) error {
	dir := d.imageDir(id)
	if err := makeFolder(dir); err != nil {
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

// removeImage undoes saveImage and writeRecord.
func (d Dir) removeImage(id chunk.Digest) error {
	return errors.Join(os.RemoveAll(d.imageDir(id)), os.RemoveAll(d.imageDir(id)+".json"))
}

// Load reads an image from the worker's folder. The disk is not trusted:
// every part is verified against the id.
func (d Dir) Load(id chunk.Digest) (*Image, error) { return d.load(id, nil) }

func (s *Images) load(id chunk.Digest) (*Image, error) { return s.Dir.load(id, s.Decoded) }

func (d Dir) load(id chunk.Digest, c *Decoded) (*Image, error) {
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
	im, err := assemble(id, payload, config, boot, c)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", dir, err)
	}
	return im, nil
}
