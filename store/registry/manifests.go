package registry

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
)

// manifestRecord says that a repository has a manifest.
type manifestRecord struct {
	Version   int    `json:"version"`
	MediaType string `json:"media_type"`
	Size      int64  `json:"size"`
	// Digests are the names of the manifest here, each with a record like this: its
	// sha256, by which tags name it, is always one; the one it was pushed by last is
	// the last.
	Digests []digest.Digest `json:"digests"`
	Subject digest.Digest   `json:"subject,omitempty"`
}

// maxManifestRecord bounds a manifestRecord: a media type of at most 255 bytes that
// may all be escaped, three digests and some 200 bytes.
const maxManifestRecord = 4 << 10

// maxLookups bounds the objects that one push looks for at once.
const maxLookups = 8

// Manifest is what a repository has of a manifest.
type Manifest struct {
	Digest    digest.Digest // the one it was asked for by; for a tag, the one it was pushed by last
	MediaType string
	Size      int64
	Subject   digest.Digest // "" when it refers to nothing
}

// IsIndex reports whether it names other manifests.
func (m Manifest) IsIndex() bool { return isIndex(m.MediaType) }

// PutRequest is a manifest to store.
type PutRequest struct {
	Repo      string
	MediaType string // as sent, "" for none
	Body      []byte
	Digest    digest.Digest // the one it is pushed by, "" when by tag
	Tags      []string      // names to move to it
}

// PutManifest stores a manifest byte for byte, moves the tags to it and tells
// Config.Pushed. All is durable on nil. A manifest that names a blob or manifest
// which is not in the repository is refused, so that what is stored is whole: an
// index comes after its children. Errors: ErrManifestInvalid,
// ErrManifestBlobUnknown, ErrDigestInvalid, ErrSizeInvalid, ErrTooLarge.
func (s *Store) PutManifest(ctx context.Context, r PutRequest) (Manifest, error) {
	doc, err := ParseManifest(r.MediaType, r.Body)
	if err != nil {
		return Manifest{}, err
	}
	source := digest.SHA256.FromBytes(r.Body)
	if r.Digest == "" {
		r.Digest = source
	}
	if got := digestOf(r.Digest, r.Body); got != r.Digest {
		return Manifest{}, fmt.Errorf("%w: the manifest is pushed as %s, its bytes have %s", ErrDigestInvalid, r.Digest, got)
	}
	if err := s.store(ctx, r, doc, source); err != nil {
		return Manifest{}, err
	}
	if len(r.Tags) == 0 { // with a tag the journal says whether another writer has taken over
		if err := s.confirm(ctx); err != nil {
			return Manifest{}, fmt.Errorf("manifest %s of %s: %w", r.Digest, r.Repo, err)
		}
	}
	m := Manifest{Digest: r.Digest, MediaType: doc.MediaType, Size: int64(len(r.Body))}
	if doc.Subject != nil {
		m.Subject = doc.Subject.Digest
	}
	return m, s.tellPushed(ctx, r, doc, source)
}

// store writes, in this order: content, record, entry in the list of what refers to
// the subject, tags. A crash in between leaves what nothing names, never a name of
// something that is not there.
func (s *Store) store(ctx context.Context, r PutRequest, doc *Document, source digest.Digest) error {
	unlock, err := s.locks.lock(ctx, r.Repo)
	if err != nil {
		return err
	}
	defer unlock()
	defer s.pushes.begin(s.cfg.Now())()
	if err := s.checkReferences(ctx, r.Repo, doc); err != nil {
		return err
	}
	rec := manifestRecord{
		Version: recordVersion, MediaType: doc.MediaType, Size: int64(len(r.Body)),
		Digests: []digest.Digest{source},
	}
	if old, err := s.record(ctx, r.Repo, source); err == nil {
		rec.Digests = old.Digests
	} else if !errors.Is(err, ErrManifestUnknown) && !errors.Is(err, ErrDamaged) {
		return err
	}
	if doc.Subject != nil {
		rec.Subject = doc.Subject.Digest
	}
	rec.Digests = lastly(rec.Digests, r.Digest)
	for _, d := range rec.Digests {
		if err := s.keepManifest(ctx, r.Repo, d, r.Body, rec); err != nil {
			return err
		}
	}
	if err := s.addReferrer(ctx, r, doc); err != nil {
		return err
	}
	for _, tag := range r.Tags {
		if err := s.names.Set(ctx, r.Repo, tag, chunkDigest(source)); err != nil {
			return fmt.Errorf("move tag %s:%s: %w", r.Repo, tag, err)
		}
	}
	return nil
}

