package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/client"
	"quarry/internal/testimage"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
)

// signWorld is a store that signs nothing, with an image that was pushed to it.
type signWorld struct {
	*pushWorld
	*client.Client
	layout *testimage.Layout
	ref    image.Ref // t/x:v1@sha256:…
}

func newSignWorld(t *testing.T) *signWorld {
	t.Helper()
	w := newPushWorld(t, true)
	l := testimage.New(t)
	one, two := testimage.Layer{Entries: []testimage.Entry{testimage.File("a", "1")}}, testimage.Layer{Entries: []testimage.Entry{testimage.File("b", "2")}}
	l.Tag("one", l.Image(testimage.Image{Layers: []testimage.Layer{one}}))
	l.Tag("two", l.Image(testimage.Image{Layers: []testimage.Layer{one, two}}))
	source := w.push(t, l, "one", "v1")
	w.convertAll(t)
	c, err := client.New(client.Config{URL: "http://" + w.url})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return &signWorld{w, c, l, image.Ref{Repo: "t/x", Tag: "v1", Digest: &source}}
}

// newKey makes a key that the store accepts, or not.
func (w *signWorld) newKey(t *testing.T, name string, accepted bool) (path string, key *signer.Key) {
	t.Helper()
	path = filepath.Join(t.TempDir(), name)
	if err := runKeygen(path, io.Discard); err != nil {
		t.Fatal(err)
	}
	key, err := signer.LoadKey(path)
	if err != nil {
		t.Fatal(err)
	}
	if accepted {
		if err := key.Public().Save(filepath.Join(w.dir.keys(), name+".pub")); err != nil {
			t.Fatal(err)
		}
	}
	return path, key
}

// sign runs the command.
func (w *signWorld) sign(t *testing.T, o signOptions, args ...string) (stdout string, err error) {
	t.Helper()
	o.target.store = "http://" + w.url
	var out bytes.Buffer
	err = runSign(t.Context(), o, args, &out, io.Discard)
	return out.String(), err
}

// verified asks for the tag as a worker does that trusts one key.
func (w *signWorld) verified(t *testing.T, key *signer.Key) (*image.Verified, error) {
	t.Helper()
	ref := image.Ref{Repo: "t/x", Tag: "v1"}
	st, err := w.Image(t.Context(), ref, amd64)
	if err != nil {
		return nil, err
	}
	return image.Verify(st.Image, st.Name, image.Want{Ref: ref, Platform: amd64, Trust: signer.NewTrust(key.Public())})
}

var amd64 = image.Platform{OS: "linux", Arch: "amd64"}

func TestAnImageIsSignedFromItsSource(t *testing.T) {
	w := newSignWorld(t)
	path, key := w.newKey(t, "k", true)
	if _, err := w.verified(t, key); !errors.Is(err, api.ErrUnsigned) {
		t.Fatalf("before: error %v", err)
	}
	if out, err := w.sign(t, signOptions{key: path}, "t/x:v1"); !errors.Is(err, errNobodySaid) || !strings.Contains(err.Error(), w.ref.Digest.String()) {
		t.Errorf("a tag alone: %q, %v", out, err)
	}
	out, err := w.sign(t, signOptions{key: path}, w.ref.String())
	if err != nil || out != w.ref.String()+" ("+image.HostPlatform().String()+") signed by "+key.Public().ID()+"\n" {
		t.Fatalf("got %q, %v", out, err)
	}
	v, err := w.verified(t, key)
	if err != nil || v.Name.Source != *w.ref.Digest || v.Name.Serial != 2 || v.Name.Expires != nil {
		t.Fatalf("signed: %+v, %v", v, err)
	}
	for _, again := range []string{w.ref.String(), "t/x:v1"} {
		if out, err := w.sign(t, signOptions{key: path}, again); err != nil || !strings.Contains(out, "already") || w.catalog.Serial("t/x", "v1") != 2 {
			t.Errorf("%s again: %q, %v, serial %d", again, out, err, w.catalog.Serial("t/x", "v1"))
		}
	}
	if _, err := w.sign(t, signOptions{key: path, expires: "2d"}, w.ref.String()); err != nil {
		t.Fatal(err)
	}
	if v, err := w.verified(t, key); err != nil || v.Name.Serial != 3 || v.Name.Expires == nil || v.Name.Expires.Sub(v.Name.Issued) != 48*time.Hour {
		t.Errorf("for two days: %+v, %v", v, err)
	}
}

