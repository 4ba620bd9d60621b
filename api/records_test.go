package api_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/pack"
)

const bothVersions = api.TypeFrames + ";q=0.5, " + api.TypeFrames2

// randomChunks stores n chunks of that size in one pack.
func randomChunks(t testing.TB, w *apitest.World, n, size int) []chunk.Digest {
	t.Helper()
	random := rand.NewChaCha8([32]byte{byte(n)})
	var ps [][]byte
	for range n {
		p := make([]byte, size)
		random.Read(p)
		ps = append(ps, p)
	}
	return w.PutChunks(t, ps...)
}

// inFiles serves the world's chunks from files.
func inFiles(t testing.TB, w *apitest.World, change func(*os.File) error) func(*api.Config) {
	return func(c *api.Config) { c.Chunks = w.InFiles(t, buckettest.Files{Bucket: w.Bucket, Change: change}) }
}

func askBatch(t *testing.T, url, accept string, ds ...chunk.Digest) answer {
	t.Helper()
	return ask(t, "POST", url+"/v1/chunks:batchGet", string(api.EncodeDigests(ds)), "Content-Type", api.TypeDigests, "Accept", accept)
}

// wantChunks checks an answer: the version, and the chunks, in whatever order.
func wantChunks(t *testing.T, a answer, version int, found, missing []chunk.Digest) {
	t.Helper()
	if a.StatusCode != 200 {
		t.Fatalf("status %d: %s", a.StatusCode, a.body)
	}
	frames, got, err := decodeAnswer(bytes.NewReader(a.body), len(found)+len(missing))
	kind := map[int]string{1: api.TypeFrames, 2: api.TypeFrames2}[version]
	if err != nil || got != version || a.Header.Get("Content-Type") != kind {
		t.Fatalf("version %d in %s, error %v, want version %d", got, a.Header.Get("Content-Type"), err, version)
	}
	var ok, not []chunk.Digest
	for _, f := range frames {
		if f.Status == api.StatusNotFound {
			not = append(not, f.Digest)
			continue
		}
		p, err := pack.Decode(nil, f.Codec, f.Stored, f.Len)
		if err != nil || chunk.Sum(p) != f.Digest {
			t.Errorf("chunk %s of status %d has other bytes: %v", f.Digest, f.Status, err)
		}
		ok = append(ok, f.Digest)
	}
	if !sameSet(ok, found) || !sameSet(not, missing) {
		t.Errorf("%d chunks and %d missing ones, want %d and %d", len(ok), len(not), len(found), len(missing))
	}
}

func sameSet(a, b []chunk.Digest) bool {
	order := func(a, b chunk.Digest) int { return bytes.Compare(a[:], b[:]) }
	return slices.Equal(slices.SortedFunc(slices.Values(a), order), slices.SortedFunc(slices.Values(b), order))
}

func TestABatchIsSentAsRecordsToWhoReadsThem(t *testing.T) {
	w := apitest.New(t)
	ds := slices.Concat(randomChunks(t, w, 20, 5000), randomChunks(t, w, 3, 70_000))
	missing := []chunk.Digest{chunk.Sum([]byte("missing")), chunk.Sum([]byte("missing too"))}
	srv, _ := w.Serve(t, inFiles(t, w, nil))
	for name, some := range map[string][]chunk.Digest{
		"all": ds, "one": ds[3:4], "every second": {ds[0], ds[2], ds[4]}, "of both packs": {ds[19], ds[0], ds[20]},
		"twice": {ds[5], ds[6], ds[5], ds[6]},
	} {
		t.Run(name, func(t *testing.T) {
			a := askBatch(t, srv.URL, bothVersions, slices.Concat(some, missing, missing)...)
			found := slices.Clone(some)
			if name == "twice" {
				found = found[:2]
			}
			wantChunks(t, a, 2, found, missing)
			read, err := strconv.Atoi(a.Header.Get(api.HeaderBucketBytes))
			if err != nil || a.ContentLength != int64(len(a.body)) || read <= 0 || read > len(a.body) {
				t.Errorf("headers %v of a body of %d bytes", a.Header, len(a.body))
			}
			if len(a.TransferEncoding) > 0 || len(a.Trailer) > 0 {
				t.Errorf("transfer encoding %v, trailers %v: no file is sent so", a.TransferEncoding, a.Trailer)
			}
		})
	}
	wantChunks(t, askBatch(t, srv.URL, "", ds...), 1, ds, nil)
	wantChunks(t, askBatch(t, srv.URL, api.TypeFrames, ds...), 1, ds, nil)
	wantChunks(t, askBatch(t, srv.URL, "*/*", ds...), 1, ds, nil)
	wantChunks(t, askBatch(t, srv.URL, bothVersions, missing...), 1, nil, missing)
}

