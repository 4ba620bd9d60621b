package signer

import (
	"strings"
	"testing"
)

// The vectors of the DSSE protocol page: the first is its own test vector, the
// second follows from its definition with lengths in bytes, not characters.
func TestPAEVectors(t *testing.T) {
	for _, tc := range []struct{ payloadType, payload, want string }{
		{"http://example.com/HelloWorld", "hello world", "DSSEv1 29 http://example.com/HelloWorld 11 hello world"},
		{"t", "é", "DSSEv1 1 t 2 é"},
		{"", "", "DSSEv1 0  0 "},
	} {
		if got := string(pae(tc.payloadType, []byte(tc.payload))); got != tc.want {
			t.Errorf("pae(%q, %q) = %q, want %q", tc.payloadType, tc.payload, got, tc.want)
		}
	}
}

func TestTheLargestPayloadFitsAnEnvelope(t *testing.T) {
	e := Envelope{PayloadType: strings.Repeat("t", MaxPayloadType), Payload: make([]byte, MaxPayload)}
	for i := range MaxSignatures {
		k, err := Generate()
		if err != nil {
			t.Fatalf("key %d: %v", i, err)
		}
		e.Signatures = append(e.Signatures, Sign(k, e.PayloadType, e.Payload))
	}
	b, err := e.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if len(b) > MaxEnvelope {
		t.Fatalf("envelope has %d bytes, more than MaxEnvelope", len(b))
	}
	if _, err := decodeEnvelope(b); err != nil {
		t.Fatal(err)
	}
}