func TestADigestIsSignedWithoutItsTag(t *testing.T) {
	w := newSignWorld(t)
	path, key := w.newKey(t, "k", true)
	if _, err := w.sign(t, signOptions{key: path}, "t/x@"+w.ref.Digest.String()); err != nil {
		t.Fatal(err)
	}
	ref := image.Ref{Repo: "t/x", Digest: w.ref.Digest}
	st, err := w.Image(t.Context(), ref, amd64)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := image.Verify(st.Image, nil, image.Want{Ref: ref, Platform: amd64, Trust: signer.NewTrust(key.Public())}); err != nil {
		t.Error(err)
	}
	if _, err := w.verified(t, key); !errors.Is(err, api.ErrUnsigned) {
		t.Errorf("its tag: error %v, want unsigned", err)
	}
}

func TestAnIndexIsSignedForEveryPlatform(t *testing.T) {
	w := newSignWorld(t)
	path, key := w.newKey(t, "k", true)
	arm64 := image.Platform{OS: "linux", Arch: "arm64"}
	w.platforms = append(w.platforms, arm64)
	layer := func(name string) []testimage.Layer {
		return []testimage.Layer{{Entries: []testimage.Entry{testimage.File(name, name)}}}
	}
	w.layout.Tag("index", w.layout.Index(
		w.layout.Image(testimage.Image{Layers: layer("amd"), Platform: "linux/amd64"}), w.layout.Image(testimage.Image{Layers: layer("arm"), Platform: "linux/arm64"}),
	))
	source := w.push(t, w.layout, "index", "index")
	ref := image.Ref{Repo: "t/x", Tag: "index", Digest: &source}
	if _, err := w.sign(t, signOptions{key: path}, ref.String()); !errors.Is(err, api.ErrPending) {
		t.Errorf("before it is converted: error %v", err)
	}
	w.convertAll(t)
	if _, err := w.sign(t, signOptions{key: path}, ref.String()); err != nil {
		t.Fatal(err)
	}
	ref.Digest = nil
	for _, p := range []image.Platform{amd64, arm64} {
		st, err := w.Image(t.Context(), ref, p)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := image.Verify(st.Image, st.Name, image.Want{Ref: ref, Platform: p, Trust: signer.NewTrust(key.Public())}); err != nil {
			t.Error(err)
		}
	}
}

// What the index lists and the store does not show is said, and is a failure, unless
// somebody has said that the others are enough.
func TestAPlatformThatTheStoreDoesNotShowIsNamed(t *testing.T) {
	w := newSignWorld(t)
	path, key := w.newKey(t, "k", true)
	layer := func(name string) []testimage.Layer {
		return []testimage.Layer{{Entries: []testimage.Entry{testimage.File(name, name)}}}
	}
	var images []testimage.Descriptor
	for _, p := range []string{"linux/amd64", "linux/arm64", "linux/s390x"} {
		images = append(images, w.layout.Image(testimage.Image{Layers: layer(p), Platform: p}))
	}
	w.layout.Tag("index", w.layout.Index(images...))
	source := w.push(t, w.layout, "index", "index")
	w.convertAll(t) // for amd64
	ref := image.Ref{Repo: "t/x", Tag: "index", Digest: &source}
	for _, tt := range []struct {
		enough []string
		says   string // "" is success
	}{
		{nil, "NOT signed for linux/arm64, linux/s390x, which"},
		{nil, "NOT signed for linux/arm64, linux/s390x, which"}, // also when the rest is signed
		{[]string{"linux/amd64", "linux/arm64"}, "NOT signed for linux/arm64, which"},
		{[]string{"linux/amd64"}, ""},
		{[]string{"linux/amd64", "linux/riscv64"}, ""}, // of which the index says nothing
	} {
		out, err := w.sign(t, signOptions{key: path, platformList: tt.enough}, ref.String())
		if !strings.Contains(out, "(linux/amd64)") || (err == nil) != (tt.says == "") || err != nil && !strings.Contains(err.Error(), tt.says) {
			t.Errorf("%q: got %q, %v", tt.enough, out, err)
		}
	}
	st, err := w.Image(t.Context(), ref, amd64)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := image.Verify(st.Image, st.Name, image.Want{Ref: ref, Platform: amd64, Trust: signer.NewTrust(key.Public())}); err != nil {
		t.Errorf("what the store has: %v", err)
	}
	if _, err := w.sign(t, signOptions{key: path}, w.ref.String()); err != nil {
		t.Errorf("one image: %v", err)
	}
}

