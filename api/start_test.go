package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/signer"
	"quarry/store/bucket"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
)

// imageID returns the id of a published image.
func imageID(t *testing.T, w *apitest.World, img *apitest.Image) chunk.Digest {
	t.Helper()
	payload, err := bucket.ReadObject(t.Context(), w.Bucket, image.StatementKey(img.Source, img.Platform), image.MaxStatement)
	if err != nil {
		t.Fatal(err)
	}
	return image.ID(payload)
}

func TestAStartHasAllOfAnImage(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "team/python:3.13", 200, 1)
	id := imageID(t, w, img)
	srv, _ := w.Serve(t, nil)
	trust := signer.NewTrust(w.Key.Public())
	for _, ref := range []image.Ref{img.Ref, {Repo: img.Ref.Repo, Digest: &img.Source}} {
		for query, known := range map[string]bool{
			"":                                   false,
			"?platform=" + img.Platform.String(): false,
			"?have=" + chunk.Sum(nil).Hex():      false,
			"?have=" + id.Hex():                  true,
			"?platform=" + img.Platform.String() + "&have=" + id.Hex(): true,
		} {
			a := ask(t, "GET", srv.URL+"/v1/start/"+ref.String()+query, "")
			if a.StatusCode != 200 || a.Header.Get("Content-Type") != api.TypeStart || a.Header.Get("Cache-Control") != "no-store" {
				t.Fatalf("%s%s: status %d, headers %v, body %q", ref, query, a.StatusCode, a.Header, a.body)
			}
			parts, err := decodeStart(a.body, (*api.StartReader).Bytes)
			if err != nil {
				t.Fatalf("%s%s: %v", ref, query, err)
			}
			got := map[api.PartType][]byte{}
			for _, p := range parts {
				got[p.Type] = p.payload
			}
			v, err := image.Verify(got[api.PartImage], got[api.PartName], image.Want{Ref: ref, Platform: img.Platform, Trust: trust})
			if err != nil || v.ID != id || (got[api.PartName] != nil) != (ref.Digest == nil) {
				t.Errorf("%s%s: verified %+v, name statement %q, error %v", ref, query, v, got[api.PartName], err)
			}
			if known {
				if len(got[api.PartConfig])+len(got[api.PartBootstrap]) > 0 || len(a.body) > 4096 {
					t.Errorf("%s%s: %d bytes for an image that the client has", ref, query, len(a.body))
				}
				continue
			}
			if !bytes.Equal(got[api.PartConfig], img.Config) || !bytes.Equal(got[api.PartBootstrap], img.Bootstrap) {
				t.Errorf("%s%s: config or bootstrap differ", ref, query)
			}
			if len(a.body) >= len(img.Bootstrap) {
				t.Errorf("%s%s: the bootstrap was not compressed", ref, query)
			}
		}
	}
}

func TestAStartFailsAsTheImageDoes(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a/b:v1", 1, 1)
	unsigned := w.Publish(t, "a/unsigned:v1", 1, 2)
	if err := w.Bucket.Delete(t.Context(), image.SigKey(unsigned.Source, unsigned.Platform, w.Key.Public().ID())); err != nil {
		t.Fatal(err)
	}
	pending, failed := chunk.Sum([]byte("pending")), chunk.Sum([]byte("failed"))
	srv, _ := w.Serve(t, twoJobs(pending, failed))
	for _, ref := range []string{
		"a/nothing:v1", "a/b", "a/b@" + chunk.Sum(nil).String(), "a/b:v1?platform=plan9/mips", "a/b@" + failed.String(),
		"a/b@" + pending.String(), "a/unsigned:v1", "a/b:v1?limit=1",
	} {
		got, want := ask(t, "GET", srv.URL+"/v1/start/"+ref, ""), ask(t, "GET", srv.URL+"/v1/images/"+ref, "")
		if got.StatusCode != want.StatusCode || got.StatusCode < 202 || got.Header.Get("Retry-After") != want.Header.Get("Retry-After") {
			t.Errorf("%s: got status %d, headers %v, want %d, %v", ref, got.StatusCode, got.Header, want.StatusCode, want.Header)
		}
		if got, want := withoutID(t, got.body), withoutID(t, want.body); got != want {
			t.Errorf("%s: got %s, want %s", ref, got, want)
		}
	}
	wantError(t, ask(t, "GET", srv.URL+"/v1/start/a/b:v1?have=xyz", ""), 400, "bad_request")
	wantError(t, ask(t, "GET", srv.URL+"/v1/images/a/b:v1?have="+img.Source.Hex(), ""), 400, "bad_request")
	wantError(t, ask(t, "POST", srv.URL+"/v1/start/a/b:v1", ""), 405, "method_not_allowed")
}

