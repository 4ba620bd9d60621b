package oci_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"quarry/converter/oci"
	"quarry/internal/testimage"
	"quarry/store/image"
)

// onLayer lets a fault see only requests for the layer with the given bytes,
// with the number of the request from 1.
func onLayer(digest string, fault func(n int64, w http.ResponseWriter, r *http.Request) bool) func(http.ResponseWriter, *http.Request) bool {
	var n atomic.Int64
	return func(w http.ResponseWriter, r *http.Request) bool {
		return strings.HasSuffix(r.URL.Path, "/blobs/"+digest) && fault(n.Add(1), w, r)
	}
}

// cutOff sends n bytes of p with the length of all of it and breaks off.
func cutOff(w http.ResponseWriter, p []byte, n int) {
	w.Header().Set("Content-Length", fmt.Sprint(len(p)))
	w.Write(p[:n])
	w.(http.Flusher).Flush()
	panic(http.ErrAbortHandler)
}

func TestFaultsOfARegistryPassOrAreNamed(t *testing.T) {
	s, l, d := standard(t)
	im := open(t, s.ref(":v1"), image.Platform{})
	big := im.Layers[1].Digest.String()
	body, err := os.ReadFile(l.BlobPath(big))
	if err != nil {
		t.Fatal(err)
	}
	status := func(code int, times int64) func(int64, http.ResponseWriter, *http.Request) bool {
		return func(n int64, w http.ResponseWriter, _ *http.Request) bool {
			if n <= times {
				w.Header().Set("Retry-After", "0")
				w.WriteHeader(code)
			}
			return n <= times
		}
	}
	const forever = 1 << 30
	manifest := func(f func(w http.ResponseWriter)) func(http.ResponseWriter, *http.Request) bool {
		return func(w http.ResponseWriter, r *http.Request) bool {
			if strings.Contains(r.URL.Path, "/manifests/") {
				f(w)
				return true
			}
			return false
		}
	}
	unavailable := []string{oci.ErrUnavailable.Error(), "tried 5 times"}
	tests := map[string]struct {
		fault func(w http.ResponseWriter, r *http.Request) bool
		err   []string
	}{
		"429, then not":         {onLayer(big, status(http.StatusTooManyRequests, 2)), nil},
		"503, then not":         {onLayer(big, status(http.StatusServiceUnavailable, 4)), nil},
		"429 for ever":          {onLayer(big, status(http.StatusTooManyRequests, forever)), unavailable},
		"500 for ever":          {onLayer(big, status(http.StatusInternalServerError, forever)), unavailable},
		"404":                   {onLayer(big, status(http.StatusNotFound, forever)), []string{big, "blob is missing"}},
		"403":                   {onLayer(big, status(http.StatusForbidden, forever)), []string{big, "wants credentials"}},
		"a status that is none": {onLayer(big, status(http.StatusTeapot, forever)), []string{big, "418"}},
		"nothing, then all of it": {onLayer(big, func(n int64, _ http.ResponseWriter, _ *http.Request) bool {
			if n < 3 {
				panic(http.ErrAbortHandler)
			}
			return false
		}), nil},
		"broken off three times": {onLayer(big, func(n int64, w http.ResponseWriter, _ *http.Request) bool {
			if n == 1 {
				cutOff(w, body, 2<<20)
			}
			if n < 4 {
				panic(http.ErrAbortHandler)
			}
			return false // the registry knows ranges
		}), nil},
		"broken off at each MiB": {onLayer(big, func(n int64, w http.ResponseWriter, r *http.Request) bool {
			var from int64
			fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &from)
			rest := body[from:]
			if n > 1 {
				w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(body)-1, len(body)))
				w.Header().Set("Content-Length", fmt.Sprint(len(rest)))
				w.WriteHeader(http.StatusPartialContent)
			}
			cutOff(w, rest, min(len(rest), 1<<20))
			return true
		}), nil},
		"broken off without ranges": {onLayer(big, func(n int64, w http.ResponseWriter, r *http.Request) bool {
			r.Header.Del("Range")
			if n == 1 {
				cutOff(w, body, 3<<20)
			}
			return false
		}), nil},
		"broken off at the same byte for ever": {onLayer(big, func(n int64, w http.ResponseWriter, r *http.Request) bool {
			r.Header.Del("Range")
			cutOff(w, body, 3<<20)
			return true
		}), append([]string{"at byte 3145728"}, unavailable...)},
		"another range": {onLayer(big, func(n int64, w http.ResponseWriter, _ *http.Request) bool {
			if n == 1 {
				cutOff(w, body, 3<<20)
			}
			w.Header().Set("Content-Range", fmt.Sprintf("bytes 5-9/%d", len(body)))
			w.WriteHeader(http.StatusPartialContent)
			return true
		}), []string{big, `range "bytes 5-9/`, "asked for was 3145728-"}},
		"another length after a break": {onLayer(big, func(n int64, w http.ResponseWriter, _ *http.Request) bool {
			if n == 1 {
				cutOff(w, body, 3<<20)
			}
			w.Header().Set("Content-Length", "5")
			w.Write([]byte("hello"))
			return true
		}), []string{big, "now 5"}},
		"a shorter body": {onLayer(big, func(_ int64, w http.ResponseWriter, _ *http.Request) bool { w.Write(body[:1000]); return true }), []string{big, "blob has 1000 bytes"}},
		"a length too many": {onLayer(big, func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Length", fmt.Sprint(len(body)+1))
			w.Write(body)
			return true
		}), []string{big, fmt.Sprintf("blob has %d bytes", len(body)+1)}},
		"no length": {onLayer(big, func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
			w.(http.Flusher).Flush()
			w.Write(body)
			return true
		}), nil},
		"no length and no end": {onLayer(big, func(_ int64, w http.ResponseWriter, r *http.Request) bool {
			w.(http.Flusher).Flush()
			for r.Context().Err() == nil {
				w.Write(body)
			}
			return true
		}), []string{big, "longer than"}},
		"other bytes": {onLayer(big, func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
			p := []byte(strings.Clone(string(body)))
			p[len(p)/2] ^= 1
			w.Write(p)
			return true
		}), []string{big, "blob has digest"}},
		"a page for people": {onLayer(big, func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
			io.WriteString(w, "<html>log in</html>")
			return true
		}), []string{big, "blob has 19 bytes"}},
		"a codec nobody asked for": {onLayer(big, func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
			w.Header().Set("Content-Encoding", "gzip")
			w.Write(body)
			return true
		}), []string{big, "Content-Encoding gzip"}},
		"503 with a long page, then not": {onLayer(big, func(n int64, w http.ResponseWriter, _ *http.Request) bool {
			if n < 3 {
				w.WriteHeader(http.StatusServiceUnavailable)
				w.Write(body)
			}
			return n < 3
		}), nil},
		"418 with a long page": {onLayer(big, func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
			w.WriteHeader(http.StatusTeapot)
			w.Write(body)
			return true
		}), []string{big, "418"}},
		"a page for people as manifest": {manifest(func(w http.ResponseWriter) { io.WriteString(w, "<html><body>log in</body></html>") }), []string{"manifest v1", "not a JSON manifest", "an HTML page"}},
		"a manifest without end": {manifest(func(w http.ResponseWriter) {
			w.(http.Flusher).Flush()
			for range 6 {
				w.Write(make([]byte, 1<<20))
			}
		}), []string{"more than the 4194304 bytes"}},
		"a manifest of another name": {manifest(func(w http.ResponseWriter) {
			w.Header().Set("Docker-Content-Digest", big)
			io.WriteString(w, `{"schemaVersion":2,"manifests":[]}`)
		}), []string{"the registry says it is " + big}},
		"a manifest of schema 1": {manifest(func(w http.ResponseWriter) {
			w.Header().Set("Content-Type", "application/vnd.docker.distribution.manifest.v1+prettyjws")
			io.WriteString(w, `{"schemaVersion":1,"fsLayers":[]}`)
		}), []string{"schema 1"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			s.set(tt.fault)
			defer s.set(nil)
			err := readAll(t.Context(), s.ref(":v1"), quick())
			if tt.err == nil && err != nil {
				t.Errorf("error %v", err)
			}
			if tt.err == nil {
				return
			}
			wantErr(t, err, tt.err...)
			if passes := strings.Contains(tt.err[0]+tt.err[len(tt.err)-1], "tried 5 times"); passes != errors.Is(err, oci.ErrUnavailable) {
				t.Errorf("error %q: is ErrUnavailable: %v", err, !passes)
			}
		})
	}
	s.set(func(w http.ResponseWriter, r *http.Request) bool {
		if strings.Contains(r.URL.Path, "/manifests/") {
			io.WriteString(w, "{}")
			return true
		}
		return false
	})
	wantErr(t, readAll(t.Context(), s.ref("@"+d.Digest), quick()), d.Digest, "is damaged: what came has digest")
}

