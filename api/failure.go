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
// is damaged is logged: it takes nothing from an image that is there.
func (h *Handler) failure(ctx context.Context, ref image.Ref) (*image.Failure, error) {
	if ref.Digest != nil {
		return nil, nil
	}
	key := image.FailureKey(ref.Repo, ref.Tag)
	b, err := readObject(ctx, h.cfg.Bucket, key, image.MaxFailure)
	if errors.Is(err, bucket.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	f, err := image.DecodeFailure(b)
	if err == nil && (f.Repo != ref.Repo || f.Tag != ref.Tag) {
		err = fmt.Errorf("it is the record of %s:%s", f.Repo, f.Tag)
	}
	if err != nil {
		h.log.WarnContext(ctx, "failure record is of no use", "key", key, "error", err)
		return nil, nil
	}
	return &f, nil
}

// whyNone makes of a name that has no image the reason, when a conversion of it
// has left one.
func (h *Handler) whyNone(ctx context.Context, ref image.Ref, unknown error) error {
	f, err := h.failure(ctx, ref)
	if err != nil {
		return err
	}
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
	return &Error{
		Status: http.StatusUnprocessableEntity, Code: codeOf(ErrImageFailed), Blame: blame,
		Message: fmt.Sprintf("%v: %s:%s has no image: %s", ErrImageFailed, f.Repo, f.Tag, f), Details: details,
	}
}

// codeOf returns the code that a sentinel has in the table.
func codeOf(target error) string {
	for _, r := range errorTable {
		if r.target == target {
			return r.code
		}
	}
	return ""
}

// deleteName removes a name, what a conversion of it has left as its reason, or
// both. The reason goes last: it alone makes no image appear.
func (h *Handler) deleteName(ctx context.Context, w *response, rt route) error {
	if rt.ref.Digest != nil {
		return fmt.Errorf("%w: %s: names are deleted by tag, not by digest", ErrBadRequest, rt.ref)
	}
	f, err := h.failure(ctx, rt.ref)
	if err != nil {
		return err
	}
	_, _, err = h.resolve(rt.ref)
	switch {
	case err == nil:
		if err := h.cfg.Names.DeleteName(ctx, rt.ref.Repo, rt.ref.Tag); err != nil {
			return fmt.Errorf("delete name %s: %w", rt.ref, err)
		}
	case f == nil:
		return err
	}
	if f != nil {
		if err := h.cfg.Bucket.Delete(ctx, image.FailureKey(rt.ref.Repo, rt.ref.Tag)); err != nil {
			return fmt.Errorf("delete the failure record of %s: %w", rt.ref, err)
		}
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
