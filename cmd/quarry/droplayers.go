package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/go-digest"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"quarry/converter/oci"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/jobs"
	"quarry/store/registry"
)

// retainer drops the layers of images that are converted, signed and old enough. What
// any other manifest of a repository names stays, whether it has a tag or not.
type retainer struct {
	*owner

	// seen is when each source without a name and a job was first found converted, and
	// done those whose layers went, by when they were due. Both have only sources that
	// are in a repository.
	seen, done map[chunk.Digest]time.Time

	// looked is the state that the last round found and did all for: reading every
	// manifest again would find the same.
	looked [sha256.Size]byte
}

// dropLayers does one round.
func (r *retainer) dropLayers(ctx context.Context, now time.Time) error {
	sources, err := r.manifests(ctx)
	if err != nil {
		return err
	}
	accepted, err := r.accepted()
	if err != nil {
		return err
	}
	images, err := r.imageSet(ctx, accepted.KeyIDs())
	if err != nil {
		return err
	}
	due := r.due(sources, images, now)
	if len(due) == 0 {
		return nil // the cheap case: two lists of keys
	}
	state := r.state(sources, due, images)
	if state == r.looked {
		return nil // as cheap: what is due is held by what held it before
	}
	inGrace := false
	u, err := r.usesOf(ctx, sources, due, images)
	if err != nil {
		return err
	}
	for source, since := range due {
		all := !u.unready[source]
		for _, d := range u.layers[source] {
			if u.needed[d] {
				all = false
				continue
			}
			gone, err := r.registry.Drop(ctx, d, registry.ContentKey(d), r.retainGrace)
			if err != nil {
				return err
			}
			all, inGrace = all && gone, inGrace || !gone
		}
		if all {
			r.done[source] = since
		}
	}
	if !inGrace {
		r.looked = state
	}
	return nil
}

// state sums up what a round goes by. Manifests do not change, and what is due stays in
// it when its layers went.
func (r *retainer) state(sources []chunk.Digest, due map[chunk.Digest]time.Time, images imageSet) [sha256.Size]byte {
	var facts []string
	add := func(kind string, what any) { facts = append(facts, fmt.Sprintln(kind, what)) }
	for _, s := range sources {
		add("manifest", s)
	}
	for _, m := range []map[chunk.Digest]time.Time{due, r.done} {
		for s, since := range m {
			add("due", fmt.Sprint(s, since.UnixNano()))
		}
	}
	for key := range images.made {
		add("made", key)
	}
	for key := range images.signed {
		add("signed", key)
	}
	for _, s := range r.jobs.Sources() {
		add("job", s)
	}
	for _, n := range r.catalog.Names() {
		add("name", n.Source)
	}
	slices.Sort(facts)
	return sha256.Sum256([]byte(strings.Join(facts, "")))
}

// imageSet is which images a store has, by the prefixes of their keys: of each image, and
// of its source. signed are those with a signature by one of the keys.
type imageSet struct{ made, signed map[string]bool }

func (o *owner) imageSet(ctx context.Context, keys []string) (imageSet, error) {
	set := imageSet{map[string]bool{}, map[string]bool{}}
	for obj, err := range o.bucket.List(ctx, image.ImagesPrefix) {
		if err != nil {
			return set, err
		}
		source, rest, _ := strings.Cut(strings.TrimPrefix(obj.Key, image.ImagesPrefix), "/")
		platform, what, _ := strings.Cut(rest, "/")
		of := set.signed
		if key, ok := strings.CutPrefix(what, "sigs/"); what == "statement" {
			of = set.made
		} else if !ok || !slices.Contains(keys, key) {
			continue
		}
		of[sourcePrefix(source)], of[sourcePrefix(source)+platform+"/"] = true, true
	}
	return set, nil
}

func sourcePrefix(hex string) string { return image.ImagesPrefix + hex + "/" }

// due are the sources whose layers may go as far as time is concerned, and since when:
// the end of their jobs, when these are still listed; else when the newest of their
// names was moved to them, which was before; else when this process first saw them. An
// image that was converted, has no name and is not there any more was collected.
func (r *retainer) due(sources []chunk.Digest, images imageSet, now time.Time) map[chunk.Digest]time.Time {
	named, hasName := map[chunk.Digest]time.Time{}, map[chunk.Digest]bool{}
	for _, n := range r.catalog.Names() {
		hasName[n.Source] = true
		if since := r.catalog.NameSince(n.Repo, n.Tag); since.After(named[n.Source]) {
			named[n.Source] = since
		}
	}
	ended := map[chunk.Digest]time.Time{}
	list, _ := r.jobs.List(jobs.Filter{State: jobs.Done, Limit: jobs.DefaultKeep})
	for _, st := range list {
		if st.Ended.After(ended[st.Source]) {
			ended[st.Source] = *st.Ended
		}
	}
	due, seen, done := map[chunk.Digest]time.Time{}, map[chunk.Digest]time.Time{}, map[chunk.Digest]time.Time{}
	for _, s := range sources {
		since, ok := ended[s]
		collected := ok && !hasName[s] && !images.made[sourcePrefix(s.Hex())]
		if !images.signed[sourcePrefix(s.Hex())] && !collected {
			continue
		}
		if !ok {
			since, ok = named[s]
		}
		if !ok {
			if since, ok = r.seen[s]; !ok {
				since = now
			}
			seen[s] = since
		}
		if was, ok := r.done[s]; ok && was.Equal(since) {
			done[s] = was
		} else if now.Sub(since) >= r.retain.after {
			due[s] = since
		}
	}
	r.seen, r.done = seen, done
	return due
}

