package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/signer"
	"quarry/store"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/pack"
)

// connect returns a client that gives up soon.
func connect(t testing.TB, cfg client.Config) *client.Client {
	t.Helper()
	if cfg.Backoff == 0 {
		cfg.Backoff = time.Millisecond
	}
	c, err := client.New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func TestAnImageIsReadWhole(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "team/python:3.13", 300, 1)
	srv, _ := w.Serve(t, nil)
	c := connect(t, client.Config{URL: srv.URL})

	doc, err := c.Image(t.Context(), img.Ref, img.Platform)
	if err != nil {
		t.Fatal(err)
	}
	v, err := image.Verify(doc.Image, doc.Name, image.Want{
		Ref: img.Ref, Platform: img.Platform, Trust: signer.NewTrust(w.Key.Public()),
	})
	if err != nil {
		t.Fatal(err)
	}
	boot, err := c.Bootstrap(t.Context(), v.Statement.Bootstrap, v.Statement.BootstrapSize)
	if err != nil || !bytes.Equal(boot, img.Bootstrap) {
		t.Errorf("bootstrap: %d bytes of %d, error %v", len(boot), len(img.Bootstrap), err)
	}
	config, err := c.Config(t.Context(), v.Statement.Config)
	if err != nil || !bytes.Equal(config, img.Config) {
		t.Errorf("config %q, error %v, want %q", config, err, img.Config)
	}
	got := make(map[chunk.Digest][]byte)
	var ds []chunk.Digest
	for _, c := range img.Blob.Chunks {
		ds = append(ds, c.Digest, c.Digest)
	}
	err = c.GetBatch(t.Context(), ds, func(d chunk.Digest, p []byte, err error) error {
		if _, ok := got[d]; ok {
			return fmt.Errorf("chunk %s answered twice", d)
		}
		got[d] = bytes.Clone(p)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	var data []byte
	for _, c := range img.Blob.Chunks {
		data = append(data, got[c.Digest]...)
	}
	if !bytes.Equal(data, img.Data) {
		t.Error("the chunks read are not those of the image")
	}
	s := c.Stats()
	if s.Requests < 4 || s.Retries != 0 || s.BytesIn < uint64(len(data)/3) || s.BytesOut < uint64(32*len(img.Blob.Chunks)) {
		t.Errorf("counters are %+v for %d bytes of chunks", s, len(data))
	}
}

func TestABatchOfAnySizeIsSplit(t *testing.T) {
	w := apitest.New(t)
	srv, _ := w.Serve(t, nil)
	c := connect(t, client.Config{URL: srv.URL})
	var ds []chunk.Digest
	for i := range 2*api.MaxBatch + 1 {
		ds = append(ds, chunk.Sum(fmt.Append(nil, i)))
	}
	n := 0
	err := c.GetBatch(t.Context(), ds, func(_ chunk.Digest, _ []byte, err error) error {
		n++
		if !errors.Is(err, store.ErrNotFound) {
			return fmt.Errorf("got error %v, want not found", err)
		}
		return nil
	})
	if err != nil || n != len(ds) || c.Stats().Requests != 3 {
		t.Errorf("%d answers of %d in %d requests, error %v", n, len(ds), c.Stats().Requests, err)
	}
	if err := c.GetBatch(t.Context(), nil, nil); err != nil {
		t.Errorf("empty batch: %v", err)
	}
}

func TestErrorsKeepTheirMeaning(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a/b:v1", 1, 1)
	srv, _ := w.Serve(t, nil)
	c := connect(t, client.Config{URL: srv.URL})

	_, err := c.Image(t.Context(), image.Ref{Repo: "a/b", Tag: "v9"}, img.Platform)
	var e *api.Error
	if !errors.As(err, &e) || !errors.Is(err, api.ErrTagUnknown) || !slices.Equal(e.Details["tags"], []string{"v1"}) {
		t.Errorf("unknown tag: got error %#v", err)
	}
	if e != nil && (e.Status != 404 || e.RequestID == "" || e.Blame != api.BlameUser) {
		t.Errorf("unknown tag: got %+v", e)
	}
	if err := w.Bucket.Delete(t.Context(), image.SigKey(img.Source, img.Platform, w.Key.Public().ID())); err != nil {
		t.Fatal(err)
	}
	before := c.Stats().Requests
	_, err = c.Image(t.Context(), img.Ref, img.Platform)
	if !errors.Is(err, api.ErrUnsigned) || !errors.As(err, &e) || !e.Retryable || e.RetryAfter == 0 {
		t.Errorf("unsigned image: got error %#v", err)
	}
	if n := c.Stats().Requests - before; n != 1 {
		t.Errorf("an image that is not ready was asked for %d times, want once", n)
	}
	if _, err := c.Get(t.Context(), chunk.Sum(nil), nil); !errors.Is(err, store.ErrNotFound) {
		t.Errorf("missing chunk: got error %v", err)
	}
	if _, err := c.Convert(t.Context(), api.ConvertRequest{}, nil); !errors.Is(err, api.ErrNoRoute) {
		t.Errorf("convert over the network: got error %v", err)
	}
}

func TestNamesOfManyPages(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 1, 1)
	for i := range api.MaxNames + 5 {
		img.Ref.Tag = fmt.Sprintf("v%d", i)
		w.SetName(t, img)
	}
	srv, _ := w.Serve(t, func(c *api.Config) { c.Local = true })
	c := connect(t, client.Config{URL: srv.URL})
	names, err := c.Names(t.Context())
	if err != nil || len(names) != api.MaxNames+6 {
		t.Fatalf("%d names, error %v", len(names), err)
	}
	if err := c.DeleteName(t.Context(), img.Ref); err != nil {
		t.Fatal(err)
	}
	if err := c.DeleteName(t.Context(), img.Ref); !errors.Is(err, api.ErrTagUnknown) {
		t.Errorf("deleted twice: got error %v", err)
	}
}

func TestLocalJobsOverAUnixSocket(t *testing.T) {
	w := apitest.New(t)
	want := api.ConvertResult{Name: "a:b", Source: chunk.Sum(nil)}
	h := api.NewHandler(api.Config{
		Chunks: w.Chunks, Names: w.Catalog, Bucket: w.Bucket, Local: true,
		Convert: func(_ context.Context, req api.ConvertRequest, progress func(api.Progress)) (api.ConvertResult, error) {
			if req.Source == "oci:missing" {
				return api.ConvertResult{}, &api.Error{Status: 422, Code: "source_unknown", Message: "no such folder", Blame: api.BlameUser}
			}
			progress(api.Progress{Step: "layer", Done: 1, Total: 2})
			progress(api.Progress{Step: "layer", Done: 2, Total: 2})
			return want, nil
		},
		Check: func(_ context.Context, req api.CheckRequest, report func(api.Problem)) (api.CheckSummary, error) {
			var all sync.WaitGroup
			for i := range 10 {
				all.Go(func() { report(api.Problem{Kind: "chunk", Offset: int64(i), Images: []string{"a:b"}}) })
			}
			all.Wait()
			if !req.Quick {
				return api.CheckSummary{}, errors.New("not quick")
			}
			return api.CheckSummary{Problems: 10}, nil
		},
		Rebuild: func(context.Context) (api.RebuildResult, error) { return api.RebuildResult{Packs: 3}, nil },
	})
	c, _ := local(t, h)

	var steps []int64
	got, err := c.Convert(t.Context(), api.ConvertRequest{Source: "oci:x", Name: "a:b"}, func(p api.Progress) {
		steps = append(steps, p.Done)
	})
	if err != nil || got != want || !slices.Equal(steps, []int64{1, 2}) {
		t.Errorf("convert: result %+v, steps %v, error %v", got, steps, err)
	}
	var e *api.Error
	if _, err := c.Convert(t.Context(), api.ConvertRequest{Source: "oci:missing", Name: "a"}, nil); !errors.As(err, &e) || e.Code != "source_unknown" {
		t.Errorf("convert of a missing source: got error %v", err)
	}
	if _, err := c.Convert(t.Context(), api.ConvertRequest{Source: "oci:x"}, nil); !errors.Is(err, api.ErrBadRequest) {
		t.Errorf("convert without a name: got error %v", err)
	}
	problems := 0
	sum, err := c.Check(t.Context(), api.CheckRequest{Quick: true}, func(api.Problem) { problems++ })
	if err != nil || sum.Problems != 10 || problems != 10 {
		t.Errorf("check: %+v, %d problems, error %v", sum, problems, err)
	}
	if _, err := c.Check(t.Context(), api.CheckRequest{}, nil); !errors.As(err, &e) || e.Message != "not quick" {
		t.Errorf("check that fails: got error %v", err)
	}
	if r, err := c.Rebuild(t.Context()); err != nil || r.Packs != 3 {
		t.Errorf("rebuild: %+v, error %v", r, err)
	}
	testLeases(t, c)
}

func testLeases(t *testing.T, c *client.Client) {
	t.Helper()
	lease, err := c.RenewLease(t.Context(), "m-1", "a:b", chunk.Digest{}, time.Minute)
	if err != nil || lease.ID != "m-1" || time.Until(lease.Expires) < 50*time.Second {
		t.Errorf("lease %+v, error %v", lease, err)
	}
	if all, err := c.Leases(t.Context()); err != nil || len(all) != 1 || all[0] != lease {
		t.Errorf("leases %+v, error %v", all, err)
	}
	if err := c.EndLease(t.Context(), "m-1"); err != nil {
		t.Error(err)
	}
	if _, err := c.Lease(t.Context(), "m-1"); !errors.Is(err, api.ErrLeaseUnknown) {
		t.Errorf("ended lease: got error %v", err)
	}
	if _, err := c.Lease(t.Context(), "../../stats"); err == nil {
		t.Error("a lease id with slashes was taken")
	}
	if s, err := c.ServerStats(t.Context()); err != nil || s.Leases != 0 || s.Version != 1 {
		t.Errorf("stats %+v, error %v", s, err)
	}
	if err := errors.Join(c.Health(t.Context()), c.Ready(t.Context())); err != nil {
		t.Error(err)
	}
}

func TestAStreamCutOffIsNoResult(t *testing.T) {
	for _, body := range []string{"", `{"type":"alive"}` + "\n", "{}", "x", `{"type":"error"}`, strings.Repeat("x", 2*api.MaxEvent)} {
		c := lie(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, body) })
		if _, err := c.Rebuild(t.Context()); err == nil {
			t.Errorf("a stream of %.20q was taken for a result", body)
		}
		if n := c.Stats().Requests; n != 1 {
			t.Errorf("a job was sent %d times", n)
		}
	}
}

