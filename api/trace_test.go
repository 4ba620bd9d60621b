package api_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"iter"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/rafs"
	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/trace"
)

// tracing is a server whose clock stands still unless it is moved.
type tracing struct {
	*apitest.World
	srv *httptest.Server
	now atomic.Int64 // Unix nanoseconds
}

func newTracing(t *testing.T, change func(*api.Config)) *tracing {
	t.Helper()
	w := &tracing{World: apitest.New(t)}
	w.now.Store(1e18)
	w.restart(t, change)
	return w
}

func (w *tracing) restart(t *testing.T, change func(*api.Config)) {
	w.srv, _ = w.Serve(t, func(c *api.Config) {
		c.Now = func() time.Time { return time.Unix(0, w.now.Load()) }
		if change != nil {
			change(c)
		}
	})
}

func (w *tracing) wait(d time.Duration) { w.now.Add(int64(d)) }

// send sends a record for an image id.
func (w *tracing) send(t *testing.T, id chunk.Digest, record []byte) answer {
	t.Helper()
	return ask(t, "POST", w.srv.URL+"/v1/images/"+id.Hex()+"/trace", string(record), "Content-Type", api.TypeTrace)
}

// ran sends the record of a run of img, one moment after the last.
func (w *tracing) ran(t *testing.T, img *apitest.Image, numbers ...uint32) {
	t.Helper()
	w.wait(time.Millisecond)
	if a := w.send(t, w.ID(t, img), w.Record(t, img, numbers...)); a.StatusCode != 204 {
		t.Fatalf("status %d, body %s", a.StatusCode, a.body)
	}
}

// hints is what a start says beyond the image.
type hints struct {
	list   []uint32
	coming int
	chunks []uint32 // in the order in which they came, each verified
}

