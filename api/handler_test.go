package api_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/signer"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
	"quarry/store/packed"
)

// answer is a response with its body read.
type answer struct {
	*http.Response
	body []byte
}

// ask sends a request; header holds name, value pairs.
func ask(t *testing.T, method, url, body string, header ...string) answer {
	t.Helper()
	a, err := tryAsk(t, method, url, body, header...)
	if err != nil {
		t.Fatalf("%s %s: %v", method, url, err)
	}
	return a
}

func tryAsk(t *testing.T, method, url, body string, header ...string) (answer, error) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	tr := &http.Transport{DisableCompression: true}
	defer tr.CloseIdleConnections()
	resp, err := tr.RoundTrip(req)
	if err != nil {
		return answer{}, err
	}
	defer resp.Body.Close()
	p, err := io.ReadAll(resp.Body)
	return answer{resp, p}, err
}

// wantError checks that a is the error document of a code.
func wantError(t *testing.T, a answer, status int, code string) *api.Error {
	t.Helper()
	var doc struct{ Error *api.Error }
	if err := json.Unmarshal(a.body, &doc); err != nil || doc.Error == nil {
		t.Fatalf("status %d with body %q, want an error document (%v)", a.StatusCode, a.body, err)
	}
	if a.StatusCode != status || doc.Error.Code != code {
		t.Errorf("got %d %s (%s), want %d %s", a.StatusCode, doc.Error.Code, doc.Error.Message, status, code)
	}
	if id := a.Header.Get(api.HeaderRequestID); id == "" || id != doc.Error.RequestID {
		t.Errorf("request id is %q in the header and %q in the error", id, doc.Error.RequestID)
	}
	return doc.Error
}

func TestImageComesWithStatementsThatVerify(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "team/python:3.13", 3, 1)
	srv, _ := w.Serve(t, nil)
	trust := signer.NewTrust(w.Key.Public())
	byDigest := image.Ref{Repo: img.Ref.Repo, Digest: &img.Source}
	for _, ref := range []image.Ref{img.Ref, byDigest} {
		for _, query := range []string{"", "?platform=" + img.Platform.String()} {
			a := ask(t, "GET", srv.URL+"/v1/images/"+ref.String()+query, "")
			var got api.Image
			if err := json.Unmarshal(a.body, &got); err != nil || a.StatusCode != 200 || got.Status != api.StatusReady {
				t.Fatalf("%s: status %d, body %s, error %v", ref, a.StatusCode, a.body, err)
			}
			if (string(got.Name) == "null") != (ref.Digest != nil) {
				t.Errorf("%s: name statement is %s", ref, got.Name)
			}
			v, err := image.Verify(got.Image, got.Name, image.Want{Ref: ref, Platform: img.Platform, Trust: trust})
			if err != nil {
				t.Fatalf("%s: %v", ref, err)
			}
			if v.Statement.Bootstrap != chunk.Sum(img.Bootstrap) {
				t.Errorf("%s: bootstrap is %s", ref, v.Statement.Bootstrap)
			}
		}
	}
}

func TestImagesThatAreNotThereAreTypedErrors(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a/b:v1", 1, 1)
	w.Publish(t, "a/b:v2", 1, 2)
	pending, failed := chunk.Sum([]byte("pending")), chunk.Sum([]byte("failed"))
	srv, _ := w.Serve(t, twoJobs(pending, failed))
	get := func(ref string) answer { return ask(t, "GET", srv.URL+"/v1/images/"+ref, "") }

	wantError(t, get("a/nothing:v1"), 404, "repo_unknown")
	e := wantError(t, get("a/b"), 404, "tag_unknown")
	if got := strings.Join(e.Details["tags"], " "); got != "v1 v2" || !strings.Contains(e.Message, "v1, v2") {
		t.Errorf("tags are %q in the details, message is %q", got, e.Message)
	}
	wantError(t, get("a/b@"+chunk.Sum(nil).String()), 404, "image_unknown")
	e = wantError(t, get("a/b:v1?platform=plan9/mips"), 404, "platform_unknown")
	if got := e.Details["platforms"]; len(got) != 1 || got[0] != img.Platform.String() {
		t.Errorf("platforms in the details are %q", got)
	}
	wantError(t, get("a/b@"+failed.String()), 422, "image_failed")
	a := get("a/b@" + pending.String())
	if a.StatusCode != 202 || !strings.Contains(string(a.body), `"status":"pending"`) || a.Header.Get("Retry-After") == "" {
		t.Errorf("pending image: status %d, body %s, headers %v", a.StatusCode, a.body, a.Header)
	}
}

