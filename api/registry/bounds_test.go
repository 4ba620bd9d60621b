package registry_test

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	"github.com/prometheus/client_golang/prometheus"

	front "quarry/api/registry"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/registry"
)

// wantRefusals checks how many requests were counted as beyond a bound.
func wantRefusals(t *testing.T, m *prometheus.CounterVec, bound string, want float64) {
	t.Helper()
	reg := prometheus.NewRegistry()
	reg.MustRegister(m)
	families, err := reg.Gather()
	must(t, err)
	got := map[string]float64{}
	for _, f := range families {
		for _, series := range f.Metric {
			got[series.Label[0].GetValue()] = series.Counter.GetValue()
		}
	}
	if got[bound] != want || len(got) != 1 {
		t.Errorf("refusals %v, want %g for %s", got, want, bound)
	}
}

func TestUploadsOfOneTokenAreBounded(t *testing.T) {
	refusals := front.NewRefusals()
	s := newSite(t, mem.New(), func(c *front.Config) {
		c.Holder = func(r *http.Request) string { return r.Header.Get("Authorization") }
		c.Refusals = refusals
	})
	const most = 1024 / 4
	for range most {
		s.want(http.StatusAccepted, "", "POST", "/v2/a/blobs/uploads/", "", "Authorization", "greedy")
	}
	resp := s.want(http.StatusTooManyRequests, "TOOMANYREQUESTS", "POST", "/v2/b/blobs/uploads/", "", "Authorization", "greedy")
	if resp.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	wantRefusals(t, refusals, "token_uploads", 1)
	s.want(http.StatusAccepted, "", "POST", "/v2/a/blobs/uploads/", "", "Authorization", "honest")
	s.want(http.StatusNotFound, "MANIFEST_UNKNOWN", "GET", "/v2/a/manifests/x", "", "Authorization", "greedy")
	wantRefusals(t, refusals, "token_uploads", 1)
}

// slowBody is a body that a client begins to send when the server asks for it, and then
// takes its time with.
type slowBody struct {
	*io.PipeReader
	asked chan struct{} // closed when the server reads
}

func (b *slowBody) Read(p []byte) (int, error) {
	select {
	case <-b.asked:
	default:
		close(b.asked)
	}
	return b.PipeReader.Read(p)
}

// slowPut begins to push a manifest, of which the client sends nothing yet, and returns once
// the server waits for it. end sends the body, and returns the status.
func (s *site) slowPut(headers ...string) (send io.WriteCloser, end func() int) {
	s.t.Helper()
	r, w := io.Pipe()
	body := &slowBody{r, make(chan struct{})}
	rq, err := http.NewRequestWithContext(s.t.Context(), http.MethodPut, s.url+"/v2/a/manifests/slow", body)
	must(s.t, err)
	rq.Header.Set("Content-Type", manifestType)
	rq.Header.Set("Expect", "100-continue") // so that the body is asked for once it is read
	for i := 0; i < len(headers); i += 2 {
		rq.Header.Set(headers[i], headers[i+1])
	}
	tr := &http.Transport{ExpectContinueTimeout: time.Hour}
	s.t.Cleanup(tr.CloseIdleConnections)
	status := make(chan int, 1)
	go func() {
		defer close(status)
		if resp, err := tr.RoundTrip(rq); err == nil {
			resp.Body.Close()
			status <- resp.StatusCode
		}
	}()
	select {
	case <-body.asked:
	case got := <-status:
		s.t.Fatalf("a push whose body is slow: %d before it", got)
	}
	return w, func() int { w.Close(); return <-status }
}

// storeBlob makes a blob of zeros one of repository a.
func (s *site) storeBlob(size int) digest.Digest {
	s.t.Helper()
	d := digest.FromBytes(make([]byte, size))
	for key, value := range map[string][]byte{registry.ContentKey(d): make([]byte, size), registry.BlobKey("a", d): fmt.Appendf(nil, `{"version":1,"size":%d}`, size)} {
		must(s.t, s.bucket.Put(s.t.Context(), key, bytes.NewReader(value), int64(len(value))))
	}
	return d
}