// withoutID returns a JSON document without the id of its request.
func withoutID(t *testing.T, body []byte) string {
	t.Helper()
	var doc map[string]any
	if err := json.Unmarshal(body, &doc); err != nil {
		t.Fatalf("%q: %v", body, err)
	}
	if e, ok := doc["error"].(map[string]any); ok {
		delete(e, "request_id")
	}
	b, err := json.Marshal(doc)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestDamageFoundBeforeAStartIsAnError(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 3, 1)
	srv, _ := w.Serve(t, nil)
	for key, body := range map[string][]byte{
		image.BootstrapKey(chunk.Sum(img.Bootstrap)): img.Bootstrap,
		image.ConfigKey(chunk.Sum(img.Config)):       img.Config,
		image.StatementKey(img.Source, img.Platform): nil,
	} {
		old, err := bucket.ReadObject(t.Context(), w.Bucket, key, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		flipped := bytes.Clone(old)
		flipped[len(old)/2] ^= 1
		if body == nil {
			flipped = []byte("{}")
		}
		for _, bad := range [][]byte{flipped, append(bytes.Clone(old), ' ')} {
			w.PutObject(t, key, bad)
			e := wantError(t, ask(t, "GET", srv.URL+"/v1/start/a:b", ""), 500, "object_corrupt")
			if !strings.Contains(e.Message, key) {
				t.Errorf("message %q does not name %s", e.Message, key)
			}
		}
		w.PutObject(t, key, old)
		if body == nil {
			continue
		}
		if err := w.Bucket.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		if e := wantError(t, ask(t, "GET", srv.URL+"/v1/start/a:b", ""), 500, "object_corrupt"); !strings.Contains(e.Message, key) || !strings.Contains(e.Message, "convert the image again") {
			t.Errorf("message %q does not name %s and what to do", e.Message, key)
		}
		w.PutObject(t, key, old)
	}
}

// failingReads lets some reads of one key pass and fails the later ones.
type failingReads struct {
	bucket.Bucket
	key  string
	pass atomic.Int64
}

func (b *failingReads) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	if key == b.key && b.pass.Add(-1) < 0 {
		return errors.New("disk on fire")
	}
	return b.Bucket.ReadAt(ctx, key, p, off)
}

// largeBootstrap gives img a bootstrap of that size, of bytes that compress to
// about the given share of 16.
func largeBootstrap(t *testing.T, w *apitest.World, img *apitest.Image, size, share int) {
	t.Helper()
	img.Bootstrap = make([]byte, size)
	rnd := rand.New(rand.NewPCG(1, 2))
	for i := range img.Bootstrap {
		if i>>12%16 < share {
			img.Bootstrap[i] = byte(rnd.Uint32())
		}
	}
	w.PutObject(t, image.BootstrapKey(chunk.Sum(img.Bootstrap)), img.Bootstrap)
	w.PutStatement(t, img, true)
}

func TestLargeBootstrapsAreSentWhole(t *testing.T) {
	for name, c := range map[string]struct {
		size, share int
		codec       pack.Codec
	}{
		"compressed, held":     {12 << 20, 1, pack.Zstd},
		"compressed, not held": {12 << 20, 15, pack.Zstd},
		"raw":                  {8 << 20, 16, pack.Raw},
	} {
		w := apitest.New(t)
		img := w.Publish(t, "a:b", 1, 1)
		largeBootstrap(t, w, img, c.size, c.share)
		srv, _ := w.Serve(t, nil)
		parts, err := decodeStart(ask(t, "GET", srv.URL+"/v1/start/a:b", "").body, (*api.StartReader).Bytes)
		if err != nil || len(parts) != 4 || !bytes.Equal(parts[3].payload, img.Bootstrap) {
			t.Fatalf("%s: %d parts, error %v", name, len(parts), err)
		}
		if got := parts[3].Codec; got != c.codec {
			t.Errorf("%s: got codec %d, want %d", name, got, c.codec)
		}
	}
}

func TestABootstrapThatWasSentIsNotReadAgain(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 1, 1)
	largeBootstrap(t, w, img, 12<<20, 1)
	b := &failingReads{Bucket: w.Bucket, key: image.BootstrapKey(chunk.Sum(img.Bootstrap))}
	b.pass.Store(1 << 20)
	srv, _ := w.Serve(t, func(c *api.Config) { c.Bucket = b })
	for range 3 {
		parts, err := decodeStart(ask(t, "GET", srv.URL+"/v1/start/a:b", "").body, (*api.StartReader).Bytes)
		if err != nil || len(parts) != 4 || !bytes.Equal(parts[3].payload, img.Bootstrap) {
			t.Fatalf("%d parts, error %v", len(parts), err)
		}
		b.pass.Store(0)
	}
}

