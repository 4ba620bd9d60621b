package main

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"

	"quarry/api"
	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/chunk"
	"quarry/store/jobs"
)

// pushWorld is an owner that a test pushes to.
type pushWorld struct {
	*owner
	url     string
	handler *api.Handler
}

func newPushWorld(t *testing.T, noSign bool) *pushWorld {
	t.Helper()
	var o jobOptions
	o.conversions, o.platformList = 1, []string{"linux/amd64"}
	if err := o.check(); err != nil {
		t.Fatal(err)
	}
	own, err := openOwner(t.Context(), ownerConfig{dir: dataDir(t.TempDir()), jobs: o, noSign: noSign, log: warnings(os.Stderr)})
	if err != nil {
		t.Fatal(err)
	}
	h := newHandler(own, nil, false, own.log)
	srv := httptest.NewServer(h)
	t.Cleanup(func() {
		srv.Close()
		if err := own.close(); err != nil {
			t.Error(err)
		}
	})
	return &pushWorld{own, strings.TrimPrefix(srv.URL, "http://"), h}
}

func (w *pushWorld) push(t *testing.T, l *testimage.Layout, tag, as string) chunk.Digest {
	t.Helper()
	d, err := oci.Push(t.Context(), l.Source(":"+tag), oci.PushConfig{Host: w.url, Plain: true, Repo: "t/x", Tag: as, Transport: http.DefaultTransport})
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// convertAll does what is queued.
func (w *pushWorld) convertAll(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); w.jobs.Serve(ctx) }() // ends with cancel
	defer func() { cancel(); <-ended }()
	watch, err := w.jobs.Watch("")
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Close()
	for w.busyJobs() {
		if _, err := watch.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

func (w *pushWorld) busyJobs() bool {
	queued, running := w.jobs.Active()
	return queued+running > 0
}

func (w *pushWorld) has(t *testing.T, d string) bool {
	t.Helper()
	ok, err := w.registry.Has(t.Context(), digest.Digest(d))
	if err != nil {
		t.Fatal(err)
	}
	return ok
}

func (w *pushWorld) drop(t *testing.T, after time.Duration) {
	t.Helper()
	r := &retainer{owner: w.owner}
	if err := r.dropLayers(t.Context(), time.Now().Add(after)); err != nil {
		t.Fatal(err)
	}
}

func TestLayersGoWhenNothingNeedsThem(t *testing.T) {
	w := newPushWorld(t, false)
	w.retain = retention{drop: true, after: time.Hour}
	l := testimage.New(t)
	shared := testimage.Layer{Entries: []testimage.Entry{testimage.File("shared", "1")}}
	own := testimage.Layer{Entries: []testimage.Entry{testimage.File("own", "2")}}
	sharedLayer, _ := l.Layer(shared)
	ownLayer, _ := l.Layer(own)
	l.Tag("one", l.Image(testimage.Image{Layers: []testimage.Layer{shared, own}}))
	l.Tag("two", l.Image(testimage.Image{Layers: []testimage.Layer{shared}}))

	source := w.push(t, l, "one", "one")
	w.drop(t, 2*time.Hour)
	if !w.has(t, ownLayer.Digest) {
		t.Fatal("a layer went before it was converted")
	}
	w.convertAll(t)
	if w.drop(t, 0); !w.has(t, ownLayer.Digest) {
		t.Fatal("a layer went before its time")
	}
	w.push(t, l, "two", "two") // queued, and needs the one they share
	if w.drop(t, 2*time.Hour); w.has(t, ownLayer.Digest) || !w.has(t, sharedLayer.Digest) {
		t.Errorf("its own layer is there: %t, the shared one: %t", w.has(t, ownLayer.Digest), w.has(t, sharedLayer.Digest))
	}
	w.convertAll(t)
	if w.drop(t, 2*time.Hour); w.has(t, sharedLayer.Digest) {
		t.Error("the shared layer stays when both images are there")
	}

	// A later push sends the layers again, and its job has nothing to do.
	w.push(t, l, "one", "again")
	if !w.has(t, ownLayer.Digest) {
		t.Error("the layer was not sent again")
	}
	w.convertAll(t)
	for _, st := range w.jobs.Of(source) {
		if st.State != jobs.Done || st.Result.LayersKnown != 2 || st.Result.NewPlainBytes != 0 {
			t.Errorf("the job of the second push: %+v", st.Result)
		}
	}
}

func TestLayersOfAnUnsignedImageStay(t *testing.T) {
	w := newPushWorld(t, true)
	w.retain = retention{drop: true}
	l := testimage.Build(t, testimage.Layer{Entries: []testimage.Entry{testimage.File("a", "1")}})
	layer, _ := l.Layer(testimage.Layer{Entries: []testimage.Entry{testimage.File("a", "1")}})
	source := w.push(t, l, "latest", "v1")
	w.convertAll(t)
	if st := w.jobs.Of(source); len(st) != 1 || st[0].State != jobs.Done || st[0].Result.Signed {
		t.Fatalf("job: %+v", st)
	}
	if w.drop(t, time.Hour); !w.has(t, layer.Digest) {
		t.Error("the layer went, and a signature is still to be made from it")
	}
}

// A push by digest is kept, and converted when somebody asks for it.
func TestWhatIsAskedForIsConverted(t *testing.T) {
	w := newPushWorld(t, false)
	l := testimage.Build(t, testimage.Layer{Entries: []testimage.Entry{testimage.File("a", "1")}})
	source := w.push(t, l, "latest", "v1")
	w.convertAll(t)
	for _, key := range []string{jobs.Key(jobs.ID(source, ""))} {
		if err := w.bucket.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	var err error
	for o, lerr := range w.bucket.List(t.Context(), "images/") {
		if lerr == nil {
			lerr = w.bucket.Delete(t.Context(), o.Key)
		}
		if lerr != nil {
			t.Fatal(lerr)
		}
	}
	if err = w.openJobs(t.Context(), ownerConfig{jobs: w.jobOptions}); err != nil { // a queue that has forgotten it
		t.Fatal(err)
	}
	resp, err := http.Get("http://" + w.url + "/v1/images/t/x:v1")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if queued, _ := w.jobs.Active(); resp.StatusCode != http.StatusAccepted || queued != 1 {
		t.Errorf("status %d, %d queued, want %s and one", resp.StatusCode, queued, api.StatusPending)
	}
	w.convertAll(t)
	resp, err = http.Get("http://" + w.url + "/v1/images/t/x:v1")
	if err != nil {
		t.Fatal(err)
	}
	if resp.Body.Close(); resp.StatusCode != http.StatusOK {
		t.Errorf("converted: status %d", resp.StatusCode)
	}
}