// statement returns what the store has of a source, and its key.
func (w *signWorld) statement(t *testing.T, source chunk.Digest) (key string, st image.Statement) {
	t.Helper()
	key = image.StatementKey(source, amd64)
	raw, err := bucket.ReadObject(t.Context(), w.bucket, key, image.MaxStatement)
	if err == nil {
		st, err = image.DecodeStatement(raw)
	}
	if err != nil {
		t.Fatal(err)
	}
	return key, st
}

func TestAStoreThatHasAnotherImageIsRefused(t *testing.T) {
	w := newSignWorld(t)
	path, _ := w.newKey(t, "k", true)
	other := w.push(t, w.layout, "two", "other")
	w.convertAll(t)
	at, st := w.statement(t, *w.ref.Digest)
	_, evil := w.statement(t, other)
	tests := map[string]struct {
		change func(*image.Statement)
		says   string
		honest bool // no damage
	}{
		"another tree": {func(s *image.Statement) {
			s.Bootstrap, s.BootstrapSize, s.Blob, s.Tree = evil.Bootstrap, evil.BootstrapSize, evil.Blob, evil.Tree
		}, "/b, which should not be there", false},
		"a bootstrap that is not there":   {func(s *image.Statement) { s.Bootstrap = chunk.Sum([]byte("x")) }, "its metadata is", false},
		"another config":                  {func(s *image.Statement) { s.Config = evil.Config }, "its config is", false},
		"another tree digest":             {func(s *image.Statement) { s.Tree = evil.Tree }, "another thing", false},
		"another source":                  {func(s *image.Statement) { s.Source = other }, "the statement of source", false},
		"another platform":                {func(s *image.Statement) { s.Platform.Arch = "arm64" }, "linux/arm64", false},
		"the image of another converter":  {func(s *image.Statement) { s.Converter = "quarry-converter/1" }, "sign with the quarry that made it", true},
		"the chunk size of another store": {func(s *image.Statement) { s.ChunkSize *= 2 }, "the chunk size", false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			lie := st
			tt.change(&lie)
			raw, err := image.EncodeStatement(lie)
			if err == nil {
				err = w.bucket.Put(t.Context(), at, bytes.NewReader(raw), int64(len(raw)))
			}
			if err != nil {
				t.Fatal(err)
			}
			_, err = w.sign(t, signOptions{key: path}, w.ref.String())
			if err == nil || !strings.Contains(err.Error(), tt.says) || errors.Is(err, errDamage) == tt.honest {
				t.Errorf("got %v", err)
			}
			if there, err := w.Signable(t.Context(), w.ref); err != nil || there.Images[0].Image != nil || there.Name.Statement != nil {
				t.Errorf("something was signed: %+v, %v", there, err)
			}
		})
	}
}

// signed makes a request as the command makes it.
func (w *signWorld) request(t *testing.T, key *signer.Key, name image.NameStatement, change func([]byte) []byte) api.SignRequest {
	t.Helper()
	at, _ := w.statement(t, *w.ref.Digest)
	raw, err := bucket.ReadObject(t.Context(), w.bucket, at, image.MaxStatement)
	if err != nil {
		t.Fatal(err)
	}
	sig, err := signer.Sign(key, image.StatementType, change(raw)).Encode()
	if err != nil {
		t.Fatal(err)
	}
	name.Issued = time.Unix(1e9, 0)
	payload, err := image.EncodeNameStatement(name)
	if err != nil {
		t.Fatal(err)
	}
	env, err := signer.Envelope{PayloadType: image.NameStatementType, Payload: payload, Signatures: []signer.Signature{signer.Sign(key, image.NameStatementType, payload)}}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return api.SignRequest{Images: []api.ImageSignature{{Platform: "linux/amd64", Signature: sig}}, Name: env}
}