// Many workers that start one image at once have its bootstrap read once.
func TestABurstOfStartsReadsTheBootstrapOnce(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 1, 1)
	largeBootstrap(t, w, img, 2<<20, 1)
	b := &failingReads{Bucket: w.Bucket, key: image.BootstrapKey(chunk.Sum(img.Bootstrap))}
	b.pass.Store(2 << 20 / (256 << 10)) // as many as one reading of it takes
	srv, _ := w.Serve(t, func(c *api.Config) { c.Bucket = b })
	var g errgroup.Group
	for range 64 {
		g.Go(func() error {
			res, err := http.Get(srv.URL + "/v1/start/a:b")
			if err != nil {
				return err
			}
			defer res.Body.Close()
			body, err := io.ReadAll(res.Body)
			if err != nil || res.StatusCode != http.StatusOK {
				return fmt.Errorf("%s: %.200s (%w)", res.Status, body, err)
			}
			parts, err := decodeStart(body, (*api.StartReader).Bytes)
			if err == nil && (len(parts) != 4 || !bytes.Equal(parts[3].payload, img.Bootstrap)) {
				err = fmt.Errorf("%d parts, or another bootstrap", len(parts))
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
}

func TestAStartThatFailsHalfWayIsCutOff(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 1, 1)
	largeBootstrap(t, w, img, 8<<20, 16)
	srv, _ := w.Serve(t, func(c *api.Config) {
		b := &failingReads{Bucket: w.Bucket, key: image.BootstrapKey(chunk.Sum(img.Bootstrap))}
		b.pass.Store(32 + 16) // all of the first reading, half of the second
		c.Bucket = b
	})
	if a, err := tryAsk(t, "GET", srv.URL+"/v1/start/a:b", ""); err == nil {
		t.Errorf("status %d with a whole body of %d bytes", a.StatusCode, len(a.body))
	}
}

func TestASignatureUnderAnotherKeyIsLeftOut(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 1, 1)
	own := image.SigKey(img.Source, img.Platform, w.Key.Public().ID())
	sig, err := bucket.ReadObject(t.Context(), w.Bucket, own, signer.MaxSignature)
	if err != nil {
		t.Fatal(err)
	}
	w.PutObject(t, image.SigKey(img.Source, img.Platform, strings.Repeat("0", 64)), sig)
	w.PutObject(t, image.SigKey(img.Source, img.Platform, strings.Repeat("f", 64)), sig)
	w.PutObject(t, own+"/"+w.Key.Public().ID(), sig)
	srv, _ := w.Serve(t, nil)
	a := ask(t, "GET", srv.URL+"/v1/images/a:b", "")
	var got api.Image
	if err := json.Unmarshal(a.body, &got); err != nil || a.StatusCode != 200 {
		t.Fatalf("status %d, body %s, error %v", a.StatusCode, a.body, err)
	}
	want := image.Want{Ref: img.Ref, Platform: img.Platform, Trust: signer.NewTrust(w.Key.Public())}
	if _, err := image.Verify(got.Image, got.Name, want); err != nil {
		t.Error(err)
	}
}

// replacing replaces the statement of an image whenever its signatures are listed.
type replacing struct {
	bucket.Bucket
	prefix  string
	replace func()
}

func (b *replacing) List(ctx context.Context, prefix string) iter.Seq2[bucket.Object, error] {
	if prefix == b.prefix {
		b.replace()
	}
	return b.Bucket.List(ctx, prefix)
}

func TestAStatementReplacedMeanwhileComesWithItsSignatures(t *testing.T) {
	for times, status := range map[int]int{1: 200, 2: 200, 100: 503} {
		w := apitest.New(t)
		img := w.Publish(t, "a:b", 1, 1)
		n := 0
		srv, _ := w.Serve(t, func(c *api.Config) {
			c.Bucket = &replacing{w.Bucket, image.SigPrefix(img.Source, img.Platform), func() {
				if n++; n <= times {
					img.Data = fmt.Append(nil, n) // another tree digest
					w.PutStatement(t, img, true)
				}
			}}
		})
		a := ask(t, "GET", srv.URL+"/v1/start/a:b", "")
		if a.StatusCode != status {
			t.Fatalf("replaced %d times: status %d, want %d", times, a.StatusCode, status)
		}
		if status != 200 {
			wantError(t, a, status, "busy")
			continue
		}
		parts, err := decodeStart(a.body, (*api.StartReader).Bytes)
		if err != nil {
			t.Fatal(err)
		}
		want := image.Want{Ref: img.Ref, Platform: img.Platform, Trust: signer.NewTrust(w.Key.Public())}
		if _, err := image.Verify(parts[1].payload, parts[0].payload, want); err != nil {
			t.Errorf("replaced %d times: %v", times, err)
		}
	}
}