// stall answers with the beginning of a body and no more.
func stall(code int, begin string) func(w http.ResponseWriter, r *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(code)
		io.WriteString(w, begin)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}
}

// Every body that a registry sends may stop coming. Each row stalls once; the
// time that it has is also what the next try has for its headers, so it is not
// short, and all rows wait at once.
func TestAStallOfARegistryEnds(t *testing.T) {
	tests := map[string]struct {
		part  string // of the path of the request that stalls
		fault func(w http.ResponseWriter, r *http.Request)
		err   []string
	}{
		"a blob":                      {"/blobs/", stall(http.StatusOK, ""), nil},
		"an error that passes":        {"/blobs/", stall(http.StatusInternalServerError, ""), nil},
		"a blob that is not there":    {"/blobs/", stall(http.StatusNotFound, "{"), []string{"blob is missing", "sends no more than 1 bytes in 5s"}},
		"an error that does not pass": {"/manifests/", stall(http.StatusTeapot, ""), []string{"418", "sends no more for 5s"}},
		"a manifest":                  {"/manifests/", stall(http.StatusOK, "{"), nil},
		"a redirect without address":  {"/manifests/", stall(http.StatusFound, "x"), []string{"302"}},
		"a token":                     {"/token", stall(http.StatusOK, `{"tok`), nil},
		"a refused token":             {"/token", stall(http.StatusBadGateway, ""), nil},
		"the greeting":                {"/v2/", stall(http.StatusOK, "x"), nil},
	}
	var reads sync.WaitGroup
	for name, tt := range tests {
		s, l := newServer(t), testimage.New(t)
		s.push(t, l, map[string]testimage.Descriptor{"v1": l.Image(testimage.Image{Layers: []testimage.Layer{layerA}})})
		s.authorize("bearer")
		var n atomic.Int64
		s.set(func(w http.ResponseWriter, r *http.Request) bool {
			if !strings.Contains(r.URL.Path, tt.part) || n.Add(1) > 1 {
				return false
			}
			tt.fault(w, r)
			return true
		})
		cfg := withPassword(thePass)
		cfg.StallTimeout = 5 * time.Second
		reads.Go(func() {
			err := readAll(t.Context(), s.ref(":v1"), cfg)
			if tt.err == nil && err != nil || tt.err != nil && err == nil {
				t.Errorf("%s: error %v", name, err)
			}
			for _, w := range tt.err {
				if !strings.Contains(fmt.Sprint(err), w) {
					t.Errorf("%s: error %q does not say %q", name, err, w)
				}
			}
			if errors.Is(err, oci.ErrUnavailable) || n.Load() == 0 {
				t.Errorf("%s: %d requests, error %v", name, n.Load(), err)
			}
		})
	}
	reads.Wait()
}

