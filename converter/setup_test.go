package converter_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"quarry/chunkindex"
	"quarry/converter"
	"quarry/internal/testimage"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/packed"
)

const testChunk = chunk.MinSize

var (
	macKey = bytes.Repeat([]byte{7}, image.MACKeySize)
	amd64  = image.Platform{OS: "linux", Arch: "amd64"}
	now    = time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
)

// store is what a data folder holds, in memory.
type store struct {
	converter.Config
	mem   *mem.Bucket
	index *chunkindex.Index
	trust signer.Trust
}

// openStore opens the store of b, through faulty when it is not nil, with a new
// index, as after a crash that lost it.
func openStore(t testing.TB, b *mem.Bucket, faulty *buckettest.Faulty) *store {
	t.Helper()
	var (
		objects bucket.Bucket  = b
		journal bucket.Journal = b
	)
	if faulty != nil {
		faulty.Bucket, faulty.Journal = b, b
		objects, journal = faulty, faulty
	}
	index, err := chunkindex.Open(chunkindex.Config{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := index.Close(); err != nil {
			t.Error(err)
		}
	})
	names, err := catalog.Open(t.Context(), catalog.Config{Journal: journal})
	if err != nil {
		t.Fatal(err)
	}
	chunks, err := packed.Open(t.Context(), packed.Config{Bucket: objects, Catalog: names, Index: index, ChunkSize: testChunk, TmpDir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	key := signingKey(t)
	return &store{
		Config: converter.Config{
			Store: chunks, Bucket: objects, Catalog: names, ChunkSize: testChunk,
			MACKey: macKey, SigningKey: key, Now: func() time.Time { return now },
		},
		mem: b, index: index, trust: signer.NewTrust(key.Public()),
	}
}

func newStore(t testing.TB) *store { return openStore(t, mem.New(), nil) }

// theKey is made once, so that signatures can be compared between stores.
var theKey *signer.Key

func signingKey(t testing.TB) *signer.Key {
	t.Helper()
	if theKey == nil {
		k, err := signer.Generate()
		if err != nil {
			t.Fatal(err)
		}
		theKey = k
	}
	return theKey
}

// request names src latest of the repository img.
func request(src string) converter.Request {
	return converter.Request{Source: src, Name: image.Ref{Repo: "img", Tag: "latest"}}
}

func (s *store) convert(t testing.TB, src string) *converter.Result {
	t.Helper()
	r, err := converter.Convert(t.Context(), s.Config, request(src))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// fail converts src and checks that the error says words and that no name moved.
func (s *store) fail(t *testing.T, src string, words ...string) error {
	t.Helper()
	before, had := s.Catalog.Name("img", "latest")
	_, err := converter.Convert(t.Context(), s.Config, request(src))
	if err == nil {
		t.Fatalf("%s was converted, want an error with %q", src, words)
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("error %q does not say %q", err, w)
		}
	}
	if after, has := s.Catalog.Name("img", "latest"); has != had || after.Serial != before.Serial {
		t.Errorf("a failed conversion moved the name from %+v to %+v", before, after)
	}
	return err
}

// objects returns the bytes of all objects but packs, which may differ in how
// chunks are spread over them, and failure records, which have a time.
func (s *store) objects(t testing.TB) map[string]string {
	t.Helper()
	all := map[string]string{}
	for _, key := range buckettest.Keys(t, s.mem, "") {
		if !strings.HasPrefix(key, "packs/") && !strings.HasPrefix(key, image.FailuresPrefix) {
			all[key] = string(buckettest.Bytes(t, s.mem, key))
		}
	}
	return all
}

// verified reads an image as a worker does, from statements to every chunk.
func (s *store) verified(t testing.TB, ref image.Ref) (*image.Verified, map[string]string) {
	t.Helper()
	name, _ := s.Catalog.Name(ref.Repo, ref.Tag)
	source := name.Source
	if ref.Digest != nil {
		source = *ref.Digest
	}
	payload := buckettest.Bytes(t, s.mem, image.StatementKey(source, amd64))
	var sigs []signer.Signature
	for _, key := range buckettest.Keys(t, s.mem, image.SigPrefix(source, amd64)) {
		sig, err := signer.DecodeSignature(buckettest.Bytes(t, s.mem, key))
		if err != nil {
			t.Fatal(err)
		}
		sigs = append(sigs, sig)
	}
	envelope, err := signer.Envelope{PayloadType: image.StatementType, Payload: payload, Signatures: sigs}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	v, err := image.Verify(envelope, name.Statement, image.Want{Ref: ref, Platform: amd64, Trust: s.trust, Now: now})
	if err != nil {
		t.Fatal(err)
	}
	return v, s.files(t, v.Statement)
}

// layerOf is a layer of the entries.
func layerOf(entries ...testimage.Entry) testimage.Layer { return testimage.Layer{Entries: entries} }

var latest = image.Ref{Repo: "img", Tag: "latest"}
