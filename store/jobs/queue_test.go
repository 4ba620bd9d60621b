package jobs_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket"
	"quarry/store/bucket/buckettest"
	"quarry/store/bucket/mem"
	"quarry/store/jobs"
)

// errInput is an error that is final.
var errInput = errors.New("not an image")

// works is what a test's conversions do, and which there were.
type works struct {
	mu   sync.Mutex
	done []string
	do   func(ctx context.Context, r jobs.Record, progress func(jobs.Progress)) error
}

func (w *works) convert(ctx context.Context, r jobs.Record, progress func(jobs.Progress)) (jobs.Result, error) {
	w.mu.Lock()
	w.done = append(w.done, r.Names[len(r.Names)-1].String())
	w.mu.Unlock()
	if w.do != nil {
		if err := w.do(ctx, r, progress); err != nil {
			return jobs.Result{}, err
		}
	}
	return jobs.Result{Image: r.Source, Platform: "linux/amd64", Signed: true}, nil
}

func (w *works) list() []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]string(nil), w.done...)
}

func final(err error) *jobs.Reason {
	if errors.Is(err, errInput) {
		return &jobs.Reason{Message: err.Error(), Blame: jobs.BlameInput}
	}
	return nil
}

func open(t *testing.T, b bucket.Bucket, w *works, change ...func(*jobs.Config)) *jobs.Queue {
	t.Helper()
	cfg := jobs.Config{Bucket: b, Convert: w.convert, Final: final}
	for _, c := range change {
		c(&cfg)
	}
	q, err := jobs.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// serve runs the queue until the test ends, or stop is called.
func serve(t *testing.T, q *jobs.Queue) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); q.Serve(ctx) }() // ends with stop
	stop = func() { cancel(); <-ended }
	t.Cleanup(stop)
	return stop
}

func push(t testing.TB, q *jobs.Queue, image, name string) string {
	t.Helper()
	repo, tag, _ := strings.Cut(name, ":")
	st, err := q.Push(t.Context(), aSource(image), "", jobs.Name{Repo: repo, Tag: tag})
	if err != nil {
		t.Fatal(err)
	}
	return st.ID()
}

// stored reads the record of a job from the bucket.
func stored(t testing.TB, b bucket.Bucket, id string) (jobs.Record, error) {
	raw, err := bucket.ReadObject(t.Context(), b, jobs.Key(id), jobs.MaxRecord)
	if err != nil {
		return jobs.Record{}, err
	}
	return jobs.Decode(raw)
}