func TestAnUnsignedImageIsNotReady(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 1, 1)
	key := image.SigKey(img.Source, img.Platform, w.Key.Public().ID())
	if err := w.Bucket.Delete(t.Context(), key); err != nil {
		t.Fatal(err)
	}
	srv, _ := w.Serve(t, nil)
	a := ask(t, "GET", srv.URL+"/v1/images/a:b", "")
	if a.StatusCode != 202 || !strings.Contains(string(a.body), `"status":"unsigned"`) || a.Header.Get("Retry-After") == "" {
		t.Errorf("status %d, body %s, headers %v", a.StatusCode, a.body, a.Header)
	}
	w.PutObject(t, key, []byte("not a signature"))
	if a := ask(t, "GET", srv.URL+"/v1/images/a:b", ""); a.StatusCode != 202 {
		t.Errorf("with a damaged signature: status %d, want 202", a.StatusCode)
	}
}

func TestNamesComeInPages(t *testing.T) {
	w := apitest.New(t)
	for i, name := range []string{"b:1", "a:2", "a-b:1", "a:1"} {
		w.Publish(t, name, 1, uint64(i))
	}
	srv, _ := w.Serve(t, nil)
	var got []string
	url := srv.URL + "/v1/images?limit=3"
	for range 3 {
		var page api.NamesPage
		if err := json.Unmarshal(ask(t, "GET", url, "").body, &page); err != nil {
			t.Fatal(err)
		}
		for _, n := range page.Names {
			got = append(got, n.Repo+":"+n.Tag)
		}
		if page.Next == "" {
			break
		}
		url = srv.URL + "/v1/images?limit=3&after=" + page.Next
	}
	if want := "a:1 a:2 a-b:1 b:1"; strings.Join(got, " ") != want {
		t.Errorf("got names %v, want %s", got, want)
	}
}

func TestObjectsAreImmutableAndByteExact(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 20, 1)
	srv, _ := w.Serve(t, nil)
	c := img.Blob.Chunks[0]
	tests := map[string][]byte{
		"/v1/bootstraps/" + chunk.Sum(img.Bootstrap).String(): img.Bootstrap,
		"/v1/configs/" + chunk.Sum(img.Config).String():       img.Config,
		"/v1/chunks/" + c.Digest.String():                     img.Data[:c.Len],
	}
	for path, want := range tests {
		a := ask(t, "GET", srv.URL+path, "")
		if a.StatusCode != 200 || !bytes.Equal(a.body, want) || a.ContentLength != int64(len(want)) {
			t.Errorf("%s: status %d, %d bytes, want %d", path, a.StatusCode, len(a.body), len(want))
		}
		if !strings.Contains(a.Header.Get("Cache-Control"), "immutable") {
			t.Errorf("%s: Cache-Control is %q", path, a.Header.Get("Cache-Control"))
		}
		again := ask(t, "GET", srv.URL+path, "", "If-None-Match", `"x", `+a.Header.Get("ETag"))
		if again.StatusCode != 304 || len(again.body) != 0 {
			t.Errorf("%s with its ETag: status %d with %d bytes, want 304", path, again.StatusCode, len(again.body))
		}
		missing := path[:len(path)-8] + "00000000"
		if a := ask(t, "GET", srv.URL+missing, ""); a.StatusCode != 404 || a.Header.Get("ETag") != "" {
			t.Errorf("%s: status %d with ETag %q, want 404", missing, a.StatusCode, a.Header.Get("ETag"))
		}
	}
}

func TestBootstrapIsCompressedForThoseWhoAccept(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 200, 1)
	srv, _ := w.Serve(t, nil)
	a := ask(t, "GET", srv.URL+"/v1/bootstraps/"+chunk.Sum(img.Bootstrap).String(), "", "Accept-Encoding", "gzip, zstd")
	if a.Header.Get("Content-Encoding") != "zstd" || len(a.body) >= len(img.Bootstrap) || a.Header.Get("Vary") == "" {
		t.Errorf("%d bytes of %d, headers %v", len(a.body), len(img.Bootstrap), a.Header)
	}
	dec, err := zstd.NewReader(bytes.NewReader(a.body))
	if err != nil {
		t.Fatal(err)
	}
	defer dec.Close()
	if got, err := io.ReadAll(dec); err != nil || !bytes.Equal(got, img.Bootstrap) {
		t.Errorf("decompressed bootstrap differs: %d bytes of %d, error %v", len(got), len(img.Bootstrap), err)
	}
}

