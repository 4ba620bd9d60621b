package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"

	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/jobs"
)

// Signable answers GET /v1/signatures/<ref>: what there is of an image to sign, and
// who has. Nobody has verified any of it.
type Signable struct {
	Source chunk.Digest    `json:"source"`
	Name   *SignableName   `json:"name"` // null when ref has no tag, or one that names nothing
	Images []SignableImage `json:"images"`
}

// SignableName is what a tag names.
type SignableName struct {
	Source    chunk.Digest    `json:"source"`
	Serial    uint64          `json:"serial"`    // the highest that was used for the name
	Statement json.RawMessage `json:"statement"` // DSSE envelope of the name statement, null when unsigned
}

// SignableImage is the image of a source for one platform.
type SignableImage struct {
	Platform  string          `json:"platform"`
	Statement []byte          `json:"statement"` // payload of the image statement
	Image     json.RawMessage `json:"image"`     // its DSSE envelope, null when nobody has signed it
}

// SignRequest is the body of POST /v1/signatures/<ref>, where ref has a digest.
type SignRequest struct {
	Images []ImageSignature `json:"images"`
	// Name is the DSSE envelope of a name statement for ref's repository and tag,
	// with the next serial; null or absent: the name stays as it is.
	Name json.RawMessage `json:"name,omitempty"`
}

// ImageSignature is a signature of the image statement that the store has of ref's
// source and this platform.
type ImageSignature struct {
	Platform  string          `json:"platform"`
	Signature json.RawMessage `json:"signature"` // signature object, signer/FORMAT.md
}

const (
	// MaxSignRequest bounds a request: 64 signature objects of 1 KiB at most, and the
	// envelope of a name.
	MaxSignRequest = 256 << 10
	// MaxSignImages bounds its images: each costs some requests of the bucket, and a
	// signature that is valid may be sent again by anybody.
	MaxSignImages = 64
)

// serveSignatures says what there is to sign, and takes signatures.
func (h *Handler) serveSignatures(ctx context.Context, w *response, r *http.Request, rt route) error {
	if rt.op == opSignatures {
		s, err := h.signable(ctx, rt)
		if err != nil {
			return err
		}
		return writeJSON(w, http.StatusOK, s)
	}
	if h.cfg.Sign == nil {
		return fmt.Errorf("%w: signing", ErrNotOffered)
	}
	if rt.ref.Digest == nil {
		return fmt.Errorf("%w: %s: what is signed is REPO[:TAG]@sha256:…", ErrBadRequest, rt.ref)
	}
	var req SignRequest
	if err := decodeJSON(w, r, MaxSignRequest, &req); err != nil {
		return err
	}
	if len(req.Images) > MaxSignImages {
		return fmt.Errorf("%w: %d signatures, at most %d are taken at once", ErrBadRequest, len(req.Images), MaxSignImages)
	}
	if err := h.cfg.Sign(ctx, rt.ref, req); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// signable finds what there is to sign. An image that is still being made for one
// platform is not signed for the others: one signing is enough.
func (h *Handler) signable(ctx context.Context, rt route) (*Signable, error) {
	source, _, err := h.resolve(rt.ref)
	if err != nil {
		return nil, h.whyNone(ctx, rt.ref, err)
	}
	if h.cfg.Jobs != nil {
		for _, st := range h.cfg.Jobs.Of(source) {
			if st.State == jobs.Queued || st.State == jobs.Running {
				return nil, JobError(rt.ref, st)
			}
		}
	}
	platforms, err := h.platforms(ctx, source)
	if err != nil {
		return nil, err
	}
	if len(platforms) == 0 {
		return nil, h.notConverted(ctx, rt, source)
	}
	s := &Signable{Source: source}
	if n, ok := h.cfg.Names.Name(rt.ref.Repo, rt.ref.Tag); ok {
		s.Name = &SignableName{Source: n.Source, Serial: n.Serial, Statement: json.RawMessage(n.Statement)}
	}
	for _, p := range platforms {
		payload, sigs, err := h.statement(ctx, source, p)
		if err != nil {
			return nil, err
		}
		im := SignableImage{Platform: p.String(), Statement: payload}
		if len(sigs) > 0 {
			if im.Image, err = (signer.Envelope{PayloadType: image.StatementType, Payload: payload, Signatures: sigs}).Encode(); err != nil {
				return nil, fmt.Errorf("%w: image statement of %s for %s: %w (convert the image again to heal it)", ErrObjectCorrupt, source, p, err)
			}
		}
		s.Images = append(s.Images, im)
	}
	return s, nil
}