// Where nobody has files, or what the files have is not what the index says, a batch is
// answered in version 1, which can say it of each chunk.
func TestABatchIsReadWhereItCannotBeSent(t *testing.T) {
	w := apitest.New(t)
	ds := randomChunks(t, w, 20, 5000)
	other := randomChunks(t, w, 1, 5000)
	memory, _ := w.Serve(t, nil)
	wantChunks(t, askBatch(t, memory.URL, bothVersions, ds...), 1, ds, nil)

	cut, _ := w.Serve(t, inFiles(t, w, func(f *os.File) error { return f.Truncate(50_000) }))
	wantChunks(t, askBatch(t, cut.URL, bothVersions, ds...), 1, ds, nil)
	gone, _ := w.Serve(t, inFiles(t, w, func(*os.File) error { return errors.New("no file") }))
	wantChunks(t, askBatch(t, gone.URL, bothVersions, slices.Concat(ds, other)...), 1, slices.Concat(ds, other), nil)
}

// A file that ends, or cannot be read, when its length was sent already: the answer is
// cut off and does not look whole.
func TestAnAnswerWhoseFileFailsIsCutOff(t *testing.T) {
	w := apitest.New(t)
	ds := randomChunks(t, w, 1000, 30_000)
	log := make(batchLines, 10)
	files := make(chan *os.File, 1)
	srv, _ := w.Serve(t, func(c *api.Config) {
		inFiles(t, w, func(f *os.File) error { files <- f; return nil })(c)
		c.Log = slog.New(slog.NewJSONHandler(log, nil))
	})
	conn := dialBatch(t, srv.Listener.Addr().String(), ds)
	defer conn.Close()
	one := make([]byte, 1)
	if _, err := conn.Read(one); err != nil {
		t.Fatal(err)
	}
	if err := (<-files).Truncate(100); err != nil { // the socket took some of its 30 MB
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, conn); err == nil && n >= 30_000_000 {
		t.Errorf("%d bytes came", n)
	}
	if line := <-log; line.Level != "ERROR" || line.Status != 500 {
		t.Errorf("logged as %+v, want an error of the server", line)
	}
}

// dialBatch asks for a batch in either version and reads nothing.
func dialBatch(t *testing.T, addr string, ds []chunk.Digest) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	body := api.EncodeDigests(ds)
	fmt.Fprintf(conn, "POST /v1/chunks:batchGet HTTP/1.1\r\nHost: x\r\nContent-Type: %s\r\nAccept: %s\r\nContent-Length: %d\r\n\r\n%s",
		api.TypeDigests, bothVersions, len(body), body)
	return conn
}

// As TestAClientThatDoesNotReadLosesItsSlot, for what the kernel sends.
func TestAClientThatDoesNotReadRecordsLosesItsSlot(t *testing.T) {
	w := apitest.New(t)
	ds := randomChunks(t, w, 1000, 30_000) // more than the socket buffers take
	log := make(batchLines, 10)
	srv, _ := w.Serve(t, func(c *api.Config) {
		inFiles(t, w, nil)(c)
		c.MaxReads, c.StallTimeout, c.QueueTimeout = 1, 300*time.Millisecond, time.Minute
		c.Log = slog.New(slog.NewJSONHandler(log, nil))
	})
	conn := dialBatch(t, srv.Listener.Addr().String(), ds)
	defer conn.Close()
	one := make([]byte, 1)
	if _, err := conn.Read(one); err != nil { // it has the slot
		t.Fatal(err)
	}
	if a := ask(t, "GET", srv.URL+"/v1/chunks/"+ds[0].String(), ""); a.StatusCode != 200 {
		t.Errorf("the other client: status %d", a.StatusCode)
	}
	if line := <-log; line.Level != "INFO" || line.Status != 499 {
		t.Errorf("logged as %+v, want INFO with status 499", line)
	}
}