// await returns the job once it has ended.
func await(t testing.TB, q *jobs.Queue, id string) jobs.Status {
	t.Helper()
	w, err := q.Watch(id)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for {
		st, err := w.Next(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if !st.State.Active() {
			return st
		}
	}
}

func TestRepositoriesTakeTurns(t *testing.T) {
	w := &works{}
	q := open(t, mem.New(), w)
	for _, name := range []string{"a:1", "a:2", "a:3", "a:4", "b:1", "b:2", "c:1"} {
		push(t, q, name, name)
	}
	last := push(t, q, "a:4", "a:4")
	serve(t, q)
	await(t, q, last)
	want := []string{"a:1", "b:1", "c:1", "a:2", "b:2", "a:3", "a:4"}
	if diff := cmp.Diff(w.list(), want); diff != "" {
		t.Errorf("order: %s", diff)
	}
}

func TestPushesOfOneImageAreOneJob(t *testing.T) {
	w := &works{}
	b := &countPuts{Bucket: mem.New()}
	q := open(t, b, w)
	var g sync.WaitGroup
	for range 20 {
		g.Go(func() {
			if _, err := q.Push(t.Context(), aSource("x"), "", jobs.Name{Repo: "a", Tag: "1"}); err != nil {
				t.Error(err)
			}
		})
	}
	g.Wait()
	if b.puts != 1 {
		t.Errorf("%d records were written, want one", b.puts)
	}
	id := push(t, q, "x", "b:1")
	serve(t, q)
	st := await(t, q, id)
	if diff := cmp.Diff(st.Names, []jobs.Name{{Repo: "a", Tag: "1"}, {Repo: "b", Tag: "1"}}); diff != "" || len(w.list()) != 1 {
		t.Errorf("%d conversions, names: %s", len(w.list()), diff)
	}
	// Pushed again, it is done again: whether anything is left to do only a conversion tells.
	push(t, q, "x", "b:1")
	if await(t, q, id); len(w.list()) != 2 {
		t.Errorf("%d conversions, want 2", len(w.list()))
	}
}

type countPuts struct {
	bucket.Bucket
	mu   sync.Mutex
	puts int
}

func (b *countPuts) Put(ctx context.Context, key string, body io.ReaderAt, size int64) error {
	b.mu.Lock()
	b.puts++
	b.mu.Unlock()
	return b.Bucket.Put(ctx, key, body, size)
}

func TestAFailedJobKeepsItsReasonAndBlocksNobody(t *testing.T) {
	b := mem.New()
	w := &works{do: func(_ context.Context, r jobs.Record, _ func(jobs.Progress)) error {
		switch r.Names[0].Repo {
		case "bad":
			return fmt.Errorf("layer 1: %w", errInput)
		case "worse":
			panic("a mistake")
		}
		return nil
	}}
	q := open(t, b, w)
	bad, worse, good := push(t, q, "bad", "bad:1"), push(t, q, "worse", "worse:1"), push(t, q, "good", "good:1")
	stop := serve(t, q)
	if st := await(t, q, good); st.State != jobs.Done {
		t.Errorf("good is %+v", st)
	}
	for id, words := range map[string]string{bad: "layer 1: not an image", worse: "a mistake"} {
		if st := await(t, q, id); st.State != jobs.Failed || !strings.Contains(st.Reason.Message, words) {
			t.Errorf("got %+v, want failed with %q", st, words)
		}
	}
	stop()
	q = open(t, b, w)
	if st, err := q.Job(bad); err != nil || st.State != jobs.Failed || st.Reason.Blame != jobs.BlameInput || st.Attempts != 1 {
		t.Errorf("after a restart: %+v, %v", st, err)
	}
	if len(w.list()) != 3 {
		t.Errorf("conversions: %v", w.list())
	}
	w.do = func(_ context.Context, r jobs.Record, _ func(jobs.Progress)) error {
		if !r.Doubted {
			t.Error("the conversion after a failed one does not know that")
		}
		return nil
	}
	push(t, q, "bad", "bad:1")
	serve(t, q)
	if st := await(t, q, bad); st.State != jobs.Done || st.Doubted {
		t.Errorf("pushed again: %+v", st)
	}
}

func TestWhatMayPassIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fails := 0
		w := &works{do: func(_ context.Context, r jobs.Record, _ func(jobs.Progress)) error {
			if r.Names[0].Repo == "a" && fails < 12 {
				fails++
				return errors.New("the bucket is away")
			}
			return nil
		}}
		q := open(t, mem.New(), w)
		id, other := push(t, q, "a", "a:1"), push(t, q, "b", "b:1")
		serve(t, q)
		await(t, q, other)
		if st, err := q.Job(id); err != nil || st.State != jobs.Queued || st.Reason.Message != "the bucket is away" || st.RetryAt.IsZero() {
			t.Errorf("between attempts: %+v, %v", st, err)
		}
		began := time.Now()
		if st := await(t, q, id); st.State != jobs.Done || st.Attempts != 13 || st.Reason != nil {
			t.Errorf("got %+v", st)
		}
		// 2+4+…+128 s, then 200 s five times, each halved at most.
		if took := time.Since(began); took < 600*time.Second || took > 1300*time.Second {
			t.Errorf("twelve pauses took %s", took)
		}
	})
}

func TestARestartTakesJobsUpAgain(t *testing.T) {
	b := mem.New()
	begun := make(chan struct{})
	w := &works{do: func(ctx context.Context, _ jobs.Record, _ func(jobs.Progress)) error {
		close(begun)
		<-ctx.Done()
		return ctx.Err()
	}}
	q := open(t, b, w)
	first, second := push(t, q, "1", "a:1"), push(t, q, "2", "a:2")
	stop := serve(t, q)
	<-begun               // that it runs is durable by then
	killed := clone(t, b) // what a kill leaves
	stop()
	for name, left := range map[string]*mem.Bucket{"killed": killed, "drained": b} {
		w := &works{do: func(_ context.Context, r jobs.Record, _ func(jobs.Progress)) error {
			if want := r.Names[0].Tag == "1"; r.Doubted != want {
				t.Errorf("%s: doubted is %v of %s", name, r.Doubted, r)
			}
			return nil
		}}
		q := open(t, left, w)
		if queued, _ := q.Active(); queued != 2 || len(q.Sources()) != 2 {
			t.Errorf("%s: %d are queued", name, queued)
		}
		serve(t, q)
		one, two := await(t, q, first), await(t, q, second)
		if one.State != jobs.Done || two.State != jobs.Done || (one.Interrupted == 1) != (name == "killed") {
			t.Errorf("%s: %+v, %+v", name, one, two)
		}
	}
}

