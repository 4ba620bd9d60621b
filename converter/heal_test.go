package converter_test

import (
	"bytes"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/internal/testimage"
	"quarry/signer"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/chunk"
	"quarry/store/image"
)

func TestARecordOfNoUseIsMadeAnew(t *testing.T) {
	otherKey := func(t *testing.T, s *store, key string) { s.MACKey = bytes.Repeat([]byte{9}, 32) }
	tests := map[string]struct {
		damage  func(t *testing.T, s *store, key string)
		warning string
	}{
		"a flipped byte":              {func(t *testing.T, s *store, key string) { buckettest.Corrupt(t, s.mem, key, 100) }, "not authentic"},
		"a cut record":                {func(t *testing.T, s *store, key string) { buckettest.Put(t, s.mem, key, []byte("x")) }, "of no use"},
		"another data folder's":       {otherKey, "not authentic"},
		"another layer's":             {plantOther, "it is the record of layer"},
		"a chunk that was condemned":  {condemn, ""},
		"a record of another version": {func(t *testing.T, s *store, key string) { buckettest.Corrupt(t, s.mem, key, 8) }, "version"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			l := testimage.Build(t, base)
			d, _ := l.Layer(base)
			digest, err := chunk.Parse(d.Digest)
			if err != nil {
				t.Fatal(err)
			}
			first := s.convert(t, l.Source(""))
			tt.damage(t, s, image.LayerKey(digest))
			second := s.convert(t, l.Source(""))
			if second.LayersReused != 0 || second.ImageID != first.ImageID {
				t.Errorf("after the damage: %+v", second)
			}
			if got := strings.Join(second.Warnings, "\n"); !strings.Contains(got, tt.warning) || tt.warning == "" && got != "" {
				t.Errorf("warnings %q, want %q", got, tt.warning)
			}
			if third := s.convert(t, l.Source("")); third.LayersReused != 1 || len(third.Warnings) != 0 {
				t.Errorf("once it was healed: %+v", third)
			}
			s.verified(t, latest)
		})
	}
}

func plantOther(t *testing.T, s *store, key string) {
	l := testimage.Build(t, top)
	d, _ := l.Layer(top)
	s.convert(t, l.Source(""))
	other, err := chunk.Parse(d.Digest)
	if err != nil {
		t.Fatal(err)
	}
	buckettest.Put(t, s.mem, key, buckettest.Bytes(t, s.mem, image.LayerKey(other)))
}

func condemn(t *testing.T, s *store, _ string) {
	d := chunk.Sum([]byte("debian"))
	locs, found, err := s.index.LookupBatch(t.Context(), []chunk.Digest{d})
	if err != nil || !found[0] {
		t.Fatalf("chunk is not there: %v", err)
	}
	if err := s.Store.Condemn(t.Context(), d, locs[0]); err != nil {
		t.Fatal(err)
	}
}

func TestDamagedObjectsAreHealed(t *testing.T) {
	s := newStore(t)
	l := testimage.Build(t, base)
	r := s.convert(t, l.Source(""))
	want := s.objects(t)
	for key := range want {
		if !strings.HasPrefix(key, "layers/") {
			buckettest.Corrupt(t, s.mem, key, 20)
		}
	}
	if again := s.convert(t, l.Source("")); again.ImageID != r.ImageID {
		t.Errorf("image id %s, want %s", again.ImageID, r.ImageID)
	}
	if diff := cmp.Diff(s.objects(t), want); diff != "" {
		t.Errorf("objects (-got +want):\n%s", diff)
	}
}

// Two images with the same chunks have one virtual blob. The mapping of the first
// stays, which both count as their own.
func TestTheFirstMappingOfABlobStays(t *testing.T) {
	s := newStore(t)
	first := testimage.Build(t, layerOf(testimage.File("a", big))).Source("")
	second := testimage.Build(t, layerOf(testimage.File("b", big))).Source("")
	one, two := s.convert(t, first), s.convert(t, second)
	if one.Statement.Bootstrap == two.Statement.Bootstrap || *one.Statement.Blob != *two.Statement.Blob {
		t.Fatalf("want two bootstraps and one blob, got %+v and %+v", one.Statement, two.Statement)
	}
	v := *one.Statement.Blob
	if d := s.wantMapping(t, v); d != one.Statement.Bootstrap {
		t.Errorf("blob leads to %s, want the first bootstrap %s", d, one.Statement.Bootstrap)
	}
	want := s.objects(t)
	s.Limits.Tree.Names = 1 // merging would fail: both are known
	s.convert(t, first)
	s.convert(t, second)
	if diff := cmp.Diff(s.objects(t), want); diff != "" {
		t.Errorf("objects (-got +want):\n%s", diff)
	}
}