// start asks for an image with its hints.
func (w *tracing) start(t *testing.T, img *apitest.Image, query string) hints {
	t.Helper()
	a := ask(t, "GET", w.srv.URL+"/v1/start/"+img.Ref.String()+query, "", "Accept", api.TypeStart2+", "+api.TypeStart)
	if a.StatusCode != 200 || a.Header.Get("Content-Type") != api.TypeStart2 {
		t.Fatalf("status %d, headers %v, body %q", a.StatusCode, a.Header, a.body)
	}
	r := bytes.NewReader(a.body)
	sr := api.NewStartReader(r)
	parts := 4
	if strings.Contains(query, "have=") {
		parts = 2
	}
	for range parts {
		if _, err := sr.Next(); err != nil {
			t.Fatal(err)
		}
		if _, err := sr.Bytes(); err != nil {
			t.Fatal(err)
		}
	}
	h, err := readHints(r, img)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func readHints(r io.Reader, img *apitest.Image) (h hints, err error) {
	tr := trace.NewReader(r)
	if h.list, h.coming, err = tr.List(); err != nil {
		return h, err
	}
	for {
		c, err := tr.Next()
		if err == io.EOF {
			return h, nil
		}
		if err != nil {
			return h, err
		}
		p, err := c.Plain(nil)
		if err != nil || chunk.Sum(p) != img.Blob.Chunks[c.Number].Digest {
			return h, fmt.Errorf("chunk %d is not what the bootstrap says: %w", c.Number, err)
		}
		h.chunks = append(h.chunks, c.Number)
	}
}

func (h hints) sortedChunks() []uint32 { return slices.Sorted(slices.Values(h.chunks)) }

func TestAStartHasTheListThatRunsAgreeOnWithItsChunks(t *testing.T) {
	w := newTracing(t, nil)
	img := w.Publish(t, "team/a:1", 40, 1)
	if h := w.start(t, img, ""); h.list != nil {
		t.Errorf("before a run: %+v", h)
	}
	w.ran(t, img, 7, 3, 5, 30)
	if h := w.start(t, img, ""); h.list != nil {
		t.Errorf("after one run: %+v", h)
	}
	w.ran(t, img, 7, 3, 5, 31)
	for range 2 {
		h := w.start(t, img, "")
		if !slices.Equal(h.list, []uint32{7, 3, 5}) || h.coming != 3 || !slices.Equal(h.sortedChunks(), []uint32{3, 5, 7}) {
			t.Errorf("after two runs: %+v", h)
		}
		w.restart(t, nil) // the records are in the bucket
	}
	w.ran(t, img, 30, 7)
	if h := w.start(t, img, ""); !slices.Equal(h.list, []uint32{7, 3, 30, 5}) {
		t.Errorf("after three runs: %+v", h)
	}
	if h := w.start(t, img, "?have="+w.ID(t, img).Hex()); len(h.list) != 4 || h.coming+len(h.chunks) != 0 {
		t.Errorf("an image that the client has: %+v, want the list alone", h)
	}
}

// The store reads neighbours at once, in the order of their places; the sandbox waits
// for the first of the list.
func TestTheFirstChunksOfAListComeFirst(t *testing.T) {
	w := newTracing(t, nil)
	img := w.Publish(t, "team/a:1", 60, 1)
	var list []uint32
	for n := uint32(40); n > 0; n-- {
		list = append(list, n)
	}
	w.ran(t, img, list...)
	w.ran(t, img, list...)
	h := w.start(t, img, "")
	if len(h.chunks) != len(list) || !slices.Equal(slices.Sorted(slices.Values(h.chunks[:8])), []uint32{33, 34, 35, 36, 37, 38, 39, 40}) {
		t.Errorf("the chunks came as %v", h.chunks)
	}
}

func TestOneStartOfEightIsToBeRecordedOnceThereIsAList(t *testing.T) {
	w := newTracing(t, nil)
	img, other := w.Publish(t, "team/a:1", 40, 1), w.Publish(t, "team/b:1", 40, 2)
	enoughOf := func(img *apitest.Image, query, accept string) bool {
		a := ask(t, "GET", w.srv.URL+"/v1/start/"+img.Ref.String()+query, "", "Accept", accept)
		switch got := a.Header.Get(api.HeaderTrace); {
		case a.StatusCode != 200, got != "" && got != api.TraceEnough:
			t.Fatalf("status %d, %s %q", a.StatusCode, api.HeaderTrace, got)
		default:
			return got != ""
		}
		return false
	}
	enough := func(query, accept string) bool { return enoughOf(img, query, accept) }
	if enoughOf(other, "", api.TypeStart2) {
		t.Error("told enough of an image when no image has a list")
	}
	for runs := range 2 {
		if enough("", api.TypeStart2) {
			t.Errorf("after %d runs there is enough", runs)
		}
		w.ran(t, img, 7, 3)
	}
	// Those that record nothing do not count.
	if enough("", api.TypeStart) {
		t.Error("told who gets no list")
	}
	have := "?have=" + w.ID(t, img).Hex() // who has the image may have its chunks on a disk
	for i := 1; i <= 32; i++ {
		if got, want := enough([]string{"", have}[i%2], api.TypeStart2), i%8 != 0; got != want {
			t.Errorf("start %d: enough %t, want %t", i, got, want)
		}
	}
	// The list of the first image may help the other, which is recorded by turns.
	for i := 1; i <= 6; i++ {
		if got, want := enoughOf(other, "", api.TypeStart2), i%2 != 0; got != want {
			t.Errorf("start %d of an image without a list: enough %t, want %t", i, got, want)
		}
	}
}

func TestAChunkThatCannotBeReadIsLeftOut(t *testing.T) {
	w := newTracing(t, nil)
	img := w.Publish(t, "team/a:1", 40, 1)
	w.ran(t, img, 1, 2, 3)
	w.ran(t, img, 1, 2, 3)
	w.Damage(t, img.Blob.Chunks[2].Digest)
	if h := w.start(t, img, ""); h.coming != 3 || !slices.Equal(h.sortedChunks(), []uint32{1, 3}) {
		t.Errorf("got %+v, want the list of three with two chunks", h)
	}
}

func TestTracesOfNoRunAreRefused(t *testing.T) {
	w := newTracing(t, nil)
	img, other := w.Publish(t, "team/a:1", 40, 1), w.Publish(t, "team/b:1", 40, 1)
	id, good := w.ID(t, img), w.Record(t, img, 1, 2)
	count := uint32(len(img.Blob.Chunks))
	twice := bytes.Clone(good)
	copy(twice[len(twice)-4:], twice[len(twice)-8:])
	all := make([]uint32, count)
	for i := range all {
		all[i] = uint32(i)
	}
	gone := chunk.Sum([]byte("gone"))
	encode := func(r trace.Record) []byte {
		b, err := r.Encode()
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	for name, c := range map[string]struct {
		id     chunk.Digest
		record []byte
		status int
		code   string
	}{
		"a number beyond the table": {id, w.Record(t, img, 1, count), 400, "bad_trace"},
		"a huge number":             {id, w.Record(t, img, 1<<32-1), 400, "bad_trace"},
		"a number twice":            {id, twice, 400, "bad_trace"},
		"nothing":                   {id, nil, 400, "bad_trace"},
		"junk":                      {id, []byte("{}"), 400, "bad_trace"},
		"too long":                  {id, bytes.Repeat([]byte("x"), trace.MaxRecord+1), 413, "too_large"},
		"another image's record":    {id, w.Record(t, other, 1, 2), 400, "bad_trace"},
		"an image that is not here": {gone, encode(trace.Record{Image: gone, Source: img.Source, Platform: img.Platform, Numbers: []uint32{1}}), 404, "image_unknown"},
		"an unknown source":         {id, encode(trace.Record{Image: id, Source: gone, Platform: img.Platform, Numbers: []uint32{1}}), 404, "image_unknown"},
	} {
		if e := wantError(t, w.send(t, c.id, c.record), c.status, c.code); e.Blame != api.BlameUser {
			t.Errorf("%s: %+v", name, e)
		}
	}
	wantError(t, ask(t, "POST", w.srv.URL+"/v1/images/"+id.Hex()+"/trace", string(good), "Content-Type", api.TypeJSON), 400, "bad_request")
	if keys := buckettest.Keys(t, w.Bucket, trace.Prefix); len(keys) > 0 {
		t.Errorf("kept %v", keys)
	}
	w.ran(t, img, all[:count]...)
}

func TestRecordsAreBoundedByImageAndRate(t *testing.T) {
	w := newTracing(t, nil)
	img := w.Publish(t, "team/a:1", 40, 1)
	w.ran(t, img, 1, 9)
	for range 2 * trace.MaxRuns {
		w.ran(t, img, 1, 2)
	}
	if keys := buckettest.Keys(t, w.Bucket, trace.Prefix); len(keys) != trace.MaxRuns {
		t.Errorf("%d records are kept, want %d", len(keys), trace.MaxRuns)
	}
	first := buckettest.Keys(t, w.Bucket, trace.Prefix)[0]
	w.wait(time.Minute)
	w.ran(t, img, 1, 3)
	keys := buckettest.Keys(t, w.Bucket, trace.Prefix)
	if len(keys) != trace.MaxRuns || slices.Contains(keys, first) {
		t.Errorf("a minute later: %d records, the oldest among them: %t", len(keys), slices.Contains(keys, first))
	}
	record := w.Record(t, img, 1)
	busy := 0
	for range 200 {
		if a := w.send(t, w.ID(t, img), record); a.StatusCode == 503 {
			wantError(t, a, 503, "busy")
			busy++
		}
	}
	if busy < 100 {
		t.Errorf("%d of 200 records in one moment were refused", busy)
	}
	w.wait(time.Second)
	w.ran(t, img, 1)
}

func TestAFailureBetweenPutAndDeleteHeals(t *testing.T) {
	faulty := &buckettest.Faulty{}
	w := newTracing(t, nil)
	faulty.Bucket = w.Bucket
	w.restart(t, func(c *api.Config) { c.Bucket = faulty })
	img := w.Publish(t, "team/a:1", 40, 1)
	for range trace.MaxRuns {
		w.ran(t, img, 1, 2)
	}
	w.wait(time.Minute)
	faulty.Before = buckettest.FailAll("Delete")
	if a := w.send(t, w.ID(t, img), w.Record(t, img, 3, 4)); a.StatusCode != 500 {
		t.Errorf("status %d", a.StatusCode)
	}
	faulty.Before = nil
	if keys := buckettest.Keys(t, w.Bucket, trace.Prefix); len(keys) != trace.MaxRuns+1 {
		t.Fatalf("%d records, want one too many", len(keys))
	}
	w.restart(t, nil)
	if h := w.start(t, img, ""); !slices.Equal(h.list, []uint32{1, 2}) {
		t.Errorf("got %+v", h)
	}
	w.wait(time.Minute)
	w.ran(t, img, 3, 4)
	if keys := buckettest.Keys(t, w.Bucket, trace.Prefix); len(keys) != trace.MaxRuns {
		t.Errorf("%d records after the next one", len(keys))
	}
}

func TestJunkAmongTheRecordsIsLeftOut(t *testing.T) {
	w := newTracing(t, nil)
	img := w.Publish(t, "team/a:1", 40, 1)
	for range 3 {
		w.ran(t, img, 1, 2)
	}
	keys := buckettest.Keys(t, w.Bucket, trace.Prefix)
	buckettest.Put(t, w.Bucket, keys[0], []byte("junk"))
	buckettest.Put(t, w.Bucket, trace.Prefix+"junk", nil)
	w.restart(t, nil)
	if h := w.start(t, img, ""); !slices.Equal(h.list, []uint32{1, 2}) {
		t.Errorf("got %+v", h)
	}
}

// numbersOf returns the chunks of the first n files of an image.
func numbersOf(t *testing.T, img *apitest.Image, n int) (numbers []uint32) {
	t.Helper()
	im, err := rafs.Decode(img.Bootstrap)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range im.Tree.Root.Entries[:n] {
		for _, d := range e.Inode.Chunks {
			numbers = append(numbers, uint32(slices.IndexFunc(im.Blob.Chunks, func(c rafs.Chunk) bool { return c.Digest == d })))
		}
	}
	return numbers
}

func TestAnImageThatNeverRanGetsASiblingsList(t *testing.T) {
	w := newTracing(t, nil)
	ran := w.Publish(t, "team/a:1", 40, 1)
	touched := numbersOf(t, ran, 5)
	w.ran(t, ran, touched...)
	w.ran(t, ran, touched...)
	same := w.Publish(t, "other/repo:1", 40, 1)
	h := w.start(t, same, "")
	if !slices.Equal(h.list, touched) || len(h.chunks) != len(touched) {
		t.Errorf("equal content: got %+v, want %v", h, touched)
	}
	// Files of other content at the same paths.
	likely := w.Publish(t, "team/b:1", 40, 2)
	if h := w.start(t, likely, ""); len(h.list) < len(touched)/2 || len(h.chunks) != len(h.list) {
		t.Errorf("equal paths: got %+v", h)
	}
	// Two files of 40 are there: too little of the list.
	far := w.Publish(t, "far/c:1", 2, 3)
	if h := w.start(t, far, ""); h.list != nil {
		t.Errorf("another image: got %+v", h)
	}
	if h := w.start(t, same, "?have="+w.ID(t, same).Hex()); !slices.Equal(h.list, touched) || h.coming != 0 {
		t.Errorf("equal content that is there: got %+v", h)
	}
	// Of two that fit alike, the one of the same repository is taken.
	near := w.Publish(t, "other/repo:2", 40, 1)
	want := numbersOf(t, near, 2)
	w.ran(t, near, want...)
	w.ran(t, near, want...)
	w.ran(t, ran, touched...)
	again := w.Publish(t, "other/repo:3", 40, 1)
	if h := w.start(t, again, ""); !slices.Equal(h.list, want) {
		t.Errorf("of the same repository: got %v, want %v", h.list, want)
	}
	// Its own list, once it has one.
	w.ran(t, again, 1)
	w.ran(t, again, 1)
	if h := w.start(t, again, ""); !slices.Equal(h.list, []uint32{1}) {
		t.Errorf("of its own: got %v", h.list)
	}
}

func TestNoSiblingTodayIsAskedForAgain(t *testing.T) {
	w := newTracing(t, nil)
	ran, same := w.Publish(t, "team/a:1", 40, 1), w.Publish(t, "team/a:2", 40, 1)
	if h := w.start(t, same, ""); h.list != nil {
		t.Fatalf("before a run: got %v", h.list)
	}
	w.ran(t, ran, 4)
	w.ran(t, ran, 4)
	w.wait(10 * time.Second)
	if h := w.start(t, same, ""); !slices.Equal(h.list, []uint32{4}) {
		t.Errorf("got %v", h.list)
	}
}

// slowTraces holds listings of records until it is let go.
type slowTraces struct {
	bucket.Bucket
	asked, let chan struct{}
}

func (b *slowTraces) List(ctx context.Context, prefix string) iter.Seq2[bucket.Object, error] {
	if prefix == trace.Prefix {
		close(b.asked)
		<-b.let
	}
	return b.Bucket.List(ctx, prefix)
}

func TestAListThatTakesTimeHoldsUpNoImage(t *testing.T) {
	w := newTracing(t, nil)
	img := w.Publish(t, "team/a:1", 40, 1)
	w.ran(t, img, 1, 2)
	w.ran(t, img, 1, 2)
	slow := &slowTraces{Bucket: w.Bucket, asked: make(chan struct{}), let: make(chan struct{})}
	w.restart(t, func(c *api.Config) { c.Bucket = slow })
	pr, pw := io.Pipe()
	go func() { // ends with the answer
		rec := httptest.NewRequest("GET", w.srv.URL+"/v1/start/team/a:1", nil).WithContext(t.Context())
		rec.RequestURI = ""
		rec.Header.Set("Accept", api.TypeStart2)
		resp, err := w.srv.Client().Do(rec)
		if err == nil {
			_, err = io.Copy(pw, resp.Body)
			resp.Body.Close()
		}
		pw.CloseWithError(err)
	}()
	sr := api.NewStartReader(pr)
	for range 4 {
		if _, err := sr.Next(); err != nil {
			t.Fatal(err)
		}
		if _, err := sr.Bytes(); err != nil {
			t.Fatal(err)
		}
	}
	<-slow.asked // the image is here, and the list is being looked for
	close(slow.let)
	if h, err := readHints(pr, img); err != nil || !slices.Equal(h.list, []uint32{1, 2}) {
		t.Errorf("got %+v, %v", h, err)
	}
}
