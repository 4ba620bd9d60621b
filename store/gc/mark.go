package gc

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"quarry/rafs"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
)

// ErrUnsure says that it cannot be known what an image needs, so nothing is deleted.
var ErrUnsure = errors.New("nothing is deleted as long as this is so")

// Recipe is what a bootstrap needs.
type Recipe struct {
	Chunks []chunk.Digest
	Blob   *chunk.Digest // its virtual blob; nil when it has no chunks
}

// ReadRecipe is the Recipe of a RAFS bootstrap.
func ReadRecipe(boot []byte) (Recipe, error) {
	im, err := rafs.Decode(boot)
	if err != nil || im.Blob == nil {
		return Recipe{}, err
	}
	r := Recipe{Chunks: make([]chunk.Digest, len(im.Blob.Chunks)), Blob: &im.Blob.ID}
	for i := range im.Blob.Chunks {
		r.Chunks[i] = im.Blob.Chunks[i].Digest
	}
	return r, nil
}

// digestSet is a set of digests in some 45 bytes each.
type digestSet struct {
	digests []chunk.Digest
	numbers *chunk.Numbers
}

func newDigestSet() *digestSet {
	s := &digestSet{}
	s.numbers = chunk.NewNumbers(0, func(n uint32) *chunk.Digest { return &s.digests[n] })
	return s
}

func (s *digestSet) has(d *chunk.Digest) bool {
	_, ok := s.numbers.Find(d)
	return ok
}

func (s *digestSet) add(d chunk.Digest) {
	if !s.has(&d) {
		s.digests = append(s.digests, d)
		s.numbers.Add(&s.digests[len(s.digests)-1])
	}
}

// marks is what can be reached from the roots. A second mark adds to the first: what
// was reachable at either time stays.
type marks struct {
	sources map[chunk.Digest]bool
	images  map[chunk.Digest]bool // ids
	keys    map[string]bool       // bootstraps, configs and mappings of virtual blobs
	boots   map[chunk.Digest]bool // bootstraps that were walked
	chunks  *digestSet
}

func newMarks() *marks {
	return &marks{
		sources: map[chunk.Digest]bool{}, images: map[chunk.Digest]bool{},
		keys: map[string]bool{}, boots: map[chunk.Digest]bool{}, chunks: newDigestSet(),
	}
}

// mark adds what can be reached now.
func (r *run) mark(ctx context.Context, m *marks) error {
	sources, err := r.roots(ctx)
	if err != nil {
		return err
	}
	// Leases after names: who takes a lease and then finds the name as it was is seen by
	// one of the two, whatever happens in between.
	leases, err := r.cfg.Leases(ctx, r.report.DryRun)
	if err != nil {
		return fmt.Errorf("list leases: %w", err)
	}
	// A source that had a root at the first mark stays, though it may have lost it; a job
	// that was its root may have made its image since, of which nothing was marked then.
	for source := range m.sources {
		sources = append(sources, source)
	}
	slices.SortFunc(sources, compareDigests)
	for _, source := range slices.Compact(sources) {
		if err := r.markSource(ctx, m, source); err != nil {
			return err
		}
	}
	for _, l := range leases {
		if err := r.markLease(ctx, m, l); err != nil {
			return err
		}
	}
	return nil
}

// roots returns the sources whose images stay, sorted.
func (r *run) roots(ctx context.Context) ([]chunk.Digest, error) {
	r.asked = r.cfg.Since()
	var sources []chunk.Digest
	for _, n := range r.cfg.Catalog.Names() {
		sources = append(sources, n.Source)
	}
	sources = append(sources, r.cfg.Catalog.Pins()...)
	now, left := r.cfg.Now(), r.cfg.Catalog.Left()
	for source, when := range left {
		// The journal knows the time to the step of its clock. A clock that was put back
		// makes an age negative: then it stays.
		if r.limits.Retain > 0 && now.Sub(when) < r.limits.Retain+catalog.ClockStep {
			sources = append(sources, source)
		}
	}
	if r.cfg.Roots != nil {
		more, err := r.cfg.Roots(ctx)
		if err != nil {
			return nil, fmt.Errorf("list the sources of jobs: %w", err)
		}
		sources = append(sources, more...)
	}
	for _, source := range sources {
		r.firm[source] = true
	}
	if r.cfg.Stored != nil {
		stored, err := r.cfg.Stored(ctx)
		if err != nil {
			return nil, fmt.Errorf("list pushed manifests: %w", err)
		}
		for _, source := range stored {
			_, named := left[source]
			if !named {
				r.loose[source] = true
			}
			// A manifest that stays because a client was told of it keeps its image.
			if !named || r.cfg.Told != nil && r.cfg.Told(source, r.limits.Push) {
				sources = append(sources, source)
			}
		}
	}
	slices.SortFunc(sources, compareDigests)
	return slices.Compact(sources), nil
}