func TestAMappingThatLeadsNowhereIsReplaced(t *testing.T) {
	for name, mapping := range map[string]func(t *testing.T, s *store) string{
		"to no bootstrap": func(*testing.T, *store) string { return chunk.Sum(nil).String() },
		"to one of another blob": func(t *testing.T, s *store) string {
			return s.convert(t, testimage.Build(t, top).Source("")).Statement.Bootstrap.String()
		},
		"to one that is damaged": func(t *testing.T, s *store) string {
			l := layerOf(testimage.File("z", big))
			d := s.convert(t, testimage.Build(t, l).Source("")).Statement.Bootstrap
			buckettest.Corrupt(t, s.mem, image.BootstrapKey(d), 5000)
			return d.String()
		},
		"no digest": func(*testing.T, *store) string { return "sha256:x" },
		"too long":  func(*testing.T, *store) string { return strings.Repeat("x", 100) },
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t)
			src := testimage.Build(t, layerOf(testimage.File("a", big))).Source("")
			r := s.convert(t, src)
			buckettest.Put(t, s.mem, image.BlobKey(*r.Statement.Blob), []byte(mapping(t, s)))
			s.convert(t, src)
			if d := s.wantMapping(t, *r.Statement.Blob); d != r.Statement.Bootstrap {
				t.Errorf("blob leads to %s, want %s", d, r.Statement.Bootstrap)
			}
		})
	}
}

func TestAStatementThatIsTooLargeIsHealed(t *testing.T) {
	s := newStore(t)
	src := testimage.Build(t, base).Source("")
	r := s.convert(t, src)
	buckettest.Put(t, s.mem, image.StatementKey(r.Source, amd64), make([]byte, image.MaxStatement+1))
	s.convert(t, src)
	if v, _ := s.verified(t, latest); v.ID != r.ImageID {
		t.Errorf("image id %s, want %s", v.ID, r.ImageID)
	}
}

// The order in which a statement is replaced is what readers rely on, see
// image.StatementKey.
func TestAStatementIsReplacedBetweenItsSignatures(t *testing.T) {
	b := mem.New()
	faulty := &buckettest.Faulty{}
	s := openStore(t, b, faulty)
	src := testimage.Build(t, base).Source("")
	r := s.convert(t, src)
	old := r.Statement
	old.Converter = "quarry-converter/0"
	payload, err := image.EncodeStatement(old)
	if err != nil {
		t.Fatal(err)
	}
	statement := image.StatementKey(r.Source, amd64)
	buckettest.Put(t, b, statement, payload)
	var got []string
	faulty.Before = func(op buckettest.Op) error {
		if (op.Method == "Put" || op.Method == "Delete") && strings.HasPrefix(op.Key, image.ImagesPrefix) {
			got = append(got, op.Method+" "+op.Key)
		}
		return nil
	}
	s.convert(t, src)
	sig := image.SigKey(r.Source, amd64, signingKey(t).Public().ID())
	if diff := cmp.Diff(got, []string{"Delete " + sig, "Put " + statement, "Put " + sig}); diff != "" {
		t.Errorf("writes (-got +want):\n%s", diff)
	}
}

func TestASecondKeySignsTheSameStatement(t *testing.T) {
	s := newStore(t)
	l := testimage.Build(t, base)
	r := s.convert(t, l.Source(""))
	other, err := signer.Generate()
	if err != nil {
		t.Fatal(err)
	}
	s.SigningKey = other
	if again := s.convert(t, l.Source("")); again.ImageID != r.ImageID {
		t.Errorf("image id %s, want %s", again.ImageID, r.ImageID)
	}
	if keys := buckettest.Keys(t, s.mem, image.SigPrefix(r.Source, amd64)); len(keys) != 2 {
		t.Errorf("signatures %v, want both keys'", keys)
	}
	s.trust = signer.NewTrust(signingKey(t).Public(), other.Public())
	s.verified(t, latest)
}

func TestASignatureThatIsNotOursIsReplaced(t *testing.T) {
	s := newStore(t)
	l := testimage.Build(t, base)
	r := s.convert(t, l.Source(""))
	want := s.objects(t)
	key := image.SigKey(r.Source, amd64, signingKey(t).Public().ID())
	forged, err := signer.Signature{KeyID: signingKey(t).Public().ID(), Sig: make([]byte, 64)}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	buckettest.Put(t, s.mem, key, forged)
	s.convert(t, l.Source(""))
	if diff := cmp.Diff(s.objects(t), want); diff != "" {
		t.Errorf("objects (-got +want):\n%s", diff)
	}
}

func TestAnotherConvertersStatementIsReplacedWithItsSignatures(t *testing.T) {
	s := newStore(t)
	l := testimage.Build(t, base)
	r := s.convert(t, l.Source(""))
	old := r.Statement
	old.Converter = "quarry-converter/0"
	payload, err := image.EncodeStatement(old)
	if err != nil {
		t.Fatal(err)
	}
	buckettest.Put(t, s.mem, image.StatementKey(r.Source, amd64), payload)
	buckettest.Put(t, s.mem, image.SigKey(r.Source, amd64, strings.Repeat("ab", 32)), []byte("of the old statement"))
	s.convert(t, l.Source(""))
	if v, _ := s.verified(t, latest); v.ID != r.ImageID {
		t.Errorf("image id %s, want %s", v.ID, r.ImageID)
	}
}