// lastly returns the names of a manifest with d at their end.
func lastly(ds []digest.Digest, d digest.Digest) []digest.Digest {
	return append(slices.DeleteFunc(slices.Clone(ds), func(o digest.Digest) bool { return o == d }), d)
}

func (s *Store) keepManifest(ctx context.Context, repo string, d digest.Digest, body []byte, rec manifestRecord) error {
	unlock, err := s.locks.lock(ctx, d.String())
	if err != nil {
		return err
	}
	defer unlock()
	if err := s.putBytes(ctx, ContentKey(d), body); err != nil {
		return err
	}
	s.recent.touch(d)
	return s.putRecord(ctx, ManifestKey(repo, d), rec)
}

// tellPushed tells the owner what is durable now.
func (s *Store) tellPushed(ctx context.Context, r PutRequest, doc *Document, source digest.Digest) error {
	if s.cfg.Pushed == nil {
		return nil
	}
	tags := r.Tags
	if len(tags) == 0 {
		tags = []string{""}
	}
	for _, tag := range tags {
		p := Pushed{Repo: r.Repo, Tag: tag, Source: chunkDigest(source), MediaType: doc.MediaType}
		if err := s.cfg.Pushed(ctx, p); err != nil {
			return fmt.Errorf("%s:%s is stored, but what follows on a push failed: push it again: %w", r.Repo, tag, err)
		}
	}
	return nil
}

// checkReferences looks for what a manifest names, each once.
func (s *Store) checkReferences(ctx context.Context, repo string, doc *Document) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxLookups)
	seen := map[digest.Digest]int64{}
	check := func(d v1.Descriptor, manifest bool) error {
		size, ok := seen[d.Digest]
		if ok && size == d.Size {
			return nil
		}
		if ok {
			return fmt.Errorf("%w: it names %s with %d and with %d bytes", ErrManifestInvalid, d.Digest, size, d.Size)
		}
		seen[d.Digest] = d.Size
		g.Go(func() error { return s.checkReference(ctx, repo, d, manifest) })
		return nil
	}
	var err error
	for _, d := range doc.Blobs {
		err = errors.Join(err, check(d, false))
	}
	for _, d := range doc.Manifests {
		err = errors.Join(err, check(d, isImage(d.MediaType) || isIndex(d.MediaType)))
	}
	return errors.Join(g.Wait(), err)
}

func (s *Store) checkReference(ctx context.Context, repo string, d v1.Descriptor, manifest bool) error {
	var size int64
	var err error
	if manifest {
		var m Manifest
		m, err = s.StatManifest(ctx, repo, d.Digest)
		size = m.Size
		if err == nil && m.MediaType != d.MediaType {
			return fmt.Errorf("%w: it names %s as %.255q, pushed was %q", ErrManifestInvalid, d.Digest, d.MediaType, m.MediaType)
		}
	} else {
		var c *Content
		if c, err = s.Blob(ctx, repo, d.Digest); err == nil {
			size = c.Size
		}
	}
	switch {
	case errors.Is(err, ErrBlobUnknown) || errors.Is(err, ErrManifestUnknown):
		if nondistributable[d.MediaType] {
			return nil
		}
		return fmt.Errorf("%w: push %s (%.255s) to %s first", ErrManifestBlobUnknown, d.Digest, d.MediaType, repo)
	case err != nil:
		return err
	case size != d.Size:
		return fmt.Errorf("%w: the manifest names %s with %d bytes, it has %d", ErrSizeInvalid, d.Digest, d.Size, size)
	}
	return nil
}

// record reads the record of a manifest. Errors: ErrManifestUnknown.
func (s *Store) record(ctx context.Context, repo string, d digest.Digest) (manifestRecord, error) {
	rec, err := readRecord[manifestRecord](ctx, s.bucket, ManifestKey(repo, d), maxManifestRecord)
	if errors.Is(err, bucket.ErrNotFound) {
		return rec, fmt.Errorf("%w: %s has no manifest %s", ErrManifestUnknown, repo, d)
	}
	if err == nil && !slices.Contains(rec.Digests, d) {
		return rec, fmt.Errorf("%w: %s is about %q (push it again)", ErrDamaged, ManifestKey(repo, d), rec.Digests)
	}
	return rec, err
}