// uses say what the manifests of a store need of its layers.
type uses struct {
	layers  map[chunk.Digest][]digest.Digest // of the images of sources that are due
	unready map[chunk.Digest]bool            // due sources of which an image is still to be made or signed
	needed  map[digest.Digest]bool
}

// usesOf finds what must stay. An image is told by its config and its layers: the
// manifest that a conversion takes out of an image index is no other image than the
// index's; one with the same config and a layer compressed otherwise is another.
func (r *retainer) usesOf(ctx context.Context, sources []chunk.Digest, due map[chunk.Digest]time.Time, images imageSet) (*uses, error) {
	u := &uses{layers: map[chunk.Digest][]digest.Digest{}, unready: map[chunk.Digest]bool{}, needed: map[digest.Digest]bool{}}
	wanted := map[chunk.Digest]bool{} // an image of it is made, or is to be
	for _, n := range r.catalog.Names() {
		wanted[n.Source] = true
	}
	active := map[chunk.Digest]bool{}
	for _, s := range r.jobs.Sources() {
		active[s] = true
	}
	going := map[string]bool{} // images whose layers may go, by blobsOf
	for _, s := range sources {
		_, isDue := due[s]
		if _, gone := r.done[s]; gone {
			isDue = true
		}
		if !wanted[s] && !active[s] && !images.signed[sourcePrefix(s.Hex())] && !isDue {
			continue
		}
		if err := r.addImages(ctx, u, going, s, isDue && !active[s], images); err != nil {
			return nil, err
		}
	}
	// What is a manifest and no image that is going: one without a tag that nobody has
	// converted, an artifact, one for a platform that is not converted.
	for _, s := range sources {
		doc, err := r.document(ctx, s)
		if err != nil {
			return nil, err
		}
		if doc == nil || len(doc.Blobs) == 0 {
			continue
		}
		var blobs []digest.Digest
		for _, b := range doc.Blobs {
			blobs = append(blobs, b.Digest)
		}
		if going[blobsOf(blobs)] {
			continue
		}
		for _, b := range blobs {
			u.needed[b] = true
		}
	}
	return u, nil
}

// blobsOf names an image by its config and then its layers.
func blobsOf(blobs []digest.Digest) string { return fmt.Sprint(blobs) }

// addImages adds the images of a source: what they need stays, unless they are going.
func (r *retainer) addImages(ctx context.Context, u *uses, going map[string]bool, source chunk.Digest, mayGo bool, images imageSet) error {
	content := pushedContent{store: r.registry}
	platforms, err := oci.Platforms(ctx, content, source, r.platforms)
	if err != nil {
		return err
	}
	for _, p := range platforms {
		prefix := sourcePrefix(source.Hex())
		if p != (image.Platform{}) {
			prefix += p.Key() + "/"
		}
		config, layers, err := oci.LayersOf(ctx, content, source, p)
		if errors.Is(err, oci.ErrContent) || ctx.Err() != nil {
			return errors.Join(err, ctx.Err())
		}
		if err != nil {
			u.unready[source] = true
			continue // what is no image has no layers; one that lacks something is not made
		}
		blobs := []digest.Digest{digest.Digest(config.String())}
		for _, l := range layers {
			blobs = append(blobs, digest.Digest(l.String()))
		}
		if mayGo && (images.signed[prefix] || !images.made[sourcePrefix(source.Hex())]) {
			going[blobsOf(blobs)] = true
			u.layers[source] = append(u.layers[source], blobs[1:]...)
			continue
		}
		u.unready[source] = true
		for _, l := range blobs[1:] {
			u.needed[l] = true
		}
	}
	return nil
}

// document reads a manifest that was pushed; nil when its content is gone or damaged,
// which names nothing.
func (r *retainer) document(ctx context.Context, source chunk.Digest) (*registry.Document, error) {
	body, _, err := r.registry.Open(ctx, digest.Digest(source.String()))
	if errors.Is(err, registry.ErrBlobUnknown) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer body.Close()
	raw, err := io.ReadAll(io.LimitReader(body, registry.MaxManifest+1))
	if errors.Is(err, registry.ErrDamaged) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read manifest %s: %w", source, err)
	}
	// It was taken by the media type that it was sent with, which not all of them say.
	for _, mediaType := range []string{"", v1.MediaTypeImageManifest, v1.MediaTypeImageIndex} {
		if doc, err := registry.ParseManifest(mediaType, raw); err == nil {
			return doc, nil
		}
	}
	return nil, nil
}