func TestARegistryThatIsNotThereIsOutOfReach(t *testing.T) {
	s := newServer(t)
	src := s.ref("")
	s.Close()
	err := readAll(t.Context(), src, quick())
	wantErr(t, err, src, "refused")
	if !errors.Is(err, oci.ErrUnavailable) {
		t.Errorf("error %v", err)
	}
}

func TestARepositoryOrTagThatIsNotThereIsNamed(t *testing.T) {
	s, _, _ := standard(t)
	openError(t, s.ref(":v2"), image.Platform{}, s.ref(":v2"), "manifest v2", "missing")
	openError(t, s.ref("/y"), image.Platform{}, "p/x/y", "manifest latest")
}

func TestAContextEndsAReadOfARegistry(t *testing.T) {
	s, _, _ := standard(t)
	big := open(t, s.ref(":v1"), image.Platform{}).Layers[1].Digest.String()
	ctx, cancel := context.WithCancel(t.Context())
	s.set(onLayer(big, func(_ int64, w http.ResponseWriter, r *http.Request) bool {
		w.(http.Flusher).Flush()
		cancel()
		<-r.Context().Done()
		return true
	}))
	if err := readAll(ctx, s.ref(":v1"), quick()); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// What the reader has not asked for is on the wire or with the registry, never
// in memory: buffers of both sockets are some MiB.
func TestLayersAreStreamed(t *testing.T) {
	const size, most = 256 << 20, 32 << 20
	s, l := newServer(t), testimage.New(t)
	d := l.Image(testimage.Image{Layers: []testimage.Layer{layerA}})
	s.push(t, l, map[string]testimage.Descriptor{"v1": d})
	im := open(t, s.ref(":v1"), image.Platform{})
	var sent atomic.Int64
	ended := make(chan struct{})
	s.set(onLayer(im.Layers[0].Digest.String(), func(_ int64, w http.ResponseWriter, r *http.Request) bool {
		defer close(ended)
		w.Header().Set("Content-Length", fmt.Sprint(size))
		p := make([]byte, 64<<10)
		for range size / len(p) {
			if _, err := w.Write(p); err != nil {
				break
			}
			sent.Add(int64(len(p)))
		}
		return true
	}))
	im.Layers[0].Size = size
	r, err := im.LayerReader(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.CopyN(io.Discard, r, 1<<20); err != nil {
		t.Fatal(err)
	}
	if err := r.Close(); err != nil { // what was not read is now never sent
		t.Fatal(err)
	}
	<-ended
	if n := sent.Load(); n > most {
		t.Errorf("%d bytes were sent to a reader of %d", n, 1<<20)
	}
}

func TestURLsOfForeignLayersAreNeverFetched(t *testing.T) {
	s, l := newServer(t), testimage.New(t)
	const foreign = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
	y, diffID := l.Layer(testimage.Layer{Entries: layerA.Entries, MediaType: foreign})
	y.URLs = []string{s.URL + "/elsewhere"}
	conf := l.JSON(testimage.MediaConfig, map[string]any{"os": "linux", "architecture": "amd64", "rootfs": map[string]any{"type": "layers", "diff_ids": []string{diffID}}})
	d := l.JSON(testimage.MediaManifest, testimage.Manifest{SchemaVersion: 2, MediaType: testimage.MediaManifest, Config: conf, Layers: []testimage.Descriptor{y}})
	s.push(t, l, map[string]testimage.Descriptor{"latest": d})
	if err := readAll(t.Context(), s.ref(""), quick()); err != nil {
		t.Errorf("a foreign layer that was pushed: %v", err)
	}
	s.set(onLayer(y.Digest, func(_ int64, w http.ResponseWriter, _ *http.Request) bool {
		w.WriteHeader(http.StatusNotFound)
		return true
	}))
	wantErr(t, readAll(t.Context(), s.ref(""), quick()), y.Digest, "urls are never fetched")
	if n := s.count("elsewhere"); n != 0 {
		t.Errorf("%d requests for the url", n)
	}
}

func TestACertificateThatNobodyTrustsIsRefusedAtOnce(t *testing.T) {
	s := httptest.NewUnstartedServer(http.NotFoundHandler())
	s.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, 0)
	s.StartTLS()
	defer s.Close()
	err := readAll(t.Context(), "registry://"+s.Listener.Addr().String()+"/p/x", quick())
	wantErr(t, err, "certificate")
	if errors.Is(err, oci.ErrUnavailable) {
		t.Errorf("error %v: another try would not change it", err)
	}
}