// StatManifest finds a manifest of a repository. Errors: ErrManifestUnknown,
// ErrDamaged.
func (s *Store) StatManifest(ctx context.Context, repo string, d digest.Digest) (Manifest, error) {
	unlock, err := s.locks.lock(ctx, d.String())
	if err != nil {
		return Manifest{}, err
	}
	defer unlock()
	rec, err := s.record(ctx, repo, d)
	if err != nil {
		return Manifest{}, err
	}
	c, err := FindContent(ctx, s.bucket, d)
	if errors.Is(err, ErrBlobUnknown) {
		return Manifest{}, fmt.Errorf("%w: the content of %s is gone", ErrManifestUnknown, d)
	}
	if err != nil {
		return Manifest{}, err
	}
	if c.Size != rec.Size {
		return Manifest{}, fmt.Errorf("%w: %s has %d bytes, pushed were %d (push it again)", ErrDamaged, ContentKey(d), c.Size, rec.Size)
	}
	s.recent.touch(d)
	return Manifest{Digest: d, MediaType: rec.MediaType, Size: rec.Size, Subject: rec.Subject}, nil
}

// ReadManifest reads the bytes of a manifest that StatManifest has found, verified.
// Errors: ErrDamaged.
func (s *Store) ReadManifest(ctx context.Context, m Manifest) ([]byte, error) {
	body, err := bucket.ReadObject(ctx, s.bucket, ContentKey(m.Digest), MaxManifest)
	if err != nil {
		return nil, err
	}
	if got := digestOf(m.Digest, body); got != m.Digest {
		return nil, fmt.Errorf("%w: %s: content has %s (push it again)", ErrDamaged, m.Digest, got)
	}
	return body, nil
}

// Resolve returns the digest that a tag stands for: the one its manifest was pushed
// by last. A name whose image was not pushed here is none. Errors:
// ErrManifestUnknown.
func (s *Store) Resolve(ctx context.Context, repo, tag string) (digest.Digest, error) {
	n, ok := s.cfg.Names.Name(repo, tag)
	if !ok {
		return "", fmt.Errorf("%w: %s has no tag %s", ErrManifestUnknown, repo, tag)
	}
	rec, err := s.record(ctx, repo, digest.Digest(n.Source.String()))
	if err != nil {
		return "", err
	}
	return rec.Digests[len(rec.Digests)-1], nil
}

// DeleteTag removes a tag, and nothing else. Errors: ErrManifestUnknown.
func (s *Store) DeleteTag(ctx context.Context, repo, tag string) error {
	if _, err := s.Resolve(ctx, repo, tag); err != nil {
		return err
	}
	err := s.cfg.Names.DeleteName(ctx, repo, tag)
	if errors.Is(err, catalog.ErrNotFound) {
		return fmt.Errorf("%w: %s has no tag %s", ErrManifestUnknown, repo, tag)
	}
	return err
}

// DeleteManifest removes a manifest and all tags of it. The record that it is asked
// for by goes last, so that a delete which failed half-way is found again when it is
// repeated. Errors: ErrManifestUnknown.
func (s *Store) DeleteManifest(ctx context.Context, repo string, d digest.Digest) error {
	unlock, err := s.locks.lock(ctx, repo)
	if err != nil {
		return err
	}
	defer unlock()
	rec, err := s.record(ctx, repo, d)
	if err != nil {
		return err
	}
	for _, tag := range s.cfg.Names.Tags(repo) {
		n, ok := s.cfg.Names.Name(repo, tag)
		if !ok || !slices.Contains(rec.Digests, digest.Digest(n.Source.String())) {
			continue
		}
		if err := s.cfg.Names.DeleteName(ctx, repo, tag); err != nil && !errors.Is(err, catalog.ErrNotFound) {
			return fmt.Errorf("delete tag %s:%s: %w", repo, tag, err)
		}
	}
	return s.deleteRecords(ctx, repo, d, rec)
}

// deleteRecords deletes the records of a manifest, that of d last. The caller holds the
// repository.
func (s *Store) deleteRecords(ctx context.Context, repo string, d digest.Digest, rec manifestRecord) error {
	others := slices.DeleteFunc(slices.Clone(rec.Digests), func(o digest.Digest) bool { return o == d })
	for _, o := range append(others, d) {
		if rec.Subject != "" {
			if err := s.bucket.Delete(ctx, ReferrerKey(repo, rec.Subject, o)); err != nil {
				return fmt.Errorf("delete referrer %s of %s: %w", o, rec.Subject, err)
			}
		}
		if err := s.bucket.Delete(ctx, ManifestKey(repo, o)); err != nil {
			return fmt.Errorf("delete manifest %s of %s: %w", o, repo, err)
		}
	}
	return nil
}

// chunkDigest is a sha256 digest as the catalog has it.
func chunkDigest(d digest.Digest) chunk.Digest {
	c, err := chunk.Parse(d.String())
	if err != nil {
		panic(fmt.Sprintf("registry: %s is no sha256: %v", d, err)) // made by digest.SHA256
	}
	return c
}