func TestADamagedObjectIsAnErrorAndNotADownload(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 3, 1)
	srv, _ := w.Serve(t, nil)
	boot, config := chunk.Sum(img.Bootstrap), chunk.Sum(img.Config)
	for key, path := range map[string]string{
		image.BootstrapKey(boot): "/v1/bootstraps/" + boot.String(),
		image.ConfigKey(config):  "/v1/configs/" + config.String(),
	} {
		p := bytes.Clone(img.Bootstrap)
		if strings.HasPrefix(key, "configs/") {
			p = bytes.Clone(img.Config)
		}
		p[len(p)/2] ^= 1
		w.PutObject(t, key, p)
		e := wantError(t, ask(t, "GET", srv.URL+path, "", "Accept-Encoding", "zstd"), 500, "object_corrupt")
		if !strings.Contains(e.Message, key) {
			t.Errorf("message %q does not name %s", e.Message, key)
		}
	}
	wantError(t, ask(t, "POST", srv.URL+"/v1/stats", ""), 405, "method_not_allowed")
}

// faulty is a chunk store with planted faults.
type faulty struct {
	api.Chunks
	fail   map[chunk.Digest]error
	stall  map[chunk.Digest]bool // until the context ends, or release is closed
	silent map[chunk.Digest]bool // left out of batches

	release chan struct{}
}

func (f *faulty) StoredBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, packed.Stored, error) error) error {
	var late []chunk.Digest
	for _, d := range ds {
		var err error
		switch {
		case f.silent[d]:
		case f.stall[d]:
			late = append(late, d)
		case f.fail[d] != nil:
			err = fn(d, packed.Stored{}, f.fail[d])
		default:
			err = f.Chunks.StoredBatch(ctx, []chunk.Digest{d}, fn)
		}
		if err != nil {
			return err
		}
	}
	if len(late) > 0 {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-f.release:
			return errors.New("released")
		}
	}
	return nil
}

func (f *faulty) GetBatch(ctx context.Context, ds []chunk.Digest, fn func(chunk.Digest, []byte, error) error) error {
	return f.Chunks.GetBatch(ctx, ds, func(d chunk.Digest, p []byte, err error) error {
		if f.fail[d] != nil {
			return fn(d, nil, f.fail[d])
		}
		return fn(d, p, err)
	})
}

func TestBatchAnswersEveryDigestOnce(t *testing.T) {
	w := apitest.New(t)
	good := w.PutChunk(t, bytes.Repeat([]byte("good "), 500))
	bad := w.PutChunk(t, []byte("bad"))
	broken := w.PutChunk(t, []byte("broken"))
	left := w.PutChunk(t, []byte("left out"))
	slow := w.PutChunk(t, []byte("slow"))
	missing := chunk.Sum([]byte("missing"))
	srv, _ := w.Serve(t, func(c *api.Config) {
		c.ChunkTimeout = 500 * time.Millisecond
		c.Chunks = &faulty{
			Chunks: w.Chunks,
			fail: map[chunk.Digest]error{
				bad:    &store.CorruptError{Want: bad, Key: "packs/x"},
				broken: errors.New("disk on fire"),
			},
			stall:  map[chunk.Digest]bool{slow: true},
			silent: map[chunk.Digest]bool{left: true},
		}
	})
	ds := []chunk.Digest{slow, good, bad, broken, missing, left, good}
	list, err := json.Marshal(map[string]any{"digests": ds})
	if err != nil {
		t.Fatal(err)
	}
	want := map[chunk.Digest]api.Status{
		good: api.StatusOK, bad: api.StatusCorrupt, broken: api.StatusError, missing: api.StatusNotFound,
		left: api.StatusError, slow: api.StatusError,
	}
	for kind, body := range map[string]string{api.TypeDigests: string(api.EncodeDigests(ds)), api.TypeJSON: string(list)} {
		a := ask(t, "POST", srv.URL+"/v1/chunks:batchGet", body, "Content-Type", kind)
		if a.StatusCode != 200 || a.Header.Get("Content-Type") != api.TypeFrames {
			t.Fatalf("%s: status %d, body %q", kind, a.StatusCode, a.body)
		}
		frames, err := decodeFrames(bytes.NewReader(a.body), len(want))
		if err != nil || len(frames) != len(want) {
			t.Fatalf("%s: %d frames, error %v, want %d", kind, len(frames), err, len(want))
		}
		for _, f := range frames {
			if f.Status != want[f.Digest] {
				t.Errorf("%s: chunk %s has status %d (%s), want %d", kind, f.Digest, f.Status, f.Reason, want[f.Digest])
			}
			if f.Digest == good && f.Codec != pack.Zstd {
				t.Errorf("%s: chunk was sent with codec %s, want it as stored", kind, f.Codec)
			}
		}
	}
}

