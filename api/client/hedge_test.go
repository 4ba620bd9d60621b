package client_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/store"
	"quarry/store/bucket"
	"quarry/store/chunk"
)

// silent is a node that answers nothing and tells when it was asked, and when a
// request was given up.
func silent(t *testing.T) (c *client.Client, asked, left <-chan struct{}) {
	t.Helper()
	come, gone := make(chan struct{}, 100), make(chan struct{}, 100)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body) // or the server does not see that the client leaves
		come <- struct{}{}
		<-r.Context().Done()
		gone <- struct{}{}
	}))
	t.Cleanup(srv.Close)
	return connect(t, client.Config{URL: srv.URL}), come, gone
}

func TestAStallIsHedgedAtAnotherStoreAndTheLoserCancelled(t *testing.T) {
	w := apitest.New(t)
	p := []byte("a chunk")
	d := w.PutChunk(t, p)
	_, h := w.Serve(t, nil)
	slow, asked, left := silent(t)
	srv := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		<-asked // or the first request might be given up before it is there
		h.ServeHTTP(rw, r)
	}))
	defer srv.Close()
	good := connect(t, client.Config{URL: srv.URL})
	s := client.NewStores(client.StoresConfig{Clients: []*client.Client{slow, good}, HedgeAfter: time.Millisecond})
	if got, err := s.Get(t.Context(), d, nil); err != nil || !bytes.Equal(got, p) {
		t.Fatalf("got %q, error %v", got, err)
	}
	<-left // or the test never ends
	st := s.Stats()
	if st.Hedges != 1 || st.HedgesWon != 1 || slow.Stats().Requests != 1 || good.Stats().Requests != 1 {
		t.Errorf("counters %+v, want one request at each, the second a hedge that won", st)
	}
}

func TestAStallOfTheOnlyStoreIsHedgedOnAnotherConnection(t *testing.T) {
	p := []byte("a chunk")
	var asked atomic.Int64
	left := make(chan struct{})
	var ports [2]string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		n := asked.Add(1)
		ports[n-1] = r.RemoteAddr
		if n == 1 {
			io.Copy(io.Discard, r.Body) // or the server does not see that the client leaves
			<-r.Context().Done()        // not a header: it would be an answer that is none
			close(left)
			return
		}
		answer(w, frameOf(p))
	}))
	defer srv.Close()
	c := connect(t, client.Config{URL: srv.URL})
	s := client.NewStores(client.StoresConfig{Clients: []*client.Client{c}, HedgeAfter: time.Millisecond})
	if got, err := s.Get(t.Context(), chunk.Sum(p), nil); err != nil || !bytes.Equal(got, p) {
		t.Fatalf("got %q, error %v", got, err)
	}
	<-left
	if n := asked.Load(); n != 2 || ports[0] == ports[1] {
		t.Errorf("%d requests, from %v", n, ports)
	}
}

// stalling is a bucket whose reads of some objects wait until they are released.
type stalling struct {
	bucket.Bucket
	mu      sync.Mutex
	stalled map[string]bool
	begun   chan struct{} // a read waits
	release chan struct{}
}

