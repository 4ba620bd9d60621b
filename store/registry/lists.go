package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"quarry/store/bucket"
)

const (
	// MaxPage bounds the entries of one answer that lists tags or referrers.
	MaxPage = 1000
	// maxReferrer bounds a referrer's descriptor: the annotations of a manifest, of
	// which encoding/json may write each byte as six.
	maxReferrer = 6*MaxManifest + 4<<10
	// maxListed bounds the manifests of a repository that a list of tags is held
	// against.
	maxListed = 1 << 20
	// maxCatalog bounds the names that one page of a list of repositories looks up in
	// the bucket, one after another.
	maxCatalog = 256
)

// Repos lists the repositories that come after last, have a tag that can be pulled
// and are visible: at most n of them, in bytewise order. next is what to go on after,
// "" when there are no more; a page may be short, or empty, and have it. It is a
// repository, or one with the last of its tags that was looked up, as "repo:tag".
func (s *Store) Repos(ctx context.Context, last string, n int, visible func(repo string) bool) (repos []string, next string, err error) {
	repos = []string{}
	lastRepo, lastTag, inside := strings.Cut(last, ":")
	looked := 0
	for _, name := range s.cfg.Names.Names() {
		if name.Repo < lastRepo || name.Repo == lastRepo && (!inside || name.Tag <= lastTag) || !visible(name.Repo) {
			continue
		}
		if len(repos) > 0 && repos[len(repos)-1] == name.Repo {
			continue
		}
		if len(repos) >= n || looked >= maxCatalog {
			return repos, next, nil
		}
		looked++
		_, err := s.bucket.Stat(ctx, ManifestKey(name.Repo, digest.Digest(name.Source.String())))
		if errors.Is(err, bucket.ErrNotFound) {
			next = name.Repo + ":" + name.Tag
			continue // converted from elsewhere
		}
		if err != nil {
			return nil, "", fmt.Errorf("look for a manifest of %s: %w", name.Repo, err)
		}
		next = name.Repo
		repos = append(repos, name.Repo)
	}
	return repos, "", nil
}

// Tags lists the tags of a repository that come after last, at most n of them, in
// bytewise order; more says that there are others after these. Names of images that
// were not pushed here, but converted from elsewhere, are not among them: whatever is
// listed can be pulled. Errors: ErrNameUnknown.
func (s *Store) Tags(ctx context.Context, repo, last string, n int) (tags []string, more bool, err error) {
	have := map[string]bool{}
	prefix := ManifestsPrefix(repo)
	for obj, err := range s.bucket.List(ctx, prefix) {
		if err != nil {
			return nil, false, fmt.Errorf("list manifests of %s: %w", repo, err)
		}
		if have[strings.TrimPrefix(obj.Key, prefix)] = true; len(have) > maxListed {
			return nil, false, fmt.Errorf("list manifests of %s: more than %d", repo, maxListed)
		}
	}
	if len(have) == 0 {
		return nil, false, fmt.Errorf("%w: nothing was pushed to %s", ErrNameUnknown, repo)
	}
	tags = []string{}
	for _, tag := range s.cfg.Names.Tags(repo) { // in order
		name, ok := s.cfg.Names.Name(repo, tag)
		if tag <= last || !ok || !have["sha256/"+name.Source.Hex()] {
			continue
		}
		if len(tags) == n {
			return tags, true, nil
		}
		tags = append(tags, tag)
	}
	return tags, false, nil
}

// addReferrer enters a manifest with a subject in the subject's list. The subject
// need not be there.
func (s *Store) addReferrer(ctx context.Context, r PutRequest, doc *Document) error {
	if doc.Subject == nil {
		return nil
	}
	d := v1.Descriptor{
		MediaType: doc.MediaType, Digest: r.Digest, Size: int64(len(r.Body)),
		ArtifactType: doc.ArtifactType, Annotations: doc.Annotations,
	}
	return s.putRecord(ctx, ReferrerKey(r.Repo, doc.Subject.Digest, r.Digest), d)
}

// Referrers lists what refers to subject in a repository and comes after last, in
// the order of their digests: at most MaxPage of them, and as many as fit an answer
// of MaxManifest bytes. With an artifactType only those of that type. next is the
// last to go on from, "" when there are no more.
func (s *Store) Referrers(ctx context.Context, repo string, subject digest.Digest, artifactType string, last digest.Digest) (list []v1.Descriptor, next digest.Digest, err error) {
	list = []v1.Descriptor{}
	prefix := ReferrersPrefix(repo, subject)
	room := int64(MaxManifest)
	for obj, err := range s.bucket.List(ctx, prefix) {
		if err != nil {
			return nil, "", fmt.Errorf("list referrers of %s in %s: %w", subject, repo, err)
		}
		d, err := parseElems(strings.TrimPrefix(obj.Key, prefix))
		if err != nil || d <= last {
			continue
		}
		if len(list) > 0 && (len(list) == MaxPage || obj.Size > room) {
			return list, list[len(list)-1].Digest, nil
		}
		desc, err := s.referrer(ctx, obj.Key, d)
		if errors.Is(err, bucket.ErrNotFound) {
			continue // deleted meanwhile
		}
		if err != nil {
			return nil, "", err
		}
		if artifactType == "" || desc.ArtifactType == artifactType {
			list, room = append(list, desc), room-obj.Size
		}
	}
	return list, "", nil
}

func (s *Store) referrer(ctx context.Context, key string, d digest.Digest) (v1.Descriptor, error) {
	var desc v1.Descriptor
	raw, err := bucket.ReadObject(ctx, s.bucket, key, maxReferrer)
	if err != nil {
		return desc, err
	}
	if err := json.Unmarshal(raw, &desc); err != nil || desc.Digest != d {
		return desc, fmt.Errorf("%w: %s (push %s again)", ErrDamaged, key, d)
	}
	return desc, nil
}