// markSource marks all images of a source.
func (r *run) markSource(ctx context.Context, m *marks, source chunk.Digest) error {
	m.sources[source] = true
	keys, err := r.statements(ctx, source)
	if err != nil {
		return err
	}
	for _, key := range keys {
		payload, err := bucket.ReadObject(ctx, r.cfg.Bucket, key, image.MaxStatement)
		if errors.Is(err, bucket.ErrNotFound) {
			continue // being replaced: who does that has a session, or had one
		}
		if err != nil && !bucket.IsDamage(err) {
			return err
		}
		var s image.Statement
		if err == nil {
			s, err = image.DecodeStatement(payload)
		}
		if err != nil {
			return fmt.Errorf("image statement %s cannot be read, so it is not known what is needed: %w: %w; run check, and convert the image again or remove its names", key, ErrUnsure, err)
		}
		m.images[image.ID(payload)] = true
		m.keys[image.ConfigKey(s.Config)] = true
		if err := r.markBootstrap(ctx, m, s.Bootstrap); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

// statements lists the keys of the statements of a source.
func (r *run) statements(ctx context.Context, source chunk.Digest) ([]string, error) {
	var keys []string
	prefix := image.ImagesPrefix + source.Hex() + "/"
	for o, err := range r.cfg.Bucket.List(ctx, prefix) {
		if err != nil {
			return nil, fmt.Errorf("list %s: %w", prefix, err)
		}
		if strings.HasSuffix(o.Key, "/statement") {
			keys = append(keys, o.Key)
		}
	}
	return keys, nil
}

func (r *run) markBootstrap(ctx context.Context, m *marks, d chunk.Digest) error {
	if m.boots[d] {
		return nil
	}
	boot, err := bucket.ReadObject(ctx, r.cfg.Bucket, image.BootstrapKey(d), rafs.MaxBootstrap)
	var recipe Recipe
	switch {
	case err != nil && !bucket.IsDamage(err):
		return err
	case err != nil:
	case chunk.Sum(boot) != d:
		err = fmt.Errorf("content has digest %s", chunk.Sum(boot))
	default:
		recipe, err = r.cfg.Recipe(boot)
	}
	if err != nil {
		return fmt.Errorf("bootstrap %s cannot be read, so it is not known which chunks are needed: %w: %w; run check, and convert the image again or remove its names", d, ErrUnsure, err)
	}
	for _, ch := range recipe.Chunks {
		m.chunks.add(ch)
	}
	m.keys[image.BootstrapKey(d)] = true
	m.boots[d] = true
	if recipe.Blob == nil {
		return nil
	}
	return r.markMapping(ctx, m, *recipe.Blob)
}

// markMapping marks the mapping of a virtual blob and the bootstrap it leads to, which
// may be that of another image with the same chunks.
func (r *run) markMapping(ctx context.Context, m *marks, v chunk.Digest) error {
	key := image.BlobKey(v)
	m.keys[key] = true
	raw, err := bucket.ReadObject(ctx, r.cfg.Bucket, key, int64(len(v.String())))
	if bucket.IsDamage(err) {
		return nil // check tells, and converting again heals it
	}
	if err != nil {
		return err
	}
	if d, err := chunk.Parse(string(raw)); err == nil {
		m.keys[image.BootstrapKey(d)] = true
	}
	return nil
}

// markLease marks what a mount needs: its image, and when the statement is gone or was
// replaced, the bootstrap that it has.
func (r *run) markLease(ctx context.Context, m *marks, l Lease) error {
	if !l.Image.IsZero() && !m.images[l.Image] {
		source, found, err := r.sourceOf(ctx, m, l.Image)
		if err != nil {
			return err
		}
		if found {
			if err := r.markSource(ctx, m, source); err != nil {
				return err
			}
		}
	}
	if l.Bootstrap.IsZero() {
		return nil
	}
	err := r.markBootstrap(ctx, m, l.Bootstrap)
	if errors.Is(err, bucket.ErrNotFound) {
		return nil // of another store, or gone before the lease began
	}
	return err
}

// sourceOf finds the source of an image id among those that have no root.
func (r *run) sourceOf(ctx context.Context, m *marks, id chunk.Digest) (chunk.Digest, bool, error) {
	for o, err := range r.cfg.Bucket.List(ctx, image.ImagesPrefix) {
		if err != nil {
			return chunk.Digest{}, false, fmt.Errorf("list %s: %w", image.ImagesPrefix, err)
		}
		source, _, ok := image.ParseStatementKey(o.Key)
		if !ok || m.sources[source] {
			continue
		}
		payload, err := bucket.ReadObject(ctx, r.cfg.Bucket, o.Key, image.MaxStatement)
		if err != nil && !bucket.IsDamage(err) {
			return chunk.Digest{}, false, err
		}
		if err == nil && image.ID(payload) == id {
			return source, true, nil
		}
	}
	return chunk.Digest{}, false, nil
}
