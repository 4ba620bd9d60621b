package e2e_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	"quarry/e2e/lab"
)

// held is a body that has its bytes and then gives nothing, as that of a client that is
// in the middle of its upload.
type held struct {
	io.Reader
	until <-chan struct{}
}

func (h held) Read(p []byte) (int, error) {
	n, err := h.Reader.Read(p)
	if err == io.EOF {
		<-h.until
		return n, io.ErrUnexpectedEOF
	}
	return n, err
}

// TestAPushGoesOnAfterTheServerWasKilled kills quarry serve in the middle of the upload of
// a large blob, three times. The client, which knows the Location and what it was answered,
// asks where the upload goes on: never before what was acknowledged, and never behind what
// it has sent. The blob is there in the end.
func TestAPushGoesOnAfterTheServerWasKilled(t *testing.T) {
	l := newLab(t)
	blob := make([]byte, 64<<20)
	rand.NewChaCha8([32]byte{5}).Read(blob)
	digest := fmt.Sprintf("sha256:%x", sha256.Sum256(blob))

	s := serveAgain(t, l)
	resp := send(t, s, http.MethodPost, "/v2/t/x/blobs/uploads/", nil, -1, http.StatusAccepted)
	at := resp.Header.Get("Location")
	var offset int64
	for kill := range 3 {
		// One part that is acknowledged, and one that the server dies in.
		const part = 6 << 20
		resp = send(t, s, http.MethodPatch, at, bytes.NewReader(blob[offset:offset+part]), offset, http.StatusAccepted)
		acknowledged := offsetOf(t, resp)
		if acknowledged != offset+part {
			t.Fatalf("acknowledged up to %d, want %d", acknowledged, offset+part)
		}
		sent := acknowledged + 2*part
		killed, ended := make(chan struct{}), make(chan struct{})
		go func() { // ends with the server
			defer close(ended)
			rq, err := http.NewRequestWithContext(t.Context(), http.MethodPatch, s.URL+at, held{bytes.NewReader(blob[acknowledged:sent]), killed})
			if err != nil {
				return
			}
			if resp, err := http.DefaultClient.Do(rq); err == nil {
				resp.Body.Close()
				t.Errorf("the server answers %s to a part that has not ended", resp.Status)
			}
		}()
		end := time.Now().Add(time.Minute)
		for offset = acknowledged; offset < acknowledged+part; time.Sleep(time.Millisecond) { // some of it is there
			if time.Now().After(end) {
				t.Fatalf("%d bytes are there a minute after %d were sent", offset, sent)
			}
			offset = offsetOf(t, send(t, s, http.MethodGet, at, nil, -1, http.StatusNoContent))
		}
		if err := s.Kill(); err != nil {
			t.Fatal(err)
		}
		close(killed)
		<-ended
		s = serveAgain(t, l)
		offset = offsetOf(t, send(t, s, http.MethodGet, at, nil, -1, http.StatusNoContent))
		if offset < acknowledged || offset > sent {
			t.Fatalf("kill %d: it goes on at %d, acknowledged were %d and sent %d", kill, offset, acknowledged, sent)
		}
		t.Logf("kill %d: acknowledged %d, sent %d, it goes on at %d", kill, acknowledged, sent, offset)
	}
	send(t, s, http.MethodPatch, at, bytes.NewReader(blob[offset:]), offset, http.StatusAccepted)
	resp = send(t, s, http.MethodPut, at+"?digest="+digest, nil, -1, http.StatusCreated)
	if got := resp.Header.Get("Docker-Content-Digest"); got != digest {
		t.Errorf("stored as %s, want %s", got, digest)
	}
	got, err := http.Get(s.URL + "/v2/t/x/blobs/" + digest)
	if err != nil {
		t.Fatal(err)
	}
	defer got.Body.Close()
	sum := sha256.New()
	if _, err := io.Copy(sum, got.Body); err != nil || fmt.Sprintf("sha256:%x", sum.Sum(nil)) != digest {
		t.Errorf("pulled: %x, %v", sum.Sum(nil), err)
	}
	if err := s.Stop(); err != nil {
		t.Error(err)
	}
}

func serveAgain(t *testing.T, l *lab.Lab) *lab.Server {
	t.Helper()
	s, err := l.Serve(t.Context(), l.Path("d"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if s.Alive() {
			s.Kill()
		}
	})
	return s
}

// send makes a request, whose body starts at from in its blob unless that is -1.
func send(t *testing.T, s *lab.Server, method, path string, body *bytes.Reader, from int64, status int) *http.Response {
	t.Helper()
	rq, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, nil)
	if body != nil {
		rq, err = http.NewRequestWithContext(t.Context(), method, s.URL+path, body)
	}
	if err != nil {
		t.Fatal(err)
	}
	if from >= 0 {
		rq.Header.Set("Content-Range", fmt.Sprintf("%d-%d", from, from+int64(body.Len())-1))
	}
	client := http.Client{Timeout: time.Minute} // of a test that hangs
	resp, err := client.Do(rq)
	if err != nil {
		t.Fatal(err)
	}
	text, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if resp.StatusCode != status {
		t.Fatalf("%s %s: %s %s, want %d", method, path, resp.Status, text, status)
	}
	return resp
}

// offsetOf reads where an upload goes on from the Range of an answer.
func offsetOf(t *testing.T, resp *http.Response) int64 {
	t.Helper()
	last, err := strconv.ParseInt(strings.TrimPrefix(resp.Header.Get("Range"), "0-"), 10, 64)
	if err != nil {
		t.Fatalf("Range %q", resp.Header.Get("Range"))
	}
	return last + 1
}
