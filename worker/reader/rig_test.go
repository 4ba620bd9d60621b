package reader_test

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/internal/need"
	"quarry/nbd"
	"quarry/signer"
	"quarry/store/cache"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/worker/folder"
	"quarry/worker/reader"
)

// rig is a reader as it runs on a worker, and the store node it reads from.
type rig struct {
	*apitest.World
	dir   folder.Dir
	stop  func() // the store node
	log   *logBuffer
	end   func() // the reader
	store string // its URL
	// patience is the next reader's ReadTimeout.
	patience time.Duration
	// wrap, if not nil, is put between the next reader and its chunks.
	wrap func(reader.ChunkSource) reader.ChunkSource
}

// logBuffer is a log that can be read while it is written.
type logBuffer struct {
	mu sync.Mutex // guards b
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// source is chunks over HTTP, as cmd wires them, with a short patience.
type source struct{ *client.Stores }

func (s source) Traffic() reader.Traffic {
	st := s.Stats()
	return reader.Traffic{
		Requests: int64(st.Requests), WireBytes: int64(st.BytesIn + st.BytesOut), BucketBytes: int64(st.BucketBytes),
		Hedges: int64(st.Hedges), HedgesWon: int64(st.HedgesWon), AskedAgain: int64(st.Again),
	}
}
func (source) KeepAlive(context.Context, string, chunk.Digest, chunk.Digest, time.Duration) error {
	return nil
}
func (source) EndLease(context.Context, string) error { return nil }

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{World: apitest.New(t), log: &logBuffer{}}
	var err error
	if r.dir, err = folder.Open(filepath.Join(need.ShortDir(t), "w")); err != nil {
		t.Fatal(err)
	}
	srv, _ := r.Serve(t, nil)
	r.store = srv.URL
	r.stop = sync.OnceFunc(srv.Close)
	r.start(t, cache.MinLimit)
	t.Cleanup(func() { r.end() })
	return r
}

// start starts the reader and waits until it answers.
func (r *rig) start(t *testing.T, diskBytes int64) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	wrap := r.wrap
	if wrap == nil {
		wrap = func(s reader.ChunkSource) reader.ChunkSource { return s }
	}
	go func() { // ends with r.end
		ended <- reader.Run(ctx, reader.Config{
			Dir: r.dir, DiskBytes: diskBytes, ReadTimeout: r.patience, Idle: time.Hour, Log: slog.New(slog.NewJSONHandler(r.log, nil)),
			Open: func(o folder.Origin) (reader.ChunkSource, error) {
				c, err := client.New(client.Config{URL: o.Stores[0], Attempts: 1, Backoff: time.Millisecond})
				return wrap(source{client.NewStores(client.StoresConfig{Clients: []*client.Client{c}, Attempts: 1, Backoff: time.Millisecond})}), err
			},
		})
	}()
	r.end = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("reader: %v", err)
		}
	})
	for !reader.Ping(t.Context(), r.dir) {
		select {
		case err := <-ended:
			ended <- err // for r.end
			t.Fatalf("the reader has ended: %v", err)
		case <-time.After(time.Millisecond):
		}
	}
}

// restart ends the reader and starts another one.
func (r *rig) restart(t *testing.T, diskBytes int64) {
	t.Helper()
	r.end()
	r.start(t, diskBytes)
}

// fetch publishes an image and has the worker folder fetch it.
func (r *rig) fetch(t *testing.T, name string, files int) (*apitest.Image, chunk.Digest) {
	t.Helper()
	img := r.Publish(t, name, files, uint64(files))
	c, err := client.New(client.Config{URL: r.store})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	images := &folder.Images{Dir: r.dir, Source: c, Origin: folder.Origin{Stores: []string{r.store}}, Trust: signer.NewTrust(r.Key.Public())}
	im, err := images.Fetch(t.Context(), img.Ref, image.HostPlatform())
	if err != nil {
		t.Fatal(err)
	}
	return img, im.ID
}

// pull pulls an image, which must go through, be all of it had or not.
func (r *rig) pull(t *testing.T, id chunk.Digest, pin bool) reader.PullResult {
	t.Helper()
	res, err := reader.Pull(t.Context(), r.dir, id, pin, func(reader.PullProgress) {})
	if err != nil {
		t.Fatal(err)
	}
	return res
}

// tiered is stats of an image.
type tiered struct{ reader.Stats }

// tier returns what one tier gave.
func (s tiered) tier(name string) reader.Tier {
	for _, k := range s.Tiers {
		if k.Tier == name {
			return k
		}
	}
	return reader.Tier{}
}

// stats asks the reader about an image that is open.
func (r *rig) stats(t *testing.T, id chunk.Digest) tiered {
	t.Helper()
	st, err := reader.ImageStats(t.Context(), r.dir, id)
	if err != nil {
		t.Fatal(err)
	}
	return tiered{st}
}

// waitFor asks until something is so, which a busy machine has long to bring about.
func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for limit := time.Now().Add(time.Minute); !done(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// readAt fills p.
func readAt(t *testing.T, c *nbd.Client, p []byte, off int64) error {
	t.Helper()
	return c.View(t.Context(), off, len(p), func(got []byte) error {
		copy(p, got)
		return nil
	})
}

// metrics returns the lines of GET /metrics.
func (r *rig) metrics(t *testing.T) string {
	t.Helper()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", r.dir.ReaderControl())
	}
	c := http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
	resp, err := c.Get("http://reader/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// lines are those of a text with all of the words.
func lines(text string, words ...string) (found []string) {
next:
	for line := range strings.Lines(text) {
		for _, w := range words {
			if !strings.Contains(line, w) {
				continue next
			}
		}
		found = append(found, line)
	}
	return found
}

// open connects to an image as a shim does.
func (r *rig) open(t *testing.T, id chunk.Digest) *nbd.Client {
	t.Helper()
	c, err := nbd.Dial(t.Context(), "unix", r.dir.ReaderSocket(), id.Hex())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}
