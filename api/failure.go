package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"quarry/store/bucket"
	"quarry/store/image"
)

// failure returns what the store remembers of the newest conversion of a tag
// that did not end well; nil when it did, or when ref is a digest. A record that
// cannot be read is logged: it takes nothing from an image that is there.
func (h *Handler) failure(ctx context.Context, ref image.Ref) *image.Failure {
	if ref.Digest != nil {
		return nil
	}
	key := image.FailureKey(ref.Repo, ref.Tag)
	var f image.Failure
	b, err := bucket.ReadObject(ctx, h.cfg.Bucket, key, image.MaxFailure)
	if errors.Is(err, bucket.ErrNotFound) {
		return nil
	}
	if err == nil {
		f, err = image.DecodeFailure(b)
	}
	if err == nil && (f.Repo != ref.Repo || f.Tag != ref.Tag) {
		err = fmt.Errorf("it is the record of %s:%s", f.Repo, f.Tag)
	}
	if err != nil {
		h.log.WarnContext(ctx, "failure record is of no use", "key", key, "error", err)
		return nil
	}
	return &f
}

// whyNone makes of a name that has no image the reason, when a conversion of it
// has left one.
func (h *Handler) whyNone(ctx context.Context, ref image.Ref, unknown error) error {
	f := h.failure(ctx, ref)
	if f == nil {
		return unknown
	}
	blame := BlameInfra
	if f.Blame == image.BlameInput {
		blame = BlameUser
	}
	details := map[string][]string{
		"state": {f.State}, "source": {f.Source}, "time": {f.Time.Format(time.RFC3339Nano)},
	}
	if f.Blame != "" {
		details["failure_blame"] = []string{f.Blame}
	}
	e := toError(fmt.Errorf("%w: %s:%s has no image: %s", ErrImageFailed, f.Repo, f.Tag, f))
	e.Blame, e.Details = blame, details
	return e
}

// deleteName removes a name, what a conversion of it has left as its reason, or
// both. What the reason is, or whether it can be read, does not matter. The reason goes last: it alone makes no image appear.
func (h *Handler) deleteName(ctx context.Context, w *response, rt route) error {
	if rt.ref.Digest != nil {
		return fmt.Errorf("%w: %s: names are deleted by tag, not by digest", ErrBadRequest, rt.ref)
	}
	key := image.FailureKey(rt.ref.Repo, rt.ref.Tag)
	_, err := h.cfg.Bucket.Stat(ctx, key)
	failed := err == nil || errors.Is(err, bucket.ErrDamaged)
	if !failed && !errors.Is(err, bucket.ErrNotFound) {
		return fmt.Errorf("failure record of %s: %w", rt.ref, err)
	}
	_, _, err = h.resolve(rt.ref)
	switch {
	case err == nil:
		if err := h.cfg.Names.DeleteName(ctx, rt.ref.Repo, rt.ref.Tag); err != nil {
			return fmt.Errorf("delete name %s: %w", rt.ref, err)
		}
	case !failed:
		return err
	}
	if failed {
		if err := h.cfg.Bucket.Delete(ctx, key); err != nil {
			return fmt.Errorf("delete the failure record of %s: %w", rt.ref, err)
		}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