func clone(t *testing.T, b *mem.Bucket) *mem.Bucket {
	t.Helper()
	c := mem.New()
	for _, key := range buckettest.Keys(t, b, "") {
		body := buckettest.Bytes(t, b, key)
		if err := c.Put(t.Context(), key, strings.NewReader(string(body)), int64(len(body))); err != nil {
			t.Fatal(err)
		}
	}
	return c
}

func TestAJobThatEndsTheProgramFails(t *testing.T) {
	b := mem.New()
	r := aQueued()
	r.State, r.Attempts = jobs.Running, 1
	w := &works{}
	for n := 1; ; n++ {
		raw := encode(t, r)
		if err := b.Put(t.Context(), jobs.Key(r.ID()), strings.NewReader(string(raw)), int64(len(raw))); err != nil {
			t.Fatal(err)
		}
		st, err := open(t, b, w).Job(r.ID())
		if err != nil {
			t.Fatal(err)
		}
		if st.State == jobs.Failed {
			if n != 5 || !strings.Contains(st.Reason.Message, "quarry ended 5 times") {
				t.Errorf("failed after %d times: %+v", n, st.Reason)
			}
			break
		}
		r = st.Record
		r.State = jobs.Running // it ends the program again
	}
	if st, err := open(t, b, w).Job(r.ID()); err != nil || st.State != jobs.Failed {
		t.Errorf("the failure is not kept: %+v, %v", st, err)
	}
}

func TestAFullQueueRefuses(t *testing.T) {
	q := open(t, mem.New(), &works{}, func(c *jobs.Config) { c.MaxActive = 2 })
	push(t, q, "1", "a:1")
	push(t, q, "2", "a:2")
	if _, err := q.Push(t.Context(), aSource("3"), "", jobs.Name{Repo: "a", Tag: "3"}); !errors.Is(err, jobs.ErrFull) {
		t.Errorf("got %v, want ErrFull", err)
	}
	push(t, q, "2", "b:2") // one that is there
	serve(t, q)
	await(t, q, jobs.ID(aSource("2"), ""))
	push(t, q, "3", "a:3")
}

func TestEndedJobsAreForgotten(t *testing.T) {
	b := mem.New()
	q := open(t, b, &works{}, func(c *jobs.Config) { c.Keep = 2 })
	var ids []string
	for _, image := range []string{"1", "2", "3", "4"} {
		ids = append(ids, push(t, q, image, "a:"+image))
	}
	stop := serve(t, q)
	await(t, q, ids[3])
	stop()
	if keys := buckettest.Keys(t, b, jobs.Prefix); len(keys) != 2 {
		t.Errorf("records: %v", keys)
	}
	if _, err := q.Job(ids[0]); !errors.Is(err, jobs.ErrUnknown) {
		t.Errorf("the oldest: %v", err)
	}
	later := open(t, b, &works{}, func(c *jobs.Config) {
		c.Now = func() time.Time { return time.Now().Add(jobs.DefaultKeepFor + time.Hour) }
	})
	if _, err := later.Job(ids[3]); !errors.Is(err, jobs.ErrUnknown) || len(buckettest.Keys(t, b, jobs.Prefix)) != 0 {
		t.Errorf("a month later: %v", err)
	}
}

// A writer that was fenced deletes no record: who took over may have queued it again.
func TestAFencedWriterForgetsNothing(t *testing.T) {
	b := mem.New()
	fenced := errors.New("fenced")
	q := open(t, b, &works{}, func(c *jobs.Config) {
		c.Keep = 1
		c.Confirm = func(context.Context) error { return fenced }
	})
	var ids []string
	for _, image := range []string{"1", "2", "3"} {
		ids = append(ids, push(t, q, image, "a:"+image))
	}
	stop := serve(t, q)
	await(t, q, ids[2])
	stop()
	if keys := buckettest.Keys(t, b, jobs.Prefix); len(keys) != 3 {
		t.Errorf("records: %v, want all three", keys)
	}
}