func TestTheStoreHoldsSignaturesAgainstWhatItHas(t *testing.T) {
	w := newSignWorld(t)
	_, key := w.newKey(t, "k", true)
	_, stranger := w.newKey(t, "stranger", false)
	other := w.push(t, w.layout, "two", "other")
	w.convertAll(t)
	same := func(b []byte) []byte { return b }
	name := image.NameStatement{Repo: "t/x", Tag: "v1", Source: *w.ref.Digest, Serial: 2}
	with := func(change func(*image.NameStatement)) api.SignRequest {
		n := name
		change(&n)
		r := w.request(t, key, n, same)
		r.Images = nil
		return r
	}
	arm := w.request(t, key, name, same)
	arm.Images[0].Platform = "linux/arm64"
	noDigest := image.Ref{Repo: "t/x", Tag: "v1"}
	moved := image.Ref{Repo: "t/x", Tag: "other", Digest: w.ref.Digest}
	gone := image.Ref{Repo: "t/x", Tag: "gone", Digest: w.ref.Digest}
	tests := map[string]struct {
		ref  image.Ref
		req  api.SignRequest
		want error
	}{
		"a key that is not accepted":   {w.ref, w.request(t, stranger, name, same), api.ErrBadSignature},
		"a signature of other bytes":   {w.ref, w.request(t, key, name, func(b []byte) []byte { return append(b, ' ') }), api.ErrBadSignature},
		"a platform that is not there": {w.ref, arm, api.ErrImageUnknown},
		"no signature":                 {w.ref, api.SignRequest{Images: []api.ImageSignature{{Platform: "linux/amd64", Signature: []byte(`{}`)}}}, api.ErrBadRequest},
		"no platform":                  {w.ref, api.SignRequest{Images: []api.ImageSignature{{Signature: []byte(`{}`)}}}, api.ErrBadRequest},
		"no digest":                    {noDigest, w.request(t, key, name, same), api.ErrBadRequest},
		"the name of another repo":     {w.ref, with(func(n *image.NameStatement) { n.Repo = "t/y" }), api.ErrBadSignature},
		"the name of another tag":      {w.ref, with(func(n *image.NameStatement) { n.Tag = "other" }), api.ErrBadSignature},
		"another source":               {w.ref, with(func(n *image.NameStatement) { n.Source = other }), api.ErrBadSignature},
		"a serial that was used":       {w.ref, with(func(n *image.NameStatement) { n.Serial = 1 }), catalog.ErrStale},
		"a serial that is far ahead":   {w.ref, with(func(n *image.NameStatement) { n.Serial = 3 }), api.ErrBadSignature},
		"a tag that has moved":         {moved, with(func(n *image.NameStatement) { n.Tag = "other" }), api.ErrMoved},
		"a tag that is gone":           {gone, with(func(n *image.NameStatement) { n.Tag = "gone" }), api.ErrMoved},
	}
	for what, tt := range tests {
		if err := w.Sign(t.Context(), tt.ref, tt.req); !errors.Is(err, tt.want) {
			t.Errorf("%s: error %v, want %v", what, err, tt.want)
		}
	}
	if there, err := w.Signable(t.Context(), w.ref); err != nil || there.Images[0].Image != nil || there.Name.Statement != nil || there.Name.Serial != 1 {
		t.Errorf("something was taken: %+v, %v", there, err)
	}
	if err := w.Sign(t.Context(), w.ref, w.request(t, key, name, same)); err != nil {
		t.Errorf("the right one: %v", err)
	}
	if _, err := w.verified(t, key); err != nil {
		t.Error(err)
	}
}

// replacing is a bucket in which a conversion replaces a statement as a signature of
// the old one is stored, and the client goes.
type replacing struct {
	bucket.Bucket
	at   string
	gone context.CancelFunc
}

func (b replacing) Put(ctx context.Context, key string, body io.ReaderAt, size int64) error {
	if err := b.Bucket.Put(ctx, key, body, size); err != nil {
		return err
	}
	defer b.gone()
	return b.Bucket.Put(ctx, b.at, strings.NewReader("another"), 7)
}

func TestASignatureDoesNotStayWithAnotherStatement(t *testing.T) {
	w := newSignWorld(t)
	_, key := w.newKey(t, "k", true)
	req := w.request(t, key, image.NameStatement{Repo: "t/x", Tag: "v1", Source: *w.ref.Digest, Serial: 2}, func(b []byte) []byte { return b })
	at := image.StatementKey(*w.ref.Digest, amd64)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err := addSignature(ctx, replacing{w.bucket, at, cancel}, *w.ref.Digest, req.Images[0], signer.NewTrust(key.Public()))
	if !errors.Is(err, api.ErrMoved) {
		t.Errorf("error %v, want %v", err, api.ErrMoved)
	}
	if _, err := w.bucket.Stat(t.Context(), image.SigKey(*w.ref.Digest, amd64, key.Public().ID())); !errors.Is(err, bucket.ErrNotFound) {
		t.Errorf("the signature is there: %v", err)
	}
}

