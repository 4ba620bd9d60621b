package signer

import (
	"bytes"
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"

	"quarry/internal/strictjson"
)

// MaxSignature bounds the text of one signature object in bytes.
const MaxSignature = 1 << 10

// Envelope is what goes into a DSSE envelope. It can be encoded and not
// decoded: the way back is Open.
type Envelope struct {
	PayloadType string
	Payload     []byte
	Signatures  []Signature
}

// wireEnvelope and wireSignature are the JSON forms, in DSSE's field order.
// Base64 stays text here, as encoding/json's own decoder takes line breaks.
type wireEnvelope struct {
	Payload     string          `json:"payload"`
	PayloadType string          `json:"payloadType"`
	Signatures  []wireSignature `json:"signatures"`
}

type wireSignature struct {
	KeyID string `json:"keyid"`
	Sig   string `json:"sig"`
}

// Encode returns the envelope as DSSE v1 JSON, one line without spaces. It
// fails with ErrMalformed on what Open would refuse, no signature among it.
func (e Envelope) Encode() ([]byte, error) {
	if err := e.validate(); err != nil {
		return nil, fmt.Errorf("envelope: %w", err)
	}
	w := wireEnvelope{
		Payload:     base64.StdEncoding.EncodeToString(e.Payload),
		PayloadType: e.PayloadType,
		Signatures:  make([]wireSignature, len(e.Signatures)),
	}
	for i, s := range e.Signatures {
		w.Signatures[i] = s.wire()
	}
	return json.Marshal(w)
}

// MarshalJSON is Encode, so that an envelope can stand in a JSON document.
func (e Envelope) MarshalJSON() ([]byte, error) { return e.Encode() }

// UnmarshalJSON always fails: it would hand out a payload nobody verified.
func (e *Envelope) UnmarshalJSON([]byte) error {
	return errors.New("an envelope is read with signer.Open, which verifies it")
}

func (e Envelope) validate() error {
	if len(e.Payload) > MaxPayload {
		return fmt.Errorf("%w: payload of %d bytes, at most %d", ErrMalformed, len(e.Payload), MaxPayload)
	}
	if n := len(e.PayloadType); n == 0 || n > MaxPayloadType {
		return fmt.Errorf("%w: payload type of %d bytes, want 1 to %d", ErrMalformed, n, MaxPayloadType)
	}
	for _, c := range []byte(e.PayloadType) {
		if c <= ' ' || c > '~' || bytes.IndexByte([]byte(`"\<>&`), c) >= 0 {
			return fmt.Errorf("%w: payload type %q has a character that a media type has not", ErrMalformed, e.PayloadType)
		}
	}
	if n := len(e.Signatures); n == 0 || n > MaxSignatures {
		return fmt.Errorf("%w: %d signatures, want 1 to %d", ErrMalformed, n, MaxSignatures)
	}
	seen := make(map[string]bool, len(e.Signatures))
	for _, s := range e.Signatures {
		if err := s.validate(); err != nil {
			return err
		}
		if seen[s.KeyID] {
			return fmt.Errorf("%w: two signatures by key %s", ErrMalformed, s.KeyID)
		}
		seen[s.KeyID] = true
	}
	return nil
}

// decodeEnvelope reads exactly what Encode writes. It is not exported, as its
// result is not verified.
func decodeEnvelope(b []byte) (Envelope, error) {
	w, err := strictjson.Decode[wireEnvelope](b, MaxEnvelope)
	if err != nil {
		return Envelope{}, fmt.Errorf("%w: %w", ErrMalformed, err)
	}
	payload, err := decodeBase64(w.Payload)
	if err != nil {
		return Envelope{}, fmt.Errorf("%w: payload: %w", ErrMalformed, err)
	}
	e := Envelope{PayloadType: w.PayloadType, Payload: payload, Signatures: make([]Signature, len(w.Signatures))}
	for i, s := range w.Signatures {
		if e.Signatures[i], err = s.signature(); err != nil {
			return Envelope{}, err
		}
	}
	if err := e.validate(); err != nil {
		return Envelope{}, err
	}
	return e, nil
}

// Encode returns the signature as one line of JSON, as it stands in an
// envelope. It fails with ErrMalformed on an impossible key id or length.
func (s Signature) Encode() ([]byte, error) {
	if err := s.validate(); err != nil {
		return nil, err
	}
	return json.Marshal(s.wire())
}

// DecodeSignature reads exactly what Encode writes. It verifies nothing: put
// the signature in an Envelope beside its payload and Open that.
func DecodeSignature(b []byte) (Signature, error) {
	w, err := strictjson.Decode[wireSignature](b, MaxSignature)
	if err != nil {
		return Signature{}, fmt.Errorf("signature: %w: %w", ErrMalformed, err)
	}
	s, err := w.signature()
	if err != nil {
		return Signature{}, err
	}
	if err := s.validate(); err != nil {
		return Signature{}, err
	}
	return s, nil
}

func (s Signature) validate() error {
	if err := validKeyID(s.KeyID); err != nil {
		return err
	}
	if len(s.Sig) != ed25519.SignatureSize {
		return fmt.Errorf("%w: signature by key %s has %d bytes, want %d", ErrMalformed, s.KeyID, len(s.Sig), ed25519.SignatureSize)
	}
	return nil
}

func (s Signature) wire() wireSignature {
	return wireSignature{KeyID: s.KeyID, Sig: base64.StdEncoding.EncodeToString(s.Sig)}
}

func (w wireSignature) signature() (Signature, error) {
	sig, err := decodeBase64(w.Sig)
	if err != nil {
		return Signature{}, fmt.Errorf("%w: signature by key %q: %w", ErrMalformed, w.KeyID, err)
	}
	return Signature{KeyID: w.KeyID, Sig: sig}, nil
}

// decodeBase64 takes standard base64 in the one form that EncodeToString
// writes: the standard decoder skips line breaks and takes loose last bits.
func decodeBase64(text string) ([]byte, error) {
	b, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		return nil, err
	}
	if base64.StdEncoding.EncodeToString(b) != text {
		return nil, errors.New("base64 that is not in its one form")
	}
	return b, nil
}
