// Package signer signs statements with Ed25519 keys and opens signed ones, in
// DSSE envelopes. There is one way to a payload, Open, and it returns nothing
// that a trusted key did not sign, so no caller can use a statement and forget
// to verify it.
package signer

import (
	"crypto/ed25519"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"quarry/store/chunk"
)

var (
	// ErrMalformed says that bytes are not an envelope, a signature or a key file
	// in the one form this package writes.
	ErrMalformed = errors.New("malformed")
	// ErrWrongKey says that no signature of an envelope is by a trusted key.
	ErrWrongKey = errors.New("not signed by a trusted key")
	// ErrAltered says that a signature that names a trusted key does not verify:
	// payload, payload type or signature were changed after signing.
	ErrAltered = errors.New("signature does not verify")
	// ErrPayloadType says that an envelope holds another kind of payload.
	ErrPayloadType = errors.New("wrong payload type")
)

const (
	// MaxEnvelope bounds the text of an envelope in bytes. Statements have some
	// hundred bytes, so this only keeps a liar from filling memory.
	MaxEnvelope = 1 << 20
	// MaxPayload is what fits an envelope: base64 makes 4 bytes of 3, and 16 KiB
	// are more than MaxSignatures signatures and a type need.
	MaxPayload = (MaxEnvelope - 16<<10) / 4 * 3
	// MaxSignatures bounds the signatures of one envelope.
	MaxSignatures = 16
	// MaxPayloadType bounds the length of a payload type.
	MaxPayloadType = 255
)

// Signature is one key's signature of one payload of one type.
type Signature struct {
	KeyID string // which key claims to have made it: a hint, not signed itself
	Sig   []byte // ed25519.SignatureSize bytes
}

// Sign signs a payload of the given type. Payloads that Envelope.Encode would
// refuse can be signed but not sent.
func Sign(k *Key, payloadType string, payload []byte) Signature {
	return Signature{KeyID: k.pub.ID(), Sig: ed25519.Sign(k.priv(), pae(payloadType, payload))}
}

// pae is DSSE's pre-authentication encoding: what is signed. The lengths keep
// type and payload from running into each other.
func pae(payloadType string, payload []byte) []byte {
	b := make([]byte, 0, len("DSSEv1")+len(payloadType)+len(payload)+32)
	b = append(b, "DSSEv1 "...)
	b = strconv.AppendInt(b, int64(len(payloadType)), 10)
	b = append(b, ' ')
	b = append(b, payloadType...)
	b = append(b, ' ')
	b = strconv.AppendInt(b, int64(len(payload)), 10)
	b = append(b, ' ')
	return append(b, payload...)
}

// Open verifies an envelope and returns its payload with the id of the trusted
// key that signed it, the first one when several did. The envelope must hold
// the wanted payload type and be in the exact form that Envelope.Encode writes.
// Signatures by keys that are not trusted say nothing and are passed over, but
// every one that names a trusted key must verify. Errors: ErrMalformed,
// ErrPayloadType, ErrWrongKey, ErrAltered.
func Open(envelope []byte, payloadType string, trust Trust) (payload []byte, keyID string, err error) {
	e, err := decodeEnvelope(envelope)
	if err != nil {
		return nil, "", fmt.Errorf("envelope: %w", err)
	}
	if e.PayloadType != payloadType {
		return nil, "", fmt.Errorf("%w: want %s, the envelope has %s", ErrPayloadType, payloadType, e.PayloadType)
	}
	message := pae(e.PayloadType, e.Payload)
	for _, s := range e.Signatures {
		pub, ok := trust.keys[s.KeyID]
		if !ok {
			continue
		}
		if !ed25519.Verify(pub.key[:], message, s.Sig) {
			return nil, "", fmt.Errorf("%w: %s with the content of this envelope, by trusted key %s; get it again from its signer",
				ErrAltered, e.PayloadType, s.KeyID)
		}
		if keyID == "" {
			keyID = s.KeyID
		}
	}
	if keyID == "" {
		return nil, "", wrongKey(e.Signatures, trust)
	}
	return e.Payload, keyID, nil
}

// wrongKey names both sides, so that a reader sees which file is missing.
func wrongKey(sigs []Signature, trust Trust) error {
	found := make([]string, len(sigs))
	for i, s := range sigs {
		found[i] = s.KeyID
	}
	trusted := strings.Join(trust.KeyIDs(), ", ")
	if trusted == "" {
		trusted = "none"
	}
	return fmt.Errorf("%w: signed by %s; trusted: %s; if you trust the signer, add its .pub file to the trusted keys",
		ErrWrongKey, strings.Join(found, ", "), trusted)
}

// validKeyID checks the form of a key id, 64 lower-case hex digits.
func validKeyID(id string) error {
	if _, err := chunk.ParseHex(id); err != nil {
		return fmt.Errorf("%w: key id %q: want 64 lower-case hex digits", ErrMalformed, id)
	}
	return nil
}
