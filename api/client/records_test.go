package client_test

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/store"
	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/storetest"
)

// recordNode is a server whose batches are sent as records of packs.
type recordNode struct {
	world  *apitest.World
	client *client.Client

	mu      sync.Mutex // guards answers
	answers []string   // Content-Types of batches
	// spoil, when not nil, changes the body of an answer in version 2.
	spoil func([]byte) []byte
	// deaf has the node see no Accept, as a node does that knows of one version.
	deaf bool
}

func newRecordNode(t testing.TB) *recordNode {
	t.Helper()
	n := &recordNode{world: apitest.New(t)}
	h := api.NewHandler(api.Config{Chunks: n.world.InFiles(t, buckettest.Files{Bucket: n.world.Bucket}), Bucket: n.world.Bucket})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if n.deaf {
			r.Header.Del("Accept")
		}
		rec := httptest.NewRecorder()
		h.ServeHTTP(rec, r)
		kind := rec.Header().Get("Content-Type")
		n.mu.Lock()
		n.answers = append(n.answers, kind)
		n.mu.Unlock()
		body := rec.Body.Bytes()
		if kind == api.TypeFrames2 && n.spoil != nil {
			body = n.spoil(body)
		}
		w.Header().Set("Content-Type", kind)
		if l := rec.Header().Get("Content-Length"); l != "" {
			w.Header().Set("Content-Length", l)
		}
		w.WriteHeader(rec.Code)
		w.Write(body)
	}))
	t.Cleanup(srv.Close)
	n.client = connect(t, client.Config{URL: srv.URL, Backoff: time.Millisecond})
	return n
}

// said returns the versions of the answers so far, and forgets them.
func (n *recordNode) said() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	var out []string
	for _, kind := range n.answers {
		out = append(out, strings.TrimPrefix(kind, "application/vnd.quarry.chunks."))
	}
	n.answers = nil
	return strings.Join(out, " ")
}

func TestClientOfAStoreInFilesIsAStore(t *testing.T) {
	for name, deaf := range map[string]bool{"records": false, "an old server": true} {
		t.Run(name, func(t *testing.T) {
			storetest.Run(t, func(t *testing.T) storetest.Harness {
				n := newRecordNode(t)
				n.deaf = deaf
				return storetest.Harness{
					Getter: n.client, BatchGetter: n.client,
					Plant:  func(t *testing.T, p []byte) { n.world.PutChunk(t, p) },
					Damage: func(t *testing.T, d chunk.Digest) { n.world.Damage(t, d) },
				}
			})
		})
	}
}

// six are different chunks.
func six() (ps [][]byte) {
	for i := range 6 {
		ps = append(ps, storetest.Content(uint64(i), 100+i))
	}
	return ps
}

// read reads chunks and returns the error of each that has one.
func read(t *testing.T, g store.BatchGetter, ds []chunk.Digest) (map[chunk.Digest]error, error) {
	t.Helper()
	failed, answered := map[chunk.Digest]error{}, map[chunk.Digest]int{}
	err := g.GetBatch(t.Context(), ds, func(d chunk.Digest, p []byte, err error) error {
		answered[d]++
		if err != nil {
			failed[d] = err
		} else if chunk.Sum(p) != d {
			t.Errorf("WRONG BYTES of %s", d)
		}
		return nil
	})
	for _, d := range ds {
		if answered[d] != 1 && err == nil {
			t.Errorf("chunk %s was answered %d times", d, answered[d])
		}
	}
	return failed, err
}

// Of what is sent as records a node reads nothing. It learns of its damage all the same,
// because whoever finds it asks again; and whoever asks it for a part of what lies around
// the damage gets that.
func TestDamageInARecordIsFoundByItsNode(t *testing.T) {
	n := newRecordNode(t)
	ds := n.world.PutChunks(t, six()...)
	if failed, err := read(t, n.client, ds); err != nil || len(failed) > 0 || n.said() != "v2" {
		t.Fatalf("errors %v, %v", failed, err)
	}
	n.world.Damage(t, ds[2])
	failed, err := read(t, n.client, ds)
	if err != nil || len(failed) != 1 || !errors.As(failed[ds[2]], new(*store.CorruptError)) {
		t.Errorf("got errors %v, %v, want that of the damaged chunk", failed, err)
	}
	if got := n.said(); got != "v2 v1" {
		t.Errorf("answers were in %s, want one more in version 1", got)
	}
	if c := n.world.Catalog.Condemned(); len(c) != 1 || c[0].Digest != ds[2] {
		t.Errorf("condemned: %v, want the damaged chunk", c)
	}
	n.world.PutChunk(t, six()[2]) // as the next push does
	if failed, err := read(t, n.client, ds); err != nil || len(failed) > 0 {
		t.Errorf("after the repair: errors %v, %v", failed, err)
	}
}