// Clients that send large manifests slowly, or take blobs slowly, fill no memory: who
// comes when there is none is told to come again, and is served when they have gone.
func TestMemoryIsBounded(t *testing.T) {
	refusals := front.NewRefusals()
	b := mem.New()
	s := newSite(t, b, func(c *front.Config) { c.Memory, c.Refusals = 1<<20, refusals })
	m := s.image("a", "layer")
	large := m + strings.Repeat(" ", 64<<10)
	put := func(body string) *http.Response {
		t.Helper()
		resp, _ := s.do("PUT", "/v2/a/manifests/v1", body, "Content-Type", manifestType)
		return resp
	}

	send, end := s.slowPut()
	_, err := io.WriteString(send, large)
	must(t, err)
	resp := put(large)
	for resp.StatusCode == http.StatusCreated { // the slow one has not come so far
		resp = put(large)
	}
	if resp.StatusCode != http.StatusServiceUnavailable || resp.Header.Get("Retry-After") == "" {
		t.Errorf("beside a slow large manifest: %s %v", resp.Status, resp.Header)
	}
	wantRefusals(t, refusals, "memory", 1)
	if resp := put(m); resp.StatusCode != http.StatusCreated {
		t.Errorf("a small manifest: %s", resp.Status)
	}
	if got := end(); got != http.StatusCreated {
		t.Errorf("the slow push: %d", got)
	}
	if resp := put(large); resp.StatusCode != http.StatusCreated {
		t.Errorf("a large manifest after it: %s", resp.Status)
	}

	// A client that does not read its blob.
	const size = 64 << 20 // more than the kernel keeps for it
	d := s.storeBlob(size)
	resp, err = http.Get(s.url + "/v2/a/blobs/" + d.String())
	must(t, err)
	s.want(http.StatusServiceUnavailable, "UNAVAILABLE", "GET", "/v2/a/blobs/"+d.String(), "")
	s.want(http.StatusOK, "", "HEAD", "/v2/a/blobs/"+d.String(), "")
	wantRefusals(t, refusals, "memory", 2)
	resp.Body.Close()
	s.want(http.StatusPartialContent, "", "GET", "/v2/a/blobs/"+d.String(), "", "Range", "bytes=0-0")
}

// One token cannot take all the memory: neither with blobs that it does not read, nor
// with manifests that it does not send, of which none takes any.
func TestMemoryOfOneTokenIsBounded(t *testing.T) {
	refusals := front.NewRefusals()
	s := newSite(t, mem.New(), func(c *front.Config) {
		c.Memory, c.Refusals = 4<<20, refusals
		c.Holder = func(r *http.Request) string { return r.Header.Get("Authorization") }
	})
	m := s.image("a", "layer")
	for range 16 {
		_, end := s.slowPut("Authorization", "greedy")
		defer end()
	}
	for _, who := range []string{"greedy", "honest"} {
		s.want(http.StatusCreated, "", "PUT", "/v2/a/manifests/v1", m, "Content-Type", manifestType, "Authorization", who)
		s.want(http.StatusOK, "", "GET", "/v2/a/manifests/v1", "", "Authorization", who)
	}

	const size = 64 << 20 // more than the kernel keeps for a client
	blob := "/v2/a/blobs/" + s.storeBlob(size).String()
	for range 3 {
		rq, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.url+blob, nil)
		must(t, err)
		rq.Header.Set("Authorization", "greedy")
		resp, err := http.DefaultClient.Do(rq)
		must(t, err)
		defer resp.Body.Close()
	}
	s.want(http.StatusTooManyRequests, "TOOMANYREQUESTS", "GET", blob, "", "Authorization", "greedy")
	wantRefusals(t, refusals, "token_memory", 1)
	if resp := s.want(http.StatusOK, "", "GET", blob, "", "Authorization", "honest"); resp.ContentLength != size {
		t.Errorf("a blob of %d bytes, want %d", resp.ContentLength, size)
	}
}

// A list of repositories waits for memory as one of tags does.
func TestListsOfReposTakeMemory(t *testing.T) {
	held, end := make(chan struct{}), make(chan struct{})
	b := &buckettest.Faulty{Bucket: mem.New(), Before: func(op buckettest.Op) error {
		if op.Method == "List" {
			close(held)
			<-end
		}
		return nil
	}}
	s := newSite(t, b, func(c *front.Config) { c.Memory = 1 << 20 })
	done := make(chan error)
	go func() {
		resp, err := http.Get(s.url + "/v2/a/tags/list")
		if err == nil {
			resp.Body.Close()
		}
		done <- err
	}()
	<-held
	s.want(http.StatusServiceUnavailable, "UNAVAILABLE", "GET", "/v2/_catalog", "")
	close(end)
	must(t, <-done)
	s.want(http.StatusOK, "", "GET", "/v2/_catalog", "")
}

// Where the store keeps its files is not the clients' business.
func TestErrorsHaveNoPathsOfTheServer(t *testing.T) {
	for _, test := range []struct {
		err    syscall.Errno
		status int
		code   string
	}{{syscall.ENOSPC, http.StatusInsufficientStorage, "DISK_FULL"}, {syscall.EDQUOT, http.StatusInsufficientStorage, "DISK_FULL"}, {syscall.EIO, http.StatusInternalServerError, "UNKNOWN"}} {
		b := &buckettest.Faulty{Bucket: mem.New(), Before: func(op buckettest.Op) error {
			if op.Method == "Put" {
				return &fs.PathError{Op: "write", Path: "/srv/quarry/" + op.Key, Err: test.err}
			}
			return nil
		}}
		s := newSite(t, b, nil)
		path := "/v2/a/blobs/uploads/?digest=" + digest.FromString("x").String()
		s.want(test.status, test.code, "POST", path, "x")
		if _, body := s.do("POST", path, "x"); strings.Contains(body, "/srv/") {
			t.Errorf("%v: the answer says %s", test.err, body)
		}
	}
}
