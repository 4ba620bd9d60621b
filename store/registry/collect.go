package registry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"quarry/store/bucket"
	"quarry/store/chunk"
)

// Need says what is known of the source that a manifest is.
type Need int

const (
	// Loose: it never had a name. It stays, unless all that names it, or that it refers
	// to, goes.
	Loose Need = iota
	// Firm: a name, a pin, a job or a mount needs it.
	Firm
	// Aged: it lost its last name long ago. It stays only as a part of what stays.
	Aged
)

// Collect says what one collection of what was pushed does.
type Collect struct {
	// Need is asked for each manifest.
	Need func(source chunk.Digest) Need
	// Age is how long ago what Need answers from was looked for, at most: it does not know
	// what was pushed since.
	Age time.Duration
	// Sources are those whose content stays, whether a repository has it or not: a job
	// reads it.
	Sources []chunk.Digest
	// Grace is how long ago clients must have been told of something that goes: one that
	// was told that a blob is there names it later and does not send it.
	Grace  time.Duration
	DryRun bool
	// Deleted is told of each object; Spared of each source whose manifest would have
	// gone, had nobody been told of it; Problem of each repository that is left alone.
	Deleted func(size int64)
	Spared  func(source chunk.Digest)
	Problem func(text string)
}

// Collect deletes what nobody needs, in this order: manifests, entries of blobs in
// repositories, content. A crash in between leaves what the next collection finds.
// Whoever pushes meanwhile was told of what it counts on, or is told now that it is not
// there. Errors: those of the bucket, and of Config.Confirm.
func (s *Store) Collect(ctx context.Context, cfg Collect) error {
	c := &collection{s: s, cfg: cfg, since: s.pushes.since(s.cfg.Now().Add(-cfg.Age)), live: map[digest.Digest]bool{}}
	err := c.repos(ctx, func(r *repoContent) error { return c.repo(ctx, r) })
	if err != nil {
		return err
	}
	for _, source := range cfg.Sources {
		if err := c.keep(ctx, digest.Digest(source.String())); err != nil {
			return err
		}
	}
	for obj, err := range s.bucket.List(ctx, BlobsPrefix) {
		if err != nil {
			return fmt.Errorf("list %s: %w", BlobsPrefix, err)
		}
		d, ok := ParseContentKey(obj.Key)
		if !ok || c.live[d] {
			continue
		}
		if err := c.drop(ctx, d, obj); err != nil {
			return err
		}
	}
	return nil
}

// Told reports whether a client was told so recently, or may have been, that the manifest
// of a source is there.
func (s *Store) Told(source chunk.Digest, within time.Duration) bool {
	return s.recent.since(digest.Digest(source.String()), within)
}

type collection struct {
	s     *Store
	cfg   Collect
	since time.Time              // what clients were told after it stays
	live  map[digest.Digest]bool // content that stays
}

// grace is how long ago clients must have been told: before Need's answers were looked
// for at least, and before any push began whose manifest may not be listed yet.
func (c *collection) grace() time.Duration {
	return max(c.cfg.Grace, c.s.cfg.Now().Sub(c.since)+time.Millisecond)
}

// drop deletes one object of the digest.
func (c *collection) drop(ctx context.Context, d digest.Digest, obj bucket.Object) error {
	gone := !c.s.recent.since(d, c.grace())
	if !c.cfg.DryRun {
		var err error
		if gone, err = c.s.Drop(ctx, d, obj.Key, c.grace()); err != nil {
			return err
		}
	}
	if gone {
		c.cfg.Deleted(obj.Size)
	} else {
		c.live[d] = true // also of the content, when it is an entry that stays
	}
	return nil
}

// keep keeps the content of a manifest and of all that it names.
func (c *collection) keep(ctx context.Context, d digest.Digest) error {
	if c.live[d] {
		return nil
	}
	c.live[d] = true
	doc, err := c.s.document(ctx, d)
	if err != nil {
		if errors.Is(err, ErrBlobUnknown) || errors.Is(err, ErrDamaged) || errors.Is(err, ErrManifestInvalid) || bucket.IsDamage(err) {
			return nil // pushed nowhere, or to be pushed again
		}
		return err
	}
	for _, b := range doc.Blobs {
		c.live[b.Digest] = true
	}
	for _, m := range doc.Manifests {
		if err := c.keep(ctx, m.Digest); err != nil {
			return err
		}
	}
	return nil
}

