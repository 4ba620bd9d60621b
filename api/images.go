package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
)

// maxPlatformKeys bounds the listing of what one source has been converted to:
// some hundred platforms with signer.MaxSignatures signatures each.
const maxPlatformKeys = 4096

// maxReplaced is how often a statement is read again because it was replaced.
const maxReplaced = 4

// maxSigKeys bounds the signature objects looked at, the unusable included.
const maxSigKeys = 256

func (h *Handler) serveNames(w *response, r *http.Request, rt route) error {
	visible, err := h.visible(r)
	if err != nil {
		return err
	}
	page := NamesPage{Names: []NameInfo{}}
	for _, n := range h.cfg.Names.Names() {
		if rt.after != "" && compareName(n, rt.after) <= 0 || !visible(n.Repo) {
			continue
		}
		if len(page.Names) == rt.limit {
			last := page.Names[rt.limit-1]
			page.Next = last.Repo + ":" + last.Tag
			break
		}
		info := NameInfo{Repo: n.Repo, Tag: n.Tag, Source: n.Source, Serial: n.Serial}
		if since := h.cfg.Names.NameSince(n.Repo, n.Tag); !since.IsZero() {
			since = since.UTC()
			info.Since = &since
		}
		page.Names = append(page.Names, info)
	}
	return writeJSON(w, http.StatusOK, page)
}

// compareName orders a name against a cursor of the form REPO:TAG, by
// repository first, as the catalog does.
func compareName(n catalog.Name, cursor string) int {
	repo, tag, _ := strings.Cut(cursor, ":")
	if c := strings.Compare(n.Repo, repo); c != 0 {
		return c
	}
	return strings.Compare(n.Tag, tag)
}

func (h *Handler) serveImage(ctx context.Context, w *response, rt route) error {
	s, err := h.signed(ctx, rt)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, Image{Status: StatusReady, Name: s.name, Image: s.image, Failure: h.failure(ctx, rt.ref)})
}

// signedImage is what the store has to prove what an image is.
type signedImage struct {
	source   chunk.Digest
	platform image.Platform
	payload  []byte // the image statement; nobody has verified it
	name     []byte // envelope of the name statement, nil when asked by digest
	image    []byte // envelope of the image statement
}

// signed finds the signed statements of the image that is asked for.
func (h *Handler) signed(ctx context.Context, rt route) (*signedImage, error) {
	source, nameEnv, err := h.resolve(rt.ref)
	if err != nil {
		return nil, h.whyNone(ctx, rt.ref, err)
	}
	p, err := h.choosePlatform(ctx, rt, source)
	if err != nil {
		return nil, err
	}
	payload, sigs, err := h.statement(ctx, source, p)
	if err != nil {
		return nil, err
	}
	if len(sigs) == 0 || (rt.ref.Digest == nil && len(nameEnv) == 0) {
		return nil, fmt.Errorf("%w: %s for %s", ErrUnsigned, rt.ref, p)
	}
	env, err := signer.Envelope{PayloadType: image.StatementType, Payload: payload, Signatures: sigs}.Encode()
	if err != nil {
		return nil, fmt.Errorf("%w: image statement of %s for %s: %w (convert the image again to heal it)", ErrObjectCorrupt, source, p, err)
	}
	return &signedImage{source: source, platform: p, payload: payload, name: nameEnv, image: env}, nil
}

// statement reads an image statement and its signatures. A conversion may
// replace both meanwhile; as image.StatementKey tells, the signatures are those
// of a statement that reads the same before and after them.
func (h *Handler) statement(ctx context.Context, source chunk.Digest, p image.Platform) ([]byte, []signer.Signature, error) {
	key := image.StatementKey(source, p)
	payload, err := readObject(ctx, h.cfg.Bucket, key, image.MaxStatement)
	if err != nil {
		return nil, nil, err
	}
	for range maxReplaced {
		sigs, err := h.signatures(ctx, source, p)
		if err != nil {
			return nil, nil, err
		}
		again, err := readObject(ctx, h.cfg.Bucket, key, image.MaxStatement)
		if err != nil {
			return nil, nil, err
		}
		if bytes.Equal(payload, again) {
			return payload, sigs, nil
		}
		payload = again
	}
	return nil, nil, fmt.Errorf("%w: %s is being replaced", ErrBusy, key)
}

// resolve returns the source digest that a reference names, and the signed name
// statement when it names it by tag. A digest always means the source digest,
// whatever repository stands before it: pinned images outlive their tags.
func (h *Handler) resolve(ref image.Ref) (chunk.Digest, []byte, error) {
	if ref.Digest != nil {
		return *ref.Digest, nil, nil
	}
	if n, ok := h.cfg.Names.Name(ref.Repo, ref.Tag); ok {
		return n.Source, n.Statement, nil
	}
	tags := h.cfg.Names.Tags(ref.Repo)
	if len(tags) > MaxNames {
		tags = tags[:MaxNames]
	}
	if len(tags) == 0 {
		return chunk.Digest{}, nil, fmt.Errorf("%w: no image is named %s", ErrRepoUnknown, ref.Repo)
	}
	return chunk.Digest{}, nil, &detailedError{
		err:     fmt.Errorf("%w: %s has no tag %s, but has %s", ErrTagUnknown, ref.Repo, ref.Tag, shortList(tags)),
		details: map[string][]string{"tags": tags},
	}
}