func TestKeysAreChanged(t *testing.T) {
	w := newSignWorld(t)
	oldPath, oldKey := w.newKey(t, "old", true)
	newPath, newKey := w.newKey(t, "new", true)
	unsaid := w.push(t, w.layout, "two", "unsaid") // that nobody has signed
	w.convertAll(t)
	if _, err := w.sign(t, signOptions{key: oldPath, expires: "30d"}, w.ref.String()); err != nil {
		t.Fatal(err)
	}
	before, err := w.verified(t, oldKey)
	if err != nil {
		t.Fatal(err)
	}
	all := signOptions{key: newPath, all: true, target: target{trust: oldPath + ".pub"}}
	out, err := w.sign(t, all)
	if err != nil || out != w.ref.String()+" ("+image.HostPlatform().String()+") signed by "+newKey.Public().ID()+"\n" {
		t.Fatalf("got %q, %v", out, err)
	}
	after, err := w.verified(t, newKey)
	if err != nil || after.ID != before.ID || after.Name.Serial != before.Name.Serial+1 || !after.Name.Expires.Equal(*before.Name.Expires) {
		t.Fatalf("before %+v, after %+v, %v", before.Name, after.Name, err)
	}
	if there, err := w.Signable(t.Context(), image.Ref{Repo: "t/x", Tag: "unsaid"}); err != nil || there.Source != unsaid || there.Name.Statement != nil || there.Images[0].Image != nil {
		t.Errorf("what nobody has signed: %+v, %v", there, err)
	}
	// Whoever trusts the old key alone runs the image by its digest until that key is
	// no longer accepted and another signature comes.
	oldSig := image.SigKey(*w.ref.Digest, amd64, oldKey.Public().ID())
	if _, err := w.bucket.Stat(t.Context(), oldSig); err != nil {
		t.Error(err)
	}
	if err := os.Remove(filepath.Join(w.dir.keys(), "old.pub")); err != nil {
		t.Fatal(err)
	}
	if _, err := w.sign(t, signOptions{key: oldPath, expires: "1d"}, w.ref.String()); !errors.Is(err, api.ErrBadSignature) {
		t.Errorf("by the old key: error %v", err)
	}
	thirdPath, _ := w.newKey(t, "third", true)
	if _, err := w.sign(t, signOptions{key: thirdPath}, w.ref.String()); err != nil {
		t.Fatal(err)
	}
	if _, err := w.bucket.Stat(t.Context(), oldSig); !errors.Is(err, bucket.ErrNotFound) {
		t.Errorf("the revoked signature: %v", err)
	}
}

// Exit code 0 of --all lets the old key go, so a name that it has signed and that
// cannot be signed now is a failure.
func TestAllFailsForANameThatIsNotReady(t *testing.T) {
	w := newSignWorld(t)
	oldPath, _ := w.newKey(t, "old", true)
	newPath, newKey := w.newKey(t, "new", true)
	if _, err := w.sign(t, signOptions{key: oldPath}, w.ref.String()); err != nil {
		t.Fatal(err)
	}
	all := signOptions{key: newPath, all: true, target: target{trust: oldPath + ".pub"}}
	w.push(t, w.layout, "one", "again") // which queues the source's job
	if out, err := w.sign(t, all); !errors.Is(err, api.ErrPending) || !strings.Contains(err.Error(), "t/x:v1") || out != "" {
		t.Errorf("while it is converted: %q, %v", out, err)
	}
	w.convertAll(t)
	if _, err := w.sign(t, all); err != nil {
		t.Errorf("afterwards: %v", err)
	}
	if _, err := w.verified(t, newKey); err != nil {
		t.Error(err)
	}
	w.layout.Tag("bad", w.layout.Image(testimage.Image{Layers: []testimage.Layer{{Entries: []testimage.Entry{testimage.File("etc/.wh.", "")}}}}))
	w.push(t, w.layout, "bad", "bad")
	w.convertAll(t)
	if _, err := w.sign(t, all); !errors.Is(err, api.ErrImageFailed) {
		t.Errorf("with an image that failed: %v", err)
	}
}

