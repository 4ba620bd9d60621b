package s3_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/s3"
	"quarry/store/bucket/s3/s3test"
	"quarry/store/catalog"
	"quarry/store/chunk"
)

// rig is a bucket with a proxy before its server, and one without.
type rig struct {
	proxy  *s3test.Proxy
	direct *s3.Bucket
	faulty *s3.Bucket // through the proxy
	// hasty is faulty with a moment for each request, for those that are never
	// answered. That others may need longer, and are made again, is no failure.
	hasty *s3.Bucket
	name  string
}

const moment = 300 * time.Millisecond

func newRig(t *testing.T) *rig {
	t.Helper()
	server := s3test.New(t)
	r := &rig{proxy: s3test.NewProxy(t, server.URL), name: server.Bucket(t)}
	r.direct = open(t, server.URL, r.name, "")
	through := func(timeout time.Duration) *s3.Bucket {
		b, err := s3.Open(t.Context(), s3.Config{
			Location: s3.Location{Bucket: r.name, Endpoint: r.proxy.URL},
			PartSize: 5 << 20, Backoff: time.Millisecond, AttemptTimeout: timeout, Slowest: 5 << 20,
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { b.Close() })
		return b
	}
	r.faulty, r.hasty = through(10*time.Minute), through(moment)
	return r
}

// client returns who meets the fault.
func (r *rig) client(f s3test.Fault) *s3.Bucket {
	if f == s3test.Stall || f == s3test.StallBody {
		return r.hasty
	}
	return r.faulty
}

var large = bytes.Repeat([]byte("0123456789abcdef"), 11<<16) // 11 MiB, three parts

// Every fault, twice, at every kind of request: all calls succeed and all bytes
// are right.
func TestFaultsThatPass(t *testing.T) {
	r := newRig(t)
	buckettest.Put(t, r.direct, "there/a", []byte("some bytes"))
	buckettest.Put(t, r.direct, "there/b", nil)
	for _, op := range s3test.Ops {
		for _, fault := range s3test.Transient {
			if (fault == s3test.Truncate || fault == s3test.StallBody) && op != "GetObject" && op != "ListObjects" {
				continue // their answers have no body that is used
			}
			t.Run(op+" "+string(fault), func(t *testing.T) { r.passes(t, op, fault) })
		}
	}
}

func (r *rig) passes(t *testing.T, op string, fault s3test.Fault) {
	r.proxy.Rule(s3test.First(2, op, fault))
	defer r.proxy.Rule(nil)
	client := r.client(fault)
	switch op {
	case "PutObject":
		buckettest.Put(t, client, "put/small", []byte("small"))
	case "CreateUpload", "UploadPart", "CompleteUpload":
		buckettest.Put(t, client, "put/large", large)
	case "DeleteObject":
		buckettest.Put(t, r.direct, "put/gone", []byte("x"))
		if err := client.Delete(t.Context(), "put/gone"); err != nil {
			t.Error(err)
		}
	case "ListObjects":
		if got := buckettest.Keys(t, client, "there/"); !slices.Equal(got, []string{"there/a", "there/b"}) {
			t.Errorf("listed %q", got)
		}
	default:
		if got := buckettest.Bytes(t, client, "there/a"); string(got) != "some bytes" {
			t.Errorf("read %q", got)
		}
	}
	if n := r.proxy.Seen(op); n < 3 && fault != s3test.ResetApplied && fault != s3test.FailApplied && fault != s3test.ErrorIn200Applied && fault != s3test.Empty {
		t.Errorf("the proxy saw %d requests: the fault was not met", n)
	}
	r.proxy.Rule(nil)
	for key, want := range map[string][]byte{"put/small": []byte("small"), "put/large": large} {
		if _, err := r.direct.Stat(t.Context(), key); !errors.Is(err, bucket.ErrNotFound) {
			if got := buckettest.Bytes(t, r.direct, key); !bytes.Equal(got, want) {
				t.Errorf("%s: wrong bytes are stored", key)
			}
		}
		if err := r.direct.Delete(t.Context(), key); err != nil {
			t.Error(err)
		}
	}
	if _, err := r.direct.Stat(t.Context(), "put/gone"); !errors.Is(err, bucket.ErrNotFound) {
		t.Errorf("a deleted object: %v", err)
	}
}

// Every fault without end: no call says that it succeeded, none says that an
// object is missing or short, or an entry taken, and none tells a secret.
func TestFaultsThatStay(t *testing.T) {
	r := newRig(t)
	buckettest.Put(t, r.direct, "there/a", []byte("some bytes"))
	if err := r.direct.Append(t.Context(), 1, []byte("entry")); err != nil {
		t.Fatal(err)
	}
	calls := map[string]func(*s3.Bucket) error{
		"PutObject":  func(b *s3.Bucket) error { return b.Put(t.Context(), "new", bytes.NewReader([]byte("x")), 1) },
		"GetObject":  func(b *s3.Bucket) error { return b.ReadAt(t.Context(), "there/a", make([]byte, 10), 0) },
		"HeadObject": func(b *s3.Bucket) error { _, err := b.Stat(t.Context(), "there/a"); return err },
		"ListObjects": func(b *s3.Bucket) (err error) {
			for _, err = range b.List(t.Context(), "there/") {
			}
			return err
		},
		"UploadPart": func(b *s3.Bucket) error { return b.Put(t.Context(), "new", bytes.NewReader(large), int64(len(large))) },
	}
	for op, call := range calls {
		for _, fault := range s3test.Transient {
			if op == "PutObject" && fault == s3test.Empty || op == "HeadObject" && (fault == s3test.Truncate || fault == s3test.StallBody) ||
				op != "GetObject" && op != "ListObjects" && (fault == s3test.Truncate || fault == s3test.StallBody) ||
				op == "PutObject" && fault == s3test.ErrorIn200Applied {
				continue // it is stored, and confirmed
			}
			t.Run(op+" "+string(fault), func(t *testing.T) {
				r.proxy.Rule(s3test.Always(op, fault))
				defer r.proxy.Rule(nil)
				err := call(r.client(fault))
				if err == nil || bucket.IsDamage(err) || errors.Is(err, bucket.ErrTaken) || strings.Contains(err.Error(), s3test.Secret) {
					t.Errorf("got error %v, want one of the server", err)
				}
				if op == "UploadPart" && r.proxy.Seen("AbortUpload") == 0 {
					t.Error("the upload was not aborted")
				}
				if err := r.direct.Delete(t.Context(), "new"); err != nil {
					t.Error(err)
				}
			})
		}
	}
	r.proxy.Rule(s3test.Always("GetObject", s3test.Truncate))
	for _, err := range r.faulty.Read(t.Context(), 1) {
		if err == nil || bucket.IsDamage(err) {
			t.Errorf("a journal entry cut off: got error %v", err)
		}
	}
}

// A server that shows an object only some time after it has said it is stored.
func TestAnObjectThatAppearsLate(t *testing.T) {
	r := newRig(t)
	for _, put := range [][]byte{[]byte("small"), large} {
		r.proxy.Rule(s3test.First(3, "HeadObject", s3test.NotFound))
		buckettest.Put(t, r.faulty, "late", put)
		if n := r.proxy.Seen("HeadObject"); n != 4 {
			t.Errorf("asked %d times whether it is stored, want 4", n)
		}
		if got := buckettest.Bytes(t, r.direct, "late"); !bytes.Equal(got, put) {
			t.Error("wrong bytes")
		}
	}
	r.proxy.Rule(s3test.Always("HeadObject", s3test.NotFound))
	if err := r.faulty.Put(t.Context(), "never", bytes.NewReader([]byte("x")), 1); err == nil || bucket.IsDamage(err) {
		t.Errorf("an object that never appears: got error %v", err)
	}
}

func TestListingsThatLie(t *testing.T) {
	r := newRig(t)
	var want []string
	for i := range 5 {
		want = append(want, fmt.Sprintf("list/%d", i))
		buckettest.Put(t, r.direct, want[i], nil)
	}
	r.proxy.Rule(s3test.Always("ListObjects", s3test.OneKey))
	if got := buckettest.Keys(t, r.faulty, ""); !slices.Equal(got, want) || r.proxy.Seen("ListObjects") < 5 {
		t.Errorf("one key a page: got %q in %d pages, want %q", got, r.proxy.Seen("ListObjects"), want)
	}
	r.proxy.Rule(s3test.Always("ListObjects", s3test.RepeatPage))
	var last error
	n := 0
	for _, last = range r.faulty.List(t.Context(), "") {
		n++
	}
	if last == nil || n > 2 {
		t.Errorf("the first page again and again: got error %v after %d", last, n)
	}
	// What is in the journal is asked by name, so a listing that is old hides nothing.
	var entries []bucket.Entry
	for n := uint64(1); n <= 40; n++ {
		entries = append(entries, bucket.Entry{N: n, Data: fmt.Appendf(nil, "entry %d", n)})
		if err := r.direct.Append(t.Context(), n, entries[n-1].Data); err != nil {
			t.Fatal(err)
		}
	}
	r.proxy.Rule(s3test.Always("ListObjects", s3test.NoList))
	got := buckettest.Entries(t, r.faulty, 1)
	if len(got) != len(entries) {
		t.Fatalf("got %d entries, want %d", len(got), len(entries))
	}
	for i, e := range got {
		if e.N != entries[i].N || !bytes.Equal(e.Data, entries[i].Data) {
			t.Errorf("entry %d is %d %q", i+1, e.N, e.Data)
		}
	}
}

func TestAServerThatIgnoresConditionsIsRefused(t *testing.T) {
	r := newRig(t)
	if err := r.faulty.Probe(t.Context()); err != nil {
		t.Errorf("a good server: %v", err)
	}
	r.proxy.Rule(s3test.Always("PutObject", s3test.Unconditional))
	if err := r.faulty.Probe(t.Context()); !errors.Is(err, s3.ErrUnconditional) {
		t.Errorf("got error %v, want %v", err, s3.ErrUnconditional)
	}
	alone, err := s3.Open(t.Context(), s3.Config{Location: s3.Location{Bucket: r.name, Endpoint: r.proxy.URL}, UnsafeSingleWriter: true})
	if err != nil {
		t.Fatal(err)
	}
	defer alone.Close()
	if err := alone.Probe(t.Context()); err != nil {
		t.Errorf("the only writer: %v", err)
	}
	if err := alone.Append(t.Context(), 1, []byte("x")); err != nil {
		t.Error(err)
	}
	if err := alone.Append(t.Context(), 1, []byte("y")); !errors.Is(err, bucket.ErrTaken) {
		t.Errorf("the only writer, again: got error %v, want %v", err, bucket.ErrTaken)
	}
	r.proxy.Rule(nil)
	if keys := buckettest.Keys(t, r.direct, ""); len(keys) != 0 {
		t.Errorf("the probes left %q", keys)
	}
}

// An append that fails may have been applied; the catalog finds out. Whatever it
// acknowledged is there for the next one, and it is never fenced by itself.
func TestNoNameThatWasAcknowledgedIsLost(t *testing.T) {
	r := newRig(t)
	const seed = 42
	rnd := rand.New(rand.NewPCG(seed, 0))
	var mu sync.Mutex
	faults := []s3test.Fault{s3test.SlowDown, s3test.Reset, s3test.ResetApplied, s3test.FailApplied, s3test.ErrorIn200, s3test.ErrorIn200Applied, s3test.Truncate, s3test.Empty}
	c, err := catalog.Open(t.Context(), catalog.Config{Journal: r.faulty})
	if err != nil {
		t.Fatal(err)
	}
	r.proxy.Rule(func(*http.Request) s3test.Fault {
		mu.Lock()
		defer mu.Unlock()
		if rnd.IntN(3) > 0 {
			return s3test.None
		}
		return faults[rnd.IntN(len(faults))]
	})
	var added []chunk.Digest
	for i := range 60 {
		id := chunk.Sum(fmt.Appendf(nil, "pack %d", i))
		switch err := c.AddPack(t.Context(), id, 1); {
		case err == nil:
			added = append(added, id)
		case errors.Is(err, catalog.ErrFenced):
			t.Fatalf("seed %d: fenced by itself: %v", seed, err)
		}
	}
	r.proxy.Rule(nil)
	again, err := catalog.Open(t.Context(), catalog.Config{Journal: r.direct})
	if err != nil {
		t.Fatal(err)
	}
	there := map[chunk.Digest]bool{}
	for _, p := range again.Packs() {
		there[p.ID] = true
	}
	for _, id := range added {
		if !there[id] {
			t.Errorf("seed %d: pack %s was acknowledged and is lost", seed, id)
		}
	}
	if len(added) < 50 {
		t.Errorf("seed %d: %d of 60 were added: too few to show anything", seed, len(added))
	}
}

// A read that hangs is answered by a second request, long before it times out.
func TestASlowReadHasASecondRequest(t *testing.T) {
	r := newRig(t)
	buckettest.Put(t, r.direct, "a", []byte("some bytes"))
	for _, fault := range []s3test.Fault{s3test.Stall, s3test.StallBody} {
		r.proxy.Rule(s3test.First(1, "GetObject", fault))
		before := value(t, r.faulty, "quarry_s3_hedges_total")
		got := make([]byte, 10)
		if err := r.faulty.ReadAt(t.Context(), "a", got, 0); err != nil || string(got) != "some bytes" {
			t.Errorf("%s: got %q, %v", fault, got, err)
		}
		if n := value(t, r.faulty, "quarry_s3_hedges_total") - before; n != 1 {
			t.Errorf("%s: %v second requests, want 1", fault, n)
		}
	}
}

// A server that gives no answer, or refuses, says nothing of the object.
func TestAnAwayBucketSaysNothingOfItsObjects(t *testing.T) {
	r := newRig(t)
	buckettest.Put(t, r.direct, "a", []byte("some bytes"))
	refuse := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		if q.URL.Query().Has("list-type") || q.Method == http.MethodHead && strings.Count(q.URL.Path, "/") < 2 {
			return // so that it can be opened
		}
		w.WriteHeader(http.StatusForbidden)
	}))
	t.Cleanup(refuse.Close)
	refused := open(t, refuse.URL, "some", "")
	r.proxy.Rule(func(*http.Request) s3test.Fault { return s3test.SlowDown })
	for name, b := range map[string]*s3.Bucket{"no answer": r.faulty, "refused": refused} {
		_, stat := b.Stat(t.Context(), "a")
		for what, err := range map[string]error{"ReadAt": b.ReadAt(t.Context(), "a", make([]byte, 4), 0), "Stat": stat, "Append": b.Append(t.Context(), 1, []byte("x"))} {
			if !errors.Is(err, bucket.ErrUnavailable) || bucket.IsDamage(err) {
				t.Errorf("%s, %s: got error %v, want %v alone", what, name, err, bucket.ErrUnavailable)
			}
		}
	}
}