// document reads a manifest from its content alone.
func (s *Store) document(ctx context.Context, d digest.Digest) (*Document, error) {
	body, err := bucket.ReadObject(ctx, s.bucket, ContentKey(d), MaxManifest)
	if err != nil {
		return nil, err
	}
	if got := digestOf(d, body); got != d {
		return nil, fmt.Errorf("%w: %s: content has %s", ErrDamaged, d, got)
	}
	return parseStored(body)
}

// parseStored reads a manifest whose media type stands in a record, if anywhere but in
// itself.
func parseStored(body []byte) (*Document, error) {
	doc, err := ParseManifest("", body)
	if err == nil || doc != nil && doc.MediaType != "" {
		return doc, err
	}
	for _, mediaType := range []string{v1.MediaTypeImageManifest, v1.MediaTypeImageIndex} {
		if doc, again := ParseManifest(mediaType, body); again == nil {
			return doc, nil
		}
	}
	return nil, err
}

// repoContent is what a repository has.
type repoContent struct {
	name      string
	blobs     []bucket.Object // entries
	manifests []*pushed
}

// pushed is one manifest of a repository, which may have several records.
type pushed struct {
	digest digest.Digest // of the record that was found first
	source chunk.Digest
	rec    manifestRecord
	size   int64 // of the records
	doc    *Document
	stays  bool
}

// repos calls fn for each repository, of which the keys come together.
func (c *collection) repos(ctx context.Context, fn func(*repoContent) error) error {
	var r *repoContent
	var records []bucket.Object
	end := func() error {
		if r == nil {
			return nil
		}
		if err := c.read(ctx, r, records); err != nil {
			return err
		}
		records = nil
		return fn(r)
	}
	for obj, err := range c.s.bucket.List(ctx, ReposPrefix) {
		if err != nil {
			return fmt.Errorf("list %s: %w", ReposPrefix, err)
		}
		name, rest, ok := strings.Cut(strings.TrimPrefix(obj.Key, ReposPrefix), "/_")
		if !ok {
			continue // none of ours
		}
		if r == nil || r.name != name {
			if err := end(); err != nil {
				return err
			}
			r = &repoContent{name: name}
		}
		switch kind, _, _ := strings.Cut(rest, "/"); kind {
		case "blobs":
			r.blobs = append(r.blobs, obj)
		case "manifests":
			records = append(records, obj)
		}
	}
	return end()
}

// read reads the manifests of a repository. One that cannot be read makes the others
// unsafe: r.manifests is nil and everything is left alone.
func (c *collection) read(ctx context.Context, r *repoContent, records []bucket.Object) error {
	found := make([]*pushed, len(records))
	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(maxLookups)
	for i, obj := range records {
		d, err := parseElems(strings.TrimPrefix(obj.Key, ManifestsPrefix(r.name)))
		if err != nil {
			continue
		}
		g.Go(func() error {
			m, err := c.s.manifestOf(gctx, r.name, d)
			if m != nil {
				m.size = obj.Size
			}
			found[i] = m
			return err
		})
	}
	err := g.Wait()
	switch {
	case errors.Is(err, ErrDamaged), errors.Is(err, ErrManifestInvalid), errors.Is(err, ErrBlobUnknown), bucket.IsDamage(err):
		c.cfg.Problem(fmt.Sprintf("repository %s is left alone: %v: push it again, or delete it", r.name, err))
		c.leave(r, records)
		return nil
	case err != nil:
		return err
	}
	bySource := map[chunk.Digest]*pushed{}
	for _, m := range found {
		switch {
		case m == nil: // deleted meanwhile
		case bySource[m.source] != nil:
			bySource[m.source].size += m.size
		default:
			bySource[m.source] = m
			r.manifests = append(r.manifests, m)
		}
	}
	return nil
}

// leave keeps all of a repository.
func (c *collection) leave(r *repoContent, records []bucket.Object) {
	for _, obj := range slices.Concat(r.blobs, records) {
		if d, ok := recordDigest(obj.Key); ok {
			c.live[d] = true
		}
	}
	r.blobs = nil
}

// recordDigest is the digest at the end of the key of a record.
func recordDigest(key string) (digest.Digest, bool) {
	_, rest, _ := strings.Cut(key, "/_")
	_, rest, _ = strings.Cut(rest, "/")
	d, err := parseElems(rest)
	return d, err == nil
}