// The same beside another store, which has the chunk: the first one is asked again all
// the same, before the other.
func TestDamageInARecordIsFoundWhereAnotherStoreHasTheChunk(t *testing.T) {
	bad, good := newRecordNode(t), newRecordNode(t)
	ds := bad.world.PutChunks(t, six()...)
	good.world.PutChunks(t, six()...)
	bad.world.Damage(t, ds[2])
	s := client.NewStores(client.StoresConfig{Clients: []*client.Client{bad.client, good.client}, Backoff: time.Millisecond, HedgeAfter: -1})
	if failed, err := read(t, s, ds); err != nil || len(failed) > 0 {
		t.Errorf("errors %v, %v", failed, err)
	}
	if c := bad.world.Catalog.Condemned(); len(c) != 1 {
		t.Errorf("condemned: %v, want the damaged chunk", c)
	}
	if st := s.Stats().Stores[0]; st.Corrupt != 1 {
		t.Errorf("%d corrupt chunks counted of the first store, want 1", st.Corrupt)
	}
}

// A damaged record header hides every record behind it. Their chunks are good.
func TestADamagedRecordHeaderCostsNothing(t *testing.T) {
	n := newRecordNode(t)
	ds := n.world.PutChunks(t, six()...)
	n.world.DamageHeader(t, ds[2])
	if failed, err := read(t, n.client, ds); err != nil || len(failed) > 0 {
		t.Errorf("errors %v, %v", failed, err)
	}
	if got := n.said(); got != "v2 v1" {
		t.Errorf("answers were in %s", got)
	}
	if c := n.world.Catalog.Condemned(); len(c) > 0 {
		t.Errorf("condemned: %v", c)
	}
}

// Whatever byte of an answer in version 2 is wrong, and wherever it breaks off, the
// chunks are right in the end.
func TestNoSpoiledAnswerOfRecordsCostsAChunk(t *testing.T) {
	n := newRecordNode(t)
	ds := n.world.PutChunks(t, six()[:3]...)
	ds = append(ds, chunk.Sum([]byte("missing")))
	var whole []byte
	n.spoil = func(b []byte) []byte { whole = slices.Clone(b); return b }
	check := func(what string, off int) {
		t.Helper()
		failed, err := read(t, client.NewStores(client.StoresConfig{Clients: []*client.Client{n.client}, Backoff: time.Microsecond, HedgeAfter: -1}), ds)
		if err != nil || len(failed) != 1 || !errors.Is(failed[ds[3]], store.ErrNotFound) {
			t.Errorf("%s at %d: errors %v, %v", what, off, failed, err)
		}
	}
	check("nothing", 0)
	if n.said() != "v2" {
		t.Fatal("the answer was not in version 2")
	}
	for off := range whole {
		n.spoil = func(b []byte) []byte { b = slices.Clone(b); b[off] ^= 1; return b }
		check("a flipped bit", off)
	}
	for off := 0; off < len(whole); off += 7 {
		n.spoil = func(b []byte) []byte { return b[:off] } // shorter than its Content-Length
		check("a cut", off)
	}
	n.said()
	n.spoil = func(b []byte) []byte { return b[:100] }
	check("a cut", 100)
	if got := n.said(); got != "v2 v1" {
		t.Errorf("after an answer that broke off: answers in %s, want version 1 next", got)
	}
}

// A server that sends what was not asked for has not answered.
func TestAnAnswerInAVersionThatWasNotAskedForIsRefused(t *testing.T) {
	p := six()[0]
	d := chunk.Sum(nil)
	var accepted []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		accepted = append(accepted, r.Header.Get("Accept"))
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", api.TypeFrames2)
		var b bytes.Buffer
		fw := api.NewFrameWriter2(&b)
		f := frameOf(p)
		f.Digest = chunk.Sum(nil) // that is to say: other bytes than the digest's
		if fw.Write(f) != nil || fw.Close() != nil {
			t.Error("a buffer takes all")
		}
		w.Write(b.Bytes())
	}))
	t.Cleanup(srv.Close)
	c := connect(t, client.Config{URL: srv.URL, Attempts: 2, Backoff: time.Millisecond})
	if _, err := c.Get(t.Context(), d, nil); err == nil || !strings.Contains(err.Error(), "Content-Type") {
		t.Errorf("got error %v", err)
	}
	if len(accepted) != 4 || accepted[1] != api.TypeFrames {
		t.Errorf("asked for %q", accepted)
	}
}