func TestClientsThatCannotBe(t *testing.T) {
	for _, cfg := range []client.Config{
		{}, {URL: "host:80"}, {URL: "ftp://host"}, {URL: "http://"}, {URL: "http://host/path"},
		{URL: "http://user:pw@host"}, {URL: "http://host?x"}, {URL: "http://host", Socket: "/x"},
	} {
		if _, err := client.New(cfg); err == nil {
			t.Errorf("%+v was accepted", cfg)
		}
	}
}

func TestRetriesAreBoundedAndReachAServerThatComesBack(t *testing.T) {
	p := []byte("chunk")
	fails := 2
	h := func(w http.ResponseWriter, r *http.Request) {
		if fails > 0 {
			fails--
			http.Error(w, "bad gateway", http.StatusBadGateway)
			return
		}
		answer(w, frameOf(p))
	}
	c := lie(t, h)
	if got, err := c.Get(t.Context(), chunk.Sum(p), nil); err != nil || !bytes.Equal(got, p) {
		t.Errorf("got %q, error %v", got, err)
	}
	fails = 100
	c = lie(t, h)
	var e *api.Error
	if _, err := c.Get(t.Context(), chunk.Sum(p), nil); !errors.As(err, &e) || e.Status != 502 {
		t.Errorf("got error %v, want status 502", err)
	}
	if s := c.Stats(); s.Requests != 3 || s.Retries != 2 {
		t.Errorf("counters %+v, want 3 attempts", s)
	}
}