func TestBadBatchesAreRefused(t *testing.T) {
	w := apitest.New(t)
	srv, _ := w.Serve(t, nil)
	d := chunk.Sum(nil)
	many := strings.Repeat(string(d[:]), api.MaxBatch+1)
	manyJSON := `{"digests":[` + strings.Repeat(`"`+d.String()+`",`, api.MaxBatch) + `"` + d.String() + `"]}`
	tests := map[string]struct {
		kind, body string
		status     int
		code       string
	}{
		"no content type":        {"", "", 400, "bad_request"},
		"unknown content type":   {"text/plain", "x", 400, "bad_request"},
		"no digests":             {api.TypeDigests, "", 400, "bad_request"},
		"half a digest":          {api.TypeDigests, "0123456789", 400, "bad_request"},
		"no JSON":                {api.TypeJSON, "{", 400, "bad_request"},
		"unknown field":          {api.TypeJSON, `{"digests":[],"x":1}`, 400, "bad_request"},
		"two documents":          {api.TypeJSON, `{"digests":["` + d.String() + `"]}{}`, 400, "bad_request"},
		"digest that is none":    {api.TypeJSON, `{"digests":["sha256:xyz"]}`, 400, "bad_request"},
		"too many digests":       {api.TypeDigests, many, 413, "too_many_digests"},
		"too many JSON digests":  {api.TypeJSON, manyJSON, 413, "too_many_digests"},
		"a body that is too big": {api.TypeDigests, strings.Repeat(many, 4), 413, "too_large"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			wantError(t, ask(t, "POST", srv.URL+"/v1/chunks:batchGet", tt.body, "Content-Type", tt.kind), tt.status, tt.code)
		})
	}
}

func TestBusyServerSaysWhenToComeBack(t *testing.T) {
	w := apitest.New(t)
	slow := w.PutChunk(t, []byte("slow"))
	release := make(chan struct{})
	srv, _ := w.Serve(t, func(c *api.Config) {
		c.Chunks = &faulty{Chunks: w.Chunks, stall: map[chunk.Digest]bool{slow: true}, release: release}
		c.MaxReads, c.QueueTimeout, c.ChunkTimeout = 1, 10*time.Millisecond, time.Hour
	})
	body := string(api.EncodeDigests([]chunk.Digest{slow}))
	done := make(chan answer, 1)
	go func() { // ends with its request
		a, _ := tryAsk(t, "POST", srv.URL+"/v1/chunks:batchGet", body, "Content-Type", api.TypeDigests)
		done <- a
	}()
	defer func() { close(release); <-done }()
	deadline := time.Now().Add(time.Minute)
	for {
		a := ask(t, "GET", srv.URL+"/v1/chunks/"+slow.String(), "")
		if a.StatusCode == 503 {
			if e := wantError(t, a, 503, "busy"); !e.Retryable || a.Header.Get("Retry-After") == "" {
				t.Errorf("busy error %+v with headers %v", e, a.Header)
			}
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the server never was busy")
		}
	}
}

func TestLocalRoutesAreHiddenFromTheNetwork(t *testing.T) {
	w := apitest.New(t)
	w.Publish(t, "a:b", 1, 1)
	srv, _ := w.Serve(t, nil)
	for _, line := range []string{
		"POST /v1/convert", "POST /v1/admin/check", "POST /v1/admin/rebuild", "GET /v1/admin/leases",
		"PUT /v1/admin/leases/x", "GET /v1/admin/leases/x", "DELETE /v1/admin/leases/x", "DELETE /v1/images/a:b",
	} {
		method, path, _ := strings.Cut(line, " ")
		wantError(t, ask(t, method, srv.URL+path, "{}"), 404, "no_route")
	}
	if _, ok := w.Catalog.Name("a", "b"); !ok {
		t.Error("the name was deleted")
	}
}

