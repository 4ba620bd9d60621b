package signer_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"quarry/signer"
)

func base64Of(b []byte) string { return base64.StdEncoding.EncodeToString(b) }

// rawSeed returns the secret bytes of a key file.
func rawSeed(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(b)
	parsed, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		t.Fatal(err)
	}
	return parsed.(ed25519.PrivateKey).Seed()
}

// fixedKey is a key that is the same in every run, as a corpus must outlive it.
func fixedKey(t testing.TB) *signer.Key {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(ed25519.NewKeyFromSeed(bytes.Repeat([]byte{7}, ed25519.SeedSize)))
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "fixed.key")
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	k, err := signer.LoadKey(path)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// FuzzOpen gives Open arbitrary bytes: whatever it accepts has the one payload
// that was ever signed.
func FuzzOpen(f *testing.F) {
	k := fixedKey(f)
	const payload = `{"some":"payload"}`
	f.Add(seal(f, payload, k))
	f.Add([]byte(`{"payload":"","payloadType":"t","signatures":[]}`))
	trust := signer.NewTrust(k.Public())
	f.Fuzz(func(t *testing.T, b []byte) {
		got, id, err := signer.Open(b, testType, trust)
		if err == nil {
			if string(got) != payload || id != k.Public().ID() {
				t.Fatalf("payload %q by %q accepted", got, id)
			}
			return
		}
		for _, known := range []error{signer.ErrMalformed, signer.ErrWrongKey, signer.ErrAltered, signer.ErrPayloadType} {
			if errors.Is(err, known) {
				return
			}
		}
		t.Fatalf("untyped error: %v", err)
	})
}

// FuzzFlippedBit flips one bit of an envelope of an arbitrary payload.
func FuzzFlippedBit(f *testing.F) {
	k := fixedKey(f)
	f.Add([]byte("payload"), uint(3))
	f.Fuzz(func(t *testing.T, payload []byte, bit uint) {
		if len(payload) > signer.MaxPayload {
			return // no envelope takes it
		}
		env, trust := seal(t, string(payload), k), signer.NewTrust(k.Public())
		if got, _, err := signer.Open(env, testType, trust); err != nil || !bytes.Equal(got, payload) {
			t.Fatalf("Open = %q, %v; want %q", got, err, payload)
		}
		bit %= uint(len(env)) * 8
		env[bit/8] ^= 1 << (bit % 8)
		if _, _, err := signer.Open(env, testType, trust); err == nil {
			t.Fatalf("accepted with bit %d flipped", bit)
		}
	})
}

func FuzzDecodeSignature(f *testing.F) {
	b, err := signer.Sign(fixedKey(f), testType, nil).Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := signer.DecodeSignature(b)
		if err != nil {
			if !errors.Is(err, signer.ErrMalformed) {
				t.Fatalf("untyped error: %v", err)
			}
			return
		}
		again, err := s.Encode()
		if err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%q encodes to %q, %v", b, again, err)
		}
	})
}

// A difference here is a change of the format: signatures already made would
// no longer open.
func TestGoldenEnvelope(t *testing.T) {
	want, err := os.ReadFile(filepath.Join("testdata", "envelope.golden"))
	if err != nil {
		t.Fatal(err)
	}
	if got := seal(t, `{"some":"payload"}`, fixedKey(t)); !bytes.Equal(got, want) {
		t.Errorf("the golden envelope is now\n%s", got)
	}
}