func TestWhatIsDroppedIsSignedFromElsewhere(t *testing.T) {
	w := newSignWorld(t)
	path, key := w.newKey(t, "k", true)
	layer, _ := w.layout.Layer(testimage.Layer{Entries: []testimage.Entry{testimage.File("a", "1")}})
	w.retain = retention{drop: true}
	if err := w.catalog.DeleteName(t.Context(), "t/x", "v1"); err != nil {
		t.Fatal(err)
	}
	if w.drop(t, time.Hour); !w.has(t, layer.Digest) {
		t.Fatal("the layer went when the image had lost its name, and a signature is still to be made from it")
	}
	byDigest := "t/x@" + w.ref.Digest.String()
	if _, err := w.sign(t, signOptions{key: path}, byDigest); err != nil {
		t.Fatal(err)
	}
	if w.drop(t, time.Hour); w.has(t, layer.Digest) {
		t.Fatal("the layer of a signed image stays")
	}
	again, _ := w.newKey(t, "again", true)
	if _, err := w.sign(t, signOptions{key: again}, byDigest); err == nil || !strings.Contains(err.Error(), "--source") {
		t.Errorf("without layers: error %v", err)
	}
	if _, err := w.sign(t, signOptions{key: again, source: w.layout.Source(":two")}, byDigest); err == nil || !strings.Contains(err.Error(), "another image") {
		t.Errorf("from another source: error %v", err)
	}
	if _, err := w.sign(t, signOptions{key: again, source: w.layout.Source(":one")}, byDigest); err != nil {
		t.Error(err)
	}
	for _, accepted := range [][]string{{key.Public().ID()}, nil} { // what a key that is not accepted has signed is unsigned
		prefix := sourcePrefix(w.ref.Digest.Hex()) + amd64.Key() + "/"
		if set, err := w.imageSet(t.Context(), accepted); err != nil || !set.made[prefix] || set.signed[prefix] != (accepted != nil) {
			t.Errorf("accepted %s: %+v, %v", accepted, set, err)
		}
	}
}

// An image that was collected is not signed any more, so nothing needs its layers.
func TestTheLayersOfAnImageThatIsGoneGo(t *testing.T) {
	w := newSignWorld(t)
	layer, _ := w.layout.Layer(testimage.Layer{Entries: []testimage.Entry{testimage.File("a", "1")}})
	w.retain = retention{drop: true}
	at, _ := w.statement(t, *w.ref.Digest)
	if err := errors.Join(w.catalog.DeleteName(t.Context(), "t/x", "v1"), w.bucket.Delete(t.Context(), at)); err != nil {
		t.Fatal(err)
	}
	if w.drop(t, time.Hour); w.has(t, layer.Digest) {
		t.Error("the layer stays")
	}
}

func TestSignSaysWhatIsWrongWithItsWords(t *testing.T) {
	ref := "t/x:v1@" + chunk.Sum(nil).String()
	for name, tt := range map[string]struct {
		o    signOptions
		args []string
	}{
		"no key":                    {signOptions{}, []string{ref}},
		"nothing to sign":           {signOptions{key: "k"}, nil},
		"all, and one":              {signOptions{key: "k", all: true}, []string{ref}},
		"no name":                   {signOptions{key: "k"}, []string{"T"}},
		"a source for two":          {signOptions{key: "k", source: "oci:x"}, []string{ref, ref}},
		"a source that is none":     {signOptions{key: "k", source: "x"}, []string{ref}},
		"a time without digest":     {signOptions{key: "k", expires: "1d"}, []string{"t/x:v1"}},
		"a time without tag":        {signOptions{key: "k", expires: "1d"}, []string{"t/x@" + chunk.Sum(nil).String()}},
		"a time for all":            {signOptions{key: "k", all: true, expires: "1d"}, nil},
		"a time that is none":       {signOptions{key: "k", expires: "soon"}, []string{ref}},
		"a limit that is not known": {signOptions{key: "k", limits: limits{"X": 1}}, []string{ref}},
	} {
		if err := runSign(t.Context(), tt.o, tt.args, io.Discard, io.Discard); !errors.Is(err, errUsage) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