func TestPathTricksReachNothing(t *testing.T) {
	w := apitest.New(t)
	srv, _ := w.Serve(t, nil)
	for _, path := range []string{
		"/v1/images/../admin/leases", "/v1/images/%2e%2e/admin/leases", "/v1/configs/%2e%2e%2fstore.json",
		"//v1/images", "/v1/images/a%2fb", "/v1/blobs/../../etc/passwd",
	} {
		wantError(t, ask(t, "GET", srv.URL+path, ""), 400, "bad_request")
	}
}

func TestHealthMetricsAndStats(t *testing.T) {
	w := apitest.New(t)
	ready := errors.New("index is being rebuilt")
	srv, _ := w.Serve(t, func(c *api.Config) {
		c.Ready = func(context.Context) error { return ready }
		c.Stats = func(context.Context) (api.StoreStats, error) { return api.StoreStats{Packs: 7}, nil }
	})
	if a := ask(t, "GET", srv.URL+"/healthz", ""); a.StatusCode != 200 {
		t.Errorf("healthz: status %d", a.StatusCode)
	}
	e := wantError(t, ask(t, "GET", srv.URL+"/readyz", ""), 503, "busy")
	if !strings.Contains(e.Message, ready.Error()) {
		t.Errorf("readyz says %q", e.Message)
	}
	var s api.Stats
	if err := json.Unmarshal(ask(t, "GET", srv.URL+"/v1/stats", "").body, &s); err != nil || s.Store.Packs != 7 || s.Requests != 3 {
		t.Errorf("stats are %+v, error %v", s, err)
	}
	a := ask(t, "GET", srv.URL+"/metrics", "")
	if want := `quarry_api_requests_total{route="ready",status="503"} 1`; !strings.Contains(string(a.body), want) {
		t.Errorf("metrics lack %s:\n%s", want, a.body)
	}
}

func TestIdleSinceWaitsForRequestsAndLeases(t *testing.T) {
	w := apitest.New(t)
	var clock atomic.Int64
	clock.Store(1e9)
	srv, h := w.Serve(t, func(c *api.Config) {
		c.Local, c.Now = true, func() time.Time { return time.Unix(clock.Load(), 0) }
	})
	if since, ok := h.IdleSince(); !ok || since.Unix() != 1e9 {
		t.Errorf("new handler is idle since %v, %t", since, ok)
	}
	url := srv.URL + "/v1/admin/leases/mount-1"
	clock.Add(5)
	if a := ask(t, "PUT", url, `{"ttl_seconds":60,"image":"a:b"}`); a.StatusCode != 200 {
		t.Fatalf("lease: status %d, body %s", a.StatusCode, a.body)
	}
	if _, ok := h.WithLocal(false).IdleSince(); ok {
		t.Error("a handler with a live lease calls itself idle")
	}
	clock.Add(60)
	wantError(t, ask(t, "GET", url, ""), 404, "lease_unknown")
	// A client has its answer a moment before the handler has ended.
	for range 100 {
		if since, ok := h.IdleSince(); ok && since.Unix() == 1e9+65 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Error("the handler is not idle after the lease has expired")
}

func TestLeasesAreBounded(t *testing.T) {
	w := apitest.New(t)
	srv, _ := w.Serve(t, func(c *api.Config) { c.Local = true })
	put := func(id, body string) answer {
		return ask(t, "PUT", srv.URL+"/v1/admin/leases/"+id, body)
	}
	for _, body := range []string{
		`{}`, `{"ttl_seconds":0}`, `{"ttl_seconds":3601}`, `{"ttl_seconds":-1}`, `{"ttl_seconds":1,"x":1}`,
		`{"ttl_seconds":9999999999999}`, `{"ttl_seconds":1,"image":"` + strings.Repeat("a", 2000) + `"}`,
	} {
		wantError(t, put("x", body), 400, "bad_request")
	}
	wantError(t, put("x", strings.Repeat(" ", 1<<20)), 413, "too_large")
}

// twoJobs has one source's conversion go on and another's have failed.
func twoJobs(pending, failed chunk.Digest) func(*api.Config) {
	return func(c *api.Config) {
		c.Job = func(_ context.Context, _ image.Ref, source chunk.Digest, _ image.Platform) error {
			switch source {
			case pending:
				return api.ErrPending
			case failed:
				return fmt.Errorf("%w: layer 3 is truncated", api.ErrImageFailed)
			}
			return nil
		}
	}
}