// One who asks rarely gets what is newest of each job, and every end.
func TestASlowWatcherMissesNoEnd(t *testing.T) {
	w := &works{do: func(_ context.Context, _ jobs.Record, progress func(jobs.Progress)) error {
		for i := range int64(1000) {
			progress(jobs.Progress{Step: "layer", Done: i, Total: 1000})
		}
		return nil
	}}
	q := open(t, mem.New(), w)
	all, err := q.Watch("")
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()
	var last string
	for i := range 10 {
		last = push(t, q, fmt.Sprint(i), fmt.Sprintf("a:%d", i))
	}
	stop := serve(t, q)
	await(t, q, last)
	stop()
	for range 10 {
		if st, err := all.Next(t.Context()); err != nil || st.State != jobs.Done {
			t.Errorf("told %+v, %v", st, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if st, err := all.Next(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("told once more: %+v, %v", st, err)
	}
}

func TestWatchersAreBounded(t *testing.T) {
	q := open(t, mem.New(), &works{})
	if _, err := q.Watch("none"); !errors.Is(err, jobs.ErrUnknown) {
		t.Errorf("got %v, want ErrUnknown", err)
	}
	var all []*jobs.Watch
	for {
		w, err := q.Watch("")
		if errors.Is(err, jobs.ErrWatchers) {
			break
		}
		if all = append(all, w); err != nil || len(all) > 10000 {
			t.Fatalf("%d watchers, %v", len(all), err)
		}
	}
	all[0].Close()
	if _, err := q.Watch(""); err != nil {
		t.Error(err)
	}
}

func TestListsHavePages(t *testing.T) {
	q := open(t, mem.New(), &works{})
	for i := range 7 {
		push(t, q, fmt.Sprint(i), fmt.Sprintf("%c:%d", 'a'+rune(i%2), i))
	}
	var got []string
	f := jobs.Filter{Limit: 2, Repo: "a", State: jobs.Queued}
	for {
		page, next := q.List(f)
		for _, st := range page {
			got = append(got, st.Names[0].Tag)
		}
		if f.After = next; next == "" {
			break
		}
	}
	if diff := cmp.Diff(got, []string{"6", "4", "2", "0"}); diff != "" {
		t.Errorf("pages: %s", diff)
	}
	if l := q.Of(aSource("3")); len(l) != 1 || l[0].Names[0].Tag != "3" {
		t.Errorf("of a source: %+v", l)
	}
}

func TestARecordThatIsNoneIsLeftOut(t *testing.T) {
	b := mem.New()
	id := jobs.ID(aSource("1"), "")
	if err := b.Put(t.Context(), jobs.Key(id), strings.NewReader("junk"), 4); err != nil {
		t.Fatal(err)
	}
	q := open(t, b, &works{})
	if _, err := q.Job(id); !errors.Is(err, jobs.ErrUnknown) {
		t.Errorf("got %v", err)
	}
	push(t, q, "1", "a:1")
	if r, err := stored(t, b, id); err != nil || r.State != jobs.Queued {
		t.Errorf("pushed: %+v, %v", r, err)
	}
}

// What a push was told is queued must be so in the bucket.
func TestAPushThatIsNotDurableFails(t *testing.T) {
	faulty := &buckettest.Faulty{Bucket: mem.New()}
	q := open(t, faulty, &works{})
	faulty.Before = buckettest.FailAll("Put")
	if _, err := q.Push(t.Context(), aSource("1"), "", jobs.Name{Repo: "a", Tag: "1"}); !errors.Is(err, buckettest.ErrInjected) {
		t.Errorf("got %v, want the bucket's error", err)
	}
	faulty.Before = nil
	id := push(t, q, "1", "a:1") // the client's second attempt
	if r, err := stored(t, faulty, id); err != nil || r.State != jobs.Queued {
		t.Errorf("pushed again: %+v, %v", r, err)
	}
	stop := serve(t, q)
	if st := await(t, q, id); st.State != jobs.Done {
		t.Errorf("got %+v", st)
	}
	stop() // it still writes down that the job ended
	faulty.Before = buckettest.FailAll("List")
	if _, err := jobs.Open(t.Context(), jobs.Config{Bucket: faulty}); !errors.Is(err, buckettest.ErrInjected) {
		t.Errorf("a bucket that is away opens: %v", err)
	}
}