func TestOnlyWhatIsMissingIsAskedForAgain(t *testing.T) {
	a, b := []byte("chunk a"), []byte("chunk b")
	var asked []int64
	c := lie(t, func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.ContentLength/32)
		fw := api.NewFrameWriter(w)
		if len(asked) == 1 {
			fw.Write(frameOf(a)) // and no end frame
			return
		}
		fw.Write(frameOf(b))
		fw.Close()
	})
	var got []string
	err := c.GetBatch(t.Context(), []chunk.Digest{chunk.Sum(a), chunk.Sum(b)}, func(_ chunk.Digest, p []byte, err error) error {
		got = append(got, string(p))
		return err
	})
	if err != nil || !slices.Equal(asked, []int64{2, 1}) || strings.Join(got, ", ") != "chunk a, chunk b" {
		t.Errorf("asked for %v digests, got %q, error %v", asked, got, err)
	}
}

func TestTheErrorOfTheCallerEndsABatch(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a:b", 50, 1)
	srv, _ := w.Serve(t, nil)
	c := connect(t, client.Config{URL: srv.URL})
	var ds []chunk.Digest
	for _, ch := range img.Blob.Chunks {
		ds = append(ds, ch.Digest)
	}
	mine := errors.New("enough")
	n := 0
	err := c.GetBatch(t.Context(), ds, func(chunk.Digest, []byte, error) error { n++; return mine })
	if !errors.Is(err, mine) || n != 1 {
		t.Errorf("got error %v after %d calls, want mine after one", err, n)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err = c.GetBatch(ctx, ds, func(chunk.Digest, []byte, error) error { cancel(); return nil })
	if err != nil && !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled batch: got error %v", err)
	}
	if _, err := c.Get(ctx, ds[0], nil); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancel: got error %v", err)
	}
}