func (b *stalling) ReadAt(ctx context.Context, key string, p []byte, off int64) error {
	b.mu.Lock()
	stalled := b.stalled[key]
	b.mu.Unlock()
	if stalled {
		b.begun <- struct{}{}
		select {
		case <-b.release:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return b.Bucket.ReadAt(ctx, key, p, off)
}

// stallingWorld is a store on a stalling bucket, and its server.
func stallingWorld(t *testing.T) (*apitest.World, *stalling, string) {
	t.Helper()
	w := apitest.New(t)
	b := &stalling{Bucket: w.Bucket, stalled: map[string]bool{}, begun: make(chan struct{}, 1000), release: make(chan struct{})}
	srv, _ := w.Serve(t, func(c *api.Config) { c.Chunks, c.Bucket, c.ChunkTimeout = w.Over(t, b), b, time.Hour })
	return w, b, srv.URL
}

// put stores a chunk in a pack of its own, whose reads stall or not.
func (b *stalling) put(t *testing.T, w *apitest.World, p []byte, stalled bool) chunk.Digest {
	t.Helper()
	d := w.PutChunk(t, p)
	if stalled {
		key := w.PackOf(t, d)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.stalled[key] = true
	}
	return d
}

// A stall blocks only those who need it: with 100 requests that wait for the
// bucket, another one is served, and all the hundred are when the bucket is back.
func TestAHundredStalledRequestsLeaveRoomForOthers(t *testing.T) {
	w, b, url := stallingWorld(t)
	const stalled = 100
	s := client.NewStores(client.StoresConfig{Clients: []*client.Client{connect(t, client.Config{URL: url})}, HedgeAfter: -1, AttemptTimeout: time.Hour})
	good := []byte("needed now")
	other := b.put(t, w, good, false)
	var batches [stalled][]chunk.Digest // each as heavy as a request can be for the server
	for i := range batches {
		for j := range 8 {
			batches[i] = append(batches[i], b.put(t, w, fmt.Appendf(nil, "chunk %d of %d", j, i), j == 7))
		}
	}
	var wg sync.WaitGroup
	var got atomic.Int64
	for _, ds := range batches {
		wg.Go(func() {
			err := s.GetBatch(t.Context(), ds, func(_ chunk.Digest, _ []byte, err error) error {
				got.Add(1)
				return err
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
	for range stalled {
		<-b.begun
	}
	for range 3 {
		if p, err := s.Get(t.Context(), other, nil); err != nil || !bytes.Equal(p, good) {
			t.Fatalf("with %d requests stalled: got %q, error %v", stalled, p, err)
		}
	}
	close(b.release)
	wg.Wait()
	if n := got.Load(); n != stalled*8 {
		t.Errorf("%d chunks came, want %d", n, stalled*8)
	}
}

func TestAStalledChunkHoldsUpNoneOfItsBatch(t *testing.T) {
	w, b, url := stallingWorld(t)
	s := client.NewStores(client.StoresConfig{Clients: []*client.Client{connect(t, client.Config{URL: url})}, HedgeAfter: -1, AttemptTimeout: time.Hour})
	last := b.put(t, w, []byte("the stalled one"), true)
	ds := []chunk.Digest{last}
	for i := range 50 {
		ds = append(ds, b.put(t, w, fmt.Appendf(nil, "chunk %d", i), false))
	}
	var got []chunk.Digest
	err := s.GetBatch(t.Context(), ds, func(d chunk.Digest, _ []byte, err error) error {
		if got = append(got, d); len(got) == len(ds)-1 {
			close(b.release) // only now
		}
		return err
	})
	if err != nil || len(got) != len(ds) || got[len(got)-1] != last {
		t.Errorf("%d chunks of %d, error %v", len(got), len(ds), err)
	}
}

// restarted is a node that is killed in the middle of its first answer, comes
// back on the same address, and is dialled only when it is back.
func TestAStoreThatRestartsInMidReadLosesNothing(t *testing.T) {
	l := newFaultLab(t)
	back := make(chan string, 1)
	die := make(chan struct{})
	first := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		rec := httptest.NewRecorder()
		l.honest.ServeHTTP(rec, r)
		w.Header().Set("Content-Type", api.TypeFrames)
		w.Write(rec.Body.Bytes()[:rec.Body.Len()/2])
		http.NewResponseController(w).Flush()
		close(die)
		<-r.Context().Done()
	}))
	go func() { // ends when the second server is up
		<-die
		first.CloseClientConnections()
		first.Listener.Close()
		second := httptest.NewServer(l.honest)
		t.Cleanup(second.Close)
		back <- second.Listener.Addr().String()
	}()
	t.Cleanup(first.Close)
	dials := 0
	c := connect(t, client.Config{URL: "http://node:1", Dial: dialer(func(ctx context.Context) (string, error) {
		if dials++; dials == 1 {
			return first.Listener.Addr().String(), nil
		}
		select {
		case addr := <-back:
			return addr, nil
		case <-ctx.Done():
			return "", ctx.Err()
		}
	})})
	s := client.NewStores(client.StoresConfig{Clients: []*client.Client{c}, Backoff: time.Millisecond, HedgeAfter: -1})
	if failed, err := l.read(t, s, ""); err != nil || failed != 0 {
		t.Errorf("%d chunks failed, error %v", failed, err)
	}
	if st := s.Stats(); st.Requests != 2 || st.Stores[0].Failed != 1 {
		t.Errorf("counters %+v, want two requests, one of them broken", st)
	}
}

func TestTheBytesOfTheBucketAreCounted(t *testing.T) {
	l := newFaultLab(t)
	srv := httptest.NewServer(l.honest)
	defer srv.Close()
	c := connect(t, client.Config{URL: srv.URL})
	s := client.NewStores(client.StoresConfig{Clients: []*client.Client{c}})
	if failed, err := l.read(t, s, ""); err != nil || failed != 0 {
		t.Fatalf("%d chunks failed, error %v", failed, err)
	}
	want := uint64(0)
	for _, p := range l.chunks {
		want += uint64(len(frameOf(p).Stored)) // each is alone in its pack
	}
	if got := s.Stats().BucketBytes; got != want {
		t.Errorf("the server read %d bytes, want %d", got, want)
	}
	if _, err := c.Get(t.Context(), chunk.Sum(nil), nil); !errors.Is(err, store.ErrNotFound) {
		t.Error(err)
	}
	if got := c.Stats().BucketBytes; got != want {
		t.Errorf("a missing chunk cost %d bytes of the bucket", got-want)
	}
}