// shortList writes a list for a message; Details has all of it.
func shortList(items []string) string {
	const most = 10
	if len(items) <= most {
		return strings.Join(items, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(items[:most], ", "), len(items)-most)
}

// choosePlatform returns the platform asked for, or the only one there is. It
// fails when the source was not converted for it.
func (h *Handler) choosePlatform(ctx context.Context, rt route, source chunk.Digest) (image.Platform, error) {
	have, err := h.platforms(ctx, source)
	if err != nil {
		return image.Platform{}, err
	}
	want := rt.platform
	if want != nil && slices.Contains(have, *want) {
		return *want, nil
	}
	if want == nil && len(have) == 1 {
		return have[0], nil
	}
	if len(have) == 0 {
		return image.Platform{}, h.notConverted(ctx, rt, source)
	}
	if want != nil && h.cfg.Job != nil {
		if err := h.cfg.Job(ctx, rt.ref, source, *want); err != nil {
			return image.Platform{}, err
		}
	}
	names := make([]string, len(have))
	for i, p := range have {
		names[i] = p.String()
	}
	problem := fmt.Errorf("%w: say which with ?platform=, %s is stored for %s", ErrBadRequest, rt.ref, shortList(names))
	if want != nil {
		problem = fmt.Errorf("%w: %s is stored for %s, not for %s", ErrPlatformUnknown, rt.ref, shortList(names), want)
	}
	return image.Platform{}, &detailedError{err: problem, details: map[string][]string{"platforms": names}}
}

// notConverted says why a source has no statement at all: a job may know. That of
// a name was there when the name was made, so it is damage.
func (h *Handler) notConverted(ctx context.Context, rt route, source chunk.Digest) error {
	if h.cfg.Job != nil {
		var p image.Platform // any
		if rt.platform != nil {
			p = *rt.platform
		}
		if err := h.cfg.Job(ctx, rt.ref, source, p); err != nil {
			return err
		}
	}
	if rt.ref.Digest == nil {
		return fmt.Errorf("%w: %s names source %s, and its image statement is gone (convert the image again to heal it)", ErrObjectCorrupt, rt.ref, source)
	}
	return fmt.Errorf("%w: %s: the store has no image of source %s", ErrImageUnknown, rt.ref, source)
}

// platforms lists what a source has image statements for, in bytewise order.
func (h *Handler) platforms(ctx context.Context, source chunk.Digest) ([]image.Platform, error) {
	prefix := image.ImagesPrefix + source.Hex() + "/"
	var out []image.Platform
	n := 0
	for obj, err := range h.cfg.Bucket.List(ctx, prefix) {
		if err != nil {
			return nil, fmt.Errorf("list platforms of %s: %w", source, err)
		}
		if n++; n > maxPlatformKeys {
			return nil, fmt.Errorf("list platforms of %s: more than %d objects under %s", source, maxPlatformKeys, prefix)
		}
		key, rest, _ := strings.Cut(strings.TrimPrefix(obj.Key, prefix), "/")
		if rest != "statement" {
			continue
		}
		if p, err := image.ParsePlatform(strings.ReplaceAll(key, "-", "/")); err == nil {
			out = append(out, p)
		}
	}
	return out, nil
}

// signatures reads the signature objects of an image statement. One that is
// damaged, or lies under a key that is not its own or was listed before, is left
// out and logged, since the others still prove the statement.
func (h *Handler) signatures(ctx context.Context, source chunk.Digest, p image.Platform) ([]signer.Signature, error) {
	var sigs []signer.Signature
	n, last := 0, ""
	for obj, err := range h.cfg.Bucket.List(ctx, image.SigPrefix(source, p)) {
		if err != nil {
			return nil, fmt.Errorf("list signatures of %s for %s: %w", source, p, err)
		}
		if n++; len(sigs) == signer.MaxSignatures || n > maxSigKeys {
			break
		}
		b, err := readObject(ctx, h.cfg.Bucket, obj.Key, signer.MaxSignature)
		if errors.Is(err, bucket.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, err
		}
		sig, err := signer.DecodeSignature(b)
		if own := image.SigKey(source, p, sig.KeyID); err == nil && (obj.Key != own || obj.Key <= last) {
			err = fmt.Errorf("it is by key %s, or was listed before", sig.KeyID)
		}
		if err != nil {
			h.log.WarnContext(ctx, "signature object left out", "key", obj.Key, "error", err)
			continue
		}
		sigs, last = append(sigs, sig), obj.Key
	}
	return sigs, nil
}