// manifestOf reads a manifest of a repository; nil when its record is gone.
func (s *Store) manifestOf(ctx context.Context, repo string, d digest.Digest) (*pushed, error) {
	rec, err := s.record(ctx, repo, d)
	if errors.Is(err, ErrManifestUnknown) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	m := &pushed{digest: d, rec: rec}
	for _, o := range rec.Digests {
		if o.Algorithm() == digest.SHA256 {
			m.source = chunkDigest(o)
		}
	}
	body, err := bucket.ReadObject(ctx, s.bucket, ContentKey(d), MaxManifest)
	if err != nil {
		return nil, err
	}
	if got := digestOf(d, body); got != d {
		return nil, fmt.Errorf("%w: %s: content has %s", ErrDamaged, d, got)
	}
	m.doc, err = ParseManifest(rec.MediaType, body)
	return m, err
}

// repo decides about one repository, and deletes what nobody needs of it.
func (c *collection) repo(ctx context.Context, r *repoContent) error {
	c.choose(r)
	named := map[digest.Digest]bool{}
	for _, m := range r.manifests {
		if !m.stays {
			gone, err := c.dropManifest(ctx, r.name, m)
			if err != nil {
				return err
			}
			if gone {
				continue
			}
			c.cfg.Spared(m.source)
		}
		for _, d := range m.rec.Digests {
			c.live[d] = true
		}
		for _, b := range slices.Concat(m.doc.Blobs, m.doc.Manifests) {
			named[b.Digest] = true
		}
	}
	for _, obj := range r.blobs {
		d, ok := recordDigest(obj.Key)
		if !ok {
			continue
		}
		if named[d] {
			c.live[d] = true
			continue
		}
		if err := c.drop(ctx, d, obj); err != nil {
			return err
		}
	}
	return nil
}

// choose says which manifests stay: those that are needed, and those that never had a
// name unless they belong only to what goes; with all that they name, and what refers to
// them.
func (c *collection) choose(r *repoContent) {
	by := map[digest.Digest]*pushed{}
	for _, m := range r.manifests {
		for _, d := range m.rec.Digests {
			by[d] = m
		}
	}
	// belongs calls fn for each pair of a manifest and one that goes with it.
	belongs := func(fn func(whole, part *pushed)) {
		for _, m := range r.manifests {
			for _, child := range m.doc.Manifests {
				if part := by[child.Digest]; part != nil {
					fn(m, part)
				}
			}
			if subject := by[m.rec.Subject]; subject != nil {
				fn(subject, m)
			}
		}
	}
	loose := map[*pushed]bool{} // that belong to what goes
	need := map[*pushed]Need{}
	for _, m := range r.manifests {
		need[m] = c.cfg.Need(m.source)
	}
	spread(belongs, func(whole, part *pushed) bool {
		if loose[part] || need[part] != Loose || need[whole] != Aged && !loose[whole] {
			return false
		}
		loose[part] = true
		return true
	})
	for _, m := range r.manifests {
		m.stays = need[m] == Firm || need[m] == Loose && !loose[m]
	}
	spread(belongs, func(whole, part *pushed) bool {
		if !whole.stays || part.stays {
			return false
		}
		part.stays = true
		return true
	})
}

// spread calls fn for all pairs until it changes nothing more.
func spread(pairs func(func(a, b *pushed)), fn func(a, b *pushed) bool) {
	for more := true; more; {
		more = false
		pairs(func(a, b *pushed) { more = fn(a, b) || more })
	}
}

// dropManifest deletes a manifest of a repository, unless it has a tag by now or a client
// was told of it: it reports whether it is gone. Nobody else changes the repository or is
// told of the manifest meanwhile.
func (c *collection) dropManifest(ctx context.Context, repo string, m *pushed) (bool, error) {
	s := c.s
	unlock, err := s.locks.lock(ctx, repo)
	if err != nil {
		return false, err
	}
	defer unlock()
	for _, tag := range s.cfg.Names.Tags(repo) {
		if n, ok := s.cfg.Names.Name(repo, tag); ok && n.Source == m.source {
			return false, nil
		}
	}
	for _, d := range slices.Sorted(slices.Values(m.rec.Digests)) {
		unlock, err := s.locks.lock(ctx, d.String())
		if err != nil {
			return false, err
		}
		defer unlock()
	}
	for _, d := range m.rec.Digests {
		if s.recent.since(d, c.grace()) {
			return false, nil
		}
	}
	if !c.cfg.DryRun {
		if err := s.confirm(ctx); err != nil {
			return false, fmt.Errorf("delete manifest %s of %s: %w", m.digest, repo, err)
		}
		if err := s.deleteRecords(ctx, repo, m.digest, m.rec); err != nil {
			return false, err
		}
	}
	c.cfg.Deleted(m.size)
	return true, nil
}
