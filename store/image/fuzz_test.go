package image_test

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"testing"

	"quarry/store/image"
)

func hmacOf(b []byte) []byte {
	h := hmac.New(sha256.New, macKey)
	h.Write(b)
	return h.Sum(nil)
}

// known reports whether err is one of the errors that bad bytes may get.
func known(err error) bool {
	return errors.Is(err, image.ErrMalformed) || errors.Is(err, image.ErrVersion) || errors.Is(err, image.ErrBadMAC)
}

func FuzzDecodeStatement(f *testing.F) {
	f.Add(encodeStatement(f, exampleStatement()))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := image.DecodeStatement(b)
		if err != nil {
			if !known(err) {
				t.Fatalf("untyped error: %v", err)
			}
			return
		}
		if again, err := image.EncodeStatement(s); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%s encodes to %s, %v", b, again, err)
		}
	})
}

func FuzzDecodeNameStatement(f *testing.F) {
	f.Add(encodeName(f, exampleName()))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := image.DecodeNameStatement(b)
		if err != nil {
			if !known(err) {
				t.Fatalf("untyped error: %v", err)
			}
			return
		}
		if again, err := image.EncodeNameStatement(n); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%s encodes to %s, %v", b, again, err)
		}
	})
}

// FuzzDecodeLayer authenticates what it is given, so that the decoder behind
// the MAC sees arbitrary bytes.
func FuzzDecodeLayer(f *testing.F) {
	good := encodeLayer(f, exampleRecord())
	f.Add(good[:len(good)-sha256.Size])
	f.Fuzz(func(t *testing.T, body []byte) {
		b := append(bytes.Clone(body), hmacOf(body)...)
		rec, err := image.DecodeLayer(b, macKey)
		if err != nil {
			if !known(err) {
				t.Fatalf("untyped error: %v", err)
			}
			return
		}
		if again, err := image.EncodeLayer(rec, macKey); err != nil || !bytes.Equal(again, b) {
			t.Fatalf("%x encodes to %x, %v", b, again, err)
		}
	})
}

func FuzzParseRef(f *testing.F) {
	for _, s := range []string{"a", "a/b:c", "a@sha256:" + digest("x").Hex(), "a:b@sha256:" + digest("x").Hex(), "host:5000/a:b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		r, err := image.ParseRef(s)
		if err != nil {
			return
		}
		if again, err := image.ParseRef(r.String()); err != nil || again.String() != r.String() {
			t.Fatalf("%q is %q, which is %q, %v", s, r, again, err)
		}
		if s != r.String() && s+":"+image.DefaultTag != r.String() {
			t.Fatalf("%q became %q", s, r)
		}
	})
}

func FuzzParsePlatform(f *testing.F) {
	for _, s := range []string{"linux/amd64", "Linux/x86_64", "linux/arm64/v8", "linux/arm"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		p, err := image.ParsePlatform(s)
		if err != nil {
			return
		}
		if again, err := image.ParsePlatform(p.String()); err != nil || again != p {
			t.Fatalf("%q is %v, which is %v, %v", s, p, again, err)
		}
	})
}
