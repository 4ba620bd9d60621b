package converter_test

import (
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"strings"
	"testing"

	"quarry/converter"
	"quarry/internal/testimage"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/chunk"
	"quarry/store/image"
)

// asOf makes the stored image of r one of another converter version, signed as
// that version would have signed it. It returns its image id.
func (s *store) asOf(t *testing.T, r *converter.Result, version string) chunk.Digest {
	t.Helper()
	other := r.Statement
	other.Converter = version
	payload, err := image.EncodeStatement(other)
	if err != nil {
		t.Fatal(err)
	}
	sig := signer.Sign(signingKey(t), image.StatementType, payload)
	b, err := sig.Encode()
	if err != nil {
		t.Fatal(err)
	}
	buckettest.Put(t, s.mem, image.StatementKey(r.Source, amd64), payload)
	buckettest.Put(t, s.mem, image.SigKey(r.Source, amd64, sig.KeyID), b)
	return image.ID(payload)
}

// A signature of the old statement that is stored while it is replaced does not stay
// with the new one, which it would spoil.
func TestASignatureThatComesLateIsDeleted(t *testing.T) {
	b := mem.New()
	faulty := &buckettest.Faulty{}
	s := openStore(t, b, faulty)
	src := testimage.Build(t, base).Source("")
	r := s.convert(t, src)
	s.asOf(t, r, "quarry-converter/1")
	late := image.SigKey(r.Source, amd64, strings.Repeat("0", 64))
	came := false
	faulty.Before = func(op buckettest.Op) error {
		if op.Method == "Put" && op.Key == image.StatementKey(r.Source, amd64) {
			came = true
			buckettest.Put(t, b, late, []byte("of the old statement"))
		}
		return nil
	}
	s.convert(t, src)
	if _, err := b.Stat(t.Context(), late); !came || !errors.Is(err, bucket.ErrNotFound) {
		t.Errorf("came %t, and then: %v", came, err)
	}
	s.verified(t, latest)
}

// Another converter's image stays valid until its source is converted again,
// which says so and reads no layer.
func TestAnImageOfAnotherConverterIsReplacedOnlyWhenItIsConvertedAgain(t *testing.T) {
	for _, version := range []string{"quarry-converter/1", "quarry-converter/99", "somebody else's"} {
		s := newStore(t)
		src := testimage.Build(t, base, top).Source("")
		r := s.convert(t, src)
		old := s.asOf(t, r, version)
		if v, files := s.verified(t, latest); v.ID != old || files["big"] != big {
			t.Errorf("%s: image %s, want %s", version, v.ID, old)
		}
		s.convert(t, testimage.Build(t, base).Source("")) // of another source
		if v, _ := s.verified(t, image.Ref{Repo: "img", Digest: &r.Source}); v.ID != old {
			t.Errorf("%s: another conversion made it %s", version, v.ID)
		}
		again := s.convert(t, src)
		if again.ImageID != r.ImageID || again.LayersReused != 2 || again.Statement.Converter != converter.Version {
			t.Errorf("%s: converted again: %+v", version, again)
		}
		warning := strings.Join(again.Warnings, "\n")
		for _, word := range []string{version, converter.Version, old.String()} {
			if !strings.Contains(warning, word) {
				t.Errorf("%s: warning %q does not say %s", version, warning, word)
			}
		}
		if v, _ := s.verified(t, latest); v.ID != r.ImageID {
			t.Errorf("%s: image %s, want %s", version, v.ID, r.ImageID)
		}
		if third := s.convert(t, src); len(third.Warnings) != 0 {
			t.Errorf("%s: the third time: %v", version, third.Warnings)
		}
	}
}

// A layer record of another version is authentic, but says what another program
// read: the layer is read again.
func TestALayerRecordOfAnotherVersionCountsAsUnknown(t *testing.T) {
	for _, version := range []byte{1, 99} {
		s := newStore(t)
		l := testimage.Build(t, base, top)
		r := s.convert(t, l.Source(""))
		keys := buckettest.Keys(t, s.mem, image.LayersPrefix)
		good := buckettest.Bytes(t, s.mem, keys[0])
		other := append([]byte(nil), good[:len(good)-sha256.Size]...)
		other[8] = version
		sum := hmac.New(sha256.New, macKey)
		sum.Write(other)
		buckettest.Put(t, s.mem, keys[0], sum.Sum(other))

		again := s.convert(t, l.Source(""))
		if again.ImageID != r.ImageID || again.LayersReused != 1 {
			t.Errorf("version %d: %+v", version, again)
		}
		if len(again.Warnings) != 1 || !strings.Contains(again.Warnings[0], "read again") || !strings.Contains(again.Warnings[0], "version") {
			t.Errorf("version %d: warnings %q", version, again.Warnings)
		}
		if got := buckettest.Bytes(t, s.mem, keys[0]); string(got) != string(good) {
			t.Errorf("version %d: the record was not replaced", version)
		}
	}
}
