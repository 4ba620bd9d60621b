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

// Clients that send large manifests slowly, or take blobs slowly, fill no memory: who
// comes when there is none is told to come again, and is served when they have gone.
func TestMemoryIsBounded(t *testing.T) {
	refusals := front.NewRefusals()
	b := mem.New()
	s := newSite(t, b, func(c *front.Config) { c.Memory, c.Refusals = 1<<20, refusals })
	m := s.image("a", "layer")
	put := func(status int, code string) *http.Response {
		t.Helper()
		return s.want(status, code, "PUT", "/v2/a/manifests/v1", m, "Content-Type", manifestType)
	}

	r, w := io.Pipe()
	body := &slowBody{r, make(chan struct{})}
	rq, err := http.NewRequestWithContext(t.Context(), http.MethodPut, s.url+"/v2/a/manifests/slow", body)
	must(t, err)
	rq.Header.Set("Content-Type", manifestType)
	rq.Header.Set("Expect", "100-continue") // so that the body is asked for once the request is admitted
	tr := &http.Transport{ExpectContinueTimeout: time.Hour}
	defer tr.CloseIdleConnections()
	done := make(chan error)
	go func() {
		resp, err := tr.RoundTrip(rq)
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode != http.StatusCreated {
				err = fmt.Errorf("the slow push: %s", resp.Status)
			}
		}
		done <- err
	}()
	<-body.asked
	if resp := put(http.StatusServiceUnavailable, "UNAVAILABLE"); resp.Header.Get("Retry-After") == "" {
		t.Error("no Retry-After")
	}
	wantRefusals(t, refusals, "memory", 1)
	_, err = w.Write([]byte(m))
	must(t, err)
	w.Close()
	must(t, <-done)
	put(http.StatusCreated, "")

	// A client that does not read its blob.
	const size = 64 << 20 // more than the kernel keeps for it
	d := digest.FromBytes(make([]byte, size))
	for key, value := range map[string][]byte{registry.ContentKey(d): make([]byte, size), registry.BlobKey("a", d): fmt.Appendf(nil, `{"version":1,"size":%d}`, size)} {
		must(t, b.Put(t.Context(), key, bytes.NewReader(value), int64(len(value))))
	}
	resp, err := http.Get(s.url + "/v2/a/blobs/" + d.String())
	must(t, err)
	s.want(http.StatusServiceUnavailable, "UNAVAILABLE", "GET", "/v2/a/blobs/"+d.String(), "")
	s.want(http.StatusOK, "", "HEAD", "/v2/a/blobs/"+d.String(), "")
	wantRefusals(t, refusals, "memory", 2)
	resp.Body.Close()
	s.want(http.StatusPartialContent, "", "GET", "/v2/a/blobs/"+d.String(), "", "Range", "bytes=0-0")
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