// A client that is slow, and not silent, gets all of it, however long it takes.
func TestASlowClientGetsItsRecords(t *testing.T) {
	w := apitest.New(t)
	ds := randomChunks(t, w, 300, 30_000)
	// On a busy machine a client may be silent for a while and not want to: one that is
	// slower has to get all of it where it may be silent for longer.
	var err error
	for stall := 200 * time.Millisecond; stall < 10*time.Second; stall *= 4 {
		if err = slowly(t, w, ds, stall); err == nil {
			return
		}
	}
	t.Error(err)
}

// slowly reads records in some four times the time for which a client may be silent.
func slowly(t *testing.T, w *apitest.World, ds []chunk.Digest, stall time.Duration) error {
	t.Helper()
	srv, _ := w.Serve(t, func(c *api.Config) {
		inFiles(t, w, nil)(c)
		c.StallTimeout = stall
		c.ChunkTimeout = stall * 3 / 2 // it is not the store that is silent
	})
	conn := dialBatch(t, srv.Listener.Addr().String(), ds)
	defer conn.Close()
	if err := conn.(*net.TCPConn).SetReadBuffer(64 << 10); err != nil {
		t.Fatal(err)
	}
	var got bytes.Buffer
	for buf := make([]byte, 256<<10); ; time.Sleep(stall / 10) {
		n, err := conn.Read(buf)
		got.Write(buf[:n])
		if err != nil || bytes.HasSuffix(got.Bytes(), append([]byte{2, 0, 0, 0, 0x2c, 1}, make([]byte, 42)...)) {
			break
		}
	}
	_, body, _ := bytes.Cut(got.Bytes(), []byte("\r\n\r\n"))
	frames, version, err := decodeAnswer(bytes.NewReader(body), len(ds))
	if err != nil || version != 2 || len(frames) != len(ds) {
		return fmt.Errorf("%d chunks of version %d, error %v", len(frames), version, err)
	}
	return nil
}

// Over TLS, over HTTP/2 and over a unix socket nothing can be sent past the process,
// and the answer is the same.
func TestRecordsGoOverEveryConnection(t *testing.T) {
	w := apitest.New(t)
	ds := randomChunks(t, w, 200, 30_000)
	for _, name := range []string{"http", "https", "http/2", "unix"} {
		t.Run(name, func(t *testing.T) {
			cfg := api.Config{Names: w.Catalog, Bucket: w.Bucket}
			inFiles(t, w, nil)(&cfg)
			h := api.NewHandler(cfg)
			srv := httptest.NewUnstartedServer(h)
			srv.Config = api.NewServer(h)
			if name == "unix" {
				l, err := net.Listen("unix", filepath.Join(t.TempDir(), "socket"))
				if err != nil {
					t.Fatal(err)
				}
				srv.Listener.Close()
				srv.Listener = l
			}
			addr := srv.Listener.Addr()
			srv.Listener = h.Listen(srv.Listener, 0)
			transport := &http.Transport{
				ForceAttemptHTTP2: name == "http/2",
				TLSClientConfig:   &tls.Config{InsecureSkipVerify: true}, // the server's certificate is made here
				DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
					return new(net.Dialer).DialContext(ctx, addr.Network(), addr.String())
				},
			}
			url := "http://localhost"
			if name == "https" || name == "http/2" {
				srv.EnableHTTP2 = name == "http/2"
				srv.StartTLS()
				url = "https://localhost"
			} else {
				srv.Start()
			}
			defer srv.Close()
			defer transport.CloseIdleConnections()
			rq, err := http.NewRequest("POST", url+"/v1/chunks:batchGet", bytes.NewReader(api.EncodeDigests(ds)))
			if err != nil {
				t.Fatal(err)
			}
			rq.Header.Set("Content-Type", api.TypeDigests)
			rq.Header.Set("Accept", bothVersions)
			res, err := (&http.Client{Transport: transport}).Do(rq)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			body, err := io.ReadAll(res.Body)
			if err != nil {
				t.Fatal(err)
			}
			if want := map[bool]int{true: 2, false: 1}[name == "http/2"]; res.ProtoMajor != want {
				t.Errorf("answered over %s", res.Proto)
			}
			wantChunks(t, answer{res, body}, 2, ds, nil)
		})
	}
}
