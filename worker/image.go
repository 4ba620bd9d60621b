package worker

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"quarry/internal/durable"
	"quarry/rafs"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
)

// Source is where images come from: a store node, near or far. What it answers
// is not trusted.
type Source interface {
	// Image returns the DSSE envelopes of the name statement (nil for a ref by
	// digest) and the image statement.
	Image(ctx context.Context, ref image.Ref, p image.Platform) (name, statement []byte, err error)
	// Bootstrap and Config return an object's bytes.
	Bootstrap(ctx context.Context, d chunk.Digest, size int64) ([]byte, error)
	Config(ctx context.Context, d chunk.Digest) ([]byte, error)
}

// Origin says where an image's chunks are fetched from, in a form that a reader
// process started later understands.
type Origin struct {
	Store string `json:"store,omitempty"` // URL of a store node
	Data  string `json:"data,omitempty"`  // data folder on this machine
}

// Image is one verified image on this worker.
type Image struct {
	ID        chunk.Digest
	Statement image.Statement
	Config    []byte
	Bootstrap []byte
	RAFS      *rafs.Image
}

// MaxConfig bounds the OCI image config, in bytes.
const MaxConfig = 8 << 20

// Images fetches and keeps verified images.
type Images struct {
	Dir    Dir
	Source Source
	Origin Origin
	Trust  signer.Trust
	Log    *slog.Logger
}

// Fetch resolves ref, verifies its statements and returns the image, from this
// worker's folder when it is there and intact, else from the source. Errors are
// those of image.Verify, the source's, and mismatches of digest or size.
func (s *Images) Fetch(ctx context.Context, ref image.Ref, p image.Platform) (*Image, error) {
	nameEnv, stmtEnv, err := s.Source.Image(ctx, ref, p)
	if err != nil {
		return nil, err
	}
	l, err := lock(ctx, filepath.Join(s.Dir.path, "serials.lock"))
	if err != nil {
		return nil, err
	}
	v, err := s.verify(nameEnv, stmtEnv, ref, p)
	l.unlock()
	if err != nil {
		return nil, err
	}
	im, err := s.Dir.loadImage(v.ID)
	if err == nil {
		return im, s.writeOrigin(im.ID)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		s.Log.WarnContext(ctx, "local copy of the image is damaged, fetching it again", "image_id", v.ID, "err", err)
	}
	return s.download(ctx, v)
}

// verify checks the statements against the names seen before, and remembers a
// newer one durably before the image is used.
func (s *Images) verify(nameEnv, stmtEnv []byte, ref image.Ref, p image.Platform) (*image.Verified, error) {
	path := filepath.Join(s.Dir.path, "serials.json")
	seen := map[string]image.Seen{}
	if err := readJSON(path, &seen); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	key := ref.Repo + ":" + ref.Tag
	v, err := image.Verify(stmtEnv, nameEnv, image.Want{
		Ref: ref, Platform: p, Trust: s.Trust, Seen: seen[key], Now: time.Now(),
	})
	if err != nil {
		return nil, err
	}
	if v.Name == nil || v.Name.Serial == seen[key].Serial {
		return v, nil
	}
	seen[key] = image.Seen{Serial: v.Name.Serial, Source: v.Name.Source}
	return v, writeJSON(path, seen)
}

func (s *Images) download(ctx context.Context, v *image.Verified) (*Image, error) {
	st := v.Statement
	if st.BootstrapSize > rafs.MaxBootstrap {
		return nil, fmt.Errorf("bootstrap of %d bytes: at most %d are accepted", st.BootstrapSize, rafs.MaxBootstrap)
	}
	boot, err := s.Source.Bootstrap(ctx, st.Bootstrap, st.BootstrapSize)
	if err != nil {
		return nil, err
	}
	config, err := s.Source.Config(ctx, st.Config)
	if err != nil {
		return nil, err
	}
	payload, err := image.EncodeStatement(st)
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
	return im, s.writeOrigin(im.ID)
}

func (s *Images) writeOrigin(id chunk.Digest) error {
	path := filepath.Join(s.Dir.imageDir(id), "origin.json")
	var have Origin
	if err := readJSON(path, &have); err == nil && have == s.Origin {
		return nil
	}
	return writeJSON(path, s.Origin)
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
		if err := durable.WriteFile(filepath.Join(dir, f.name), f.data, 0o600); err != nil {
			return err
		}
	}
	return nil
}

// loadImage reads an image from the worker's folder. The disk is not trusted:
// every part is verified against the id.
func (d Dir) loadImage(id chunk.Digest) (*Image, error) {
	dir := d.imageDir(id)
	payload, err := readBounded(filepath.Join(dir, "statement"), image.MaxStatement)
	if err != nil {
		return nil, err
	}
	config, err := readBounded(filepath.Join(dir, "config"), MaxConfig)
	if err != nil {
		return nil, err
	}
	boot, err := readBounded(filepath.Join(dir, "bootstrap"), rafs.MaxBootstrap)
	if err != nil {
		return nil, err
	}
	return assemble(id, payload, config, boot)
}

func readBounded(path string, limit int64) ([]byte, error) {
	st, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if st.Size() > limit {
		return nil, fmt.Errorf("%s has %d bytes, at most %d are accepted", path, st.Size(), limit)
	}
	return os.ReadFile(path)
}

// FileBytes is the size of all file content, each hard link counted once.
func (im *Image) FileBytes() int64 {
	var total int64
	seen := map[*rafs.Inode]bool{}
	im.RAFS.Walk(func(_ string, n *rafs.Inode) error {
		if !seen[n] {
			seen[n] = true
			total += n.Size
		}
		return nil
	})
	return total
}