// frameOf is the honest frame of a chunk.
func frameOf(p []byte) api.Frame {
	codec, stored := pack.Compress(nil, p)
	return api.Frame{Digest: chunk.Sum(p), Codec: codec, Len: uint32(len(p)), CRC: pack.Checksum(stored), Stored: stored}
}

// answer writes a whole batch answer.
func answer(w http.ResponseWriter, frames ...api.Frame) {
	w.Header().Set("Content-Type", api.TypeFrames)
	fw := api.NewFrameWriter(w)
	for _, f := range frames {
		if fw.Write(f) != nil {
			return
		}
	}
	_ = fw.Close() // the client may be gone
}

// More jobs than run at once wait for their turn; none is refused.
func TestJobsWaitForTheirTurn(t *testing.T) {
	w := apitest.New(t)
	var running, most atomic.Int64
	h := api.NewHandler(api.Config{
		Chunks: w.Chunks, Names: w.Catalog, Bucket: w.Bucket, Local: true, MaxJobs: 2, QueueTimeout: time.Millisecond,
		Convert: func(context.Context, api.ConvertRequest, func(api.Progress)) (api.ConvertResult, error) {
			if n := running.Add(1); n > most.Load() {
				most.Store(n)
			}
			defer running.Add(-1)
			time.Sleep(20 * time.Millisecond)
			return api.ConvertResult{Name: "a:b"}, nil
		},
	})
	srv := httptest.NewServer(h)
	defer srv.Close()
	c, err := client.New(client.Config{URL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var wg sync.WaitGroup
	for range 12 {
		wg.Go(func() {
			if _, err := c.Convert(t.Context(), api.ConvertRequest{Source: "oci:x", Name: "a:b"}, nil); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if most.Load() > 2 {
		t.Errorf("%d jobs ran at once, want at most 2", most.Load())
	}
}

// local serves a handler on a socket, as a data folder's owner does.
func local(t *testing.T, h *api.Handler) (c *client.Client, socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "quarry.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := api.NewServer(h)
	go srv.Serve(l) // ends with Close
	t.Cleanup(func() { srv.Close() })
	return connect(t, client.Config{Socket: socket}), socket
}
