package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/jobs"
)

// queueWorld is a store whose queue does what gate lets through: an error fails
// the job.
type queueWorld struct {
	*client.Client
	q    *jobs.Queue
	gate chan error
	url  string
}

func newQueueWorld(t *testing.T) *queueWorld {
	t.Helper()
	w := apitest.New(t)
	qw := &queueWorld{gate: make(chan error)}
	var err error
	qw.q, err = jobs.Open(t.Context(), jobs.Config{
		Bucket: w.Bucket,
		Convert: func(ctx context.Context, r jobs.Record, progress func(jobs.Progress)) (jobs.Result, error) {
			for i := range int64(100) {
				progress(jobs.Progress{Step: "layer", Item: fmt.Sprint(i / 10), Done: i, Total: 100, Unit: "bytes"})
			}
			select {
			case err := <-qw.gate:
				return jobs.Result{Image: r.Source, Platform: "linux/amd64"}, err
			case <-ctx.Done():
				return jobs.Result{}, ctx.Err()
			}
		},
		Final: func(err error) *jobs.Reason {
			return &jobs.Reason{Layer: chunk.Sum(nil).String(), Entry: "usr/bin/odd", Message: err.Error(), Blame: jobs.BlameInput}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); qw.q.Serve(ctx) }() // ends with cancel
	t.Cleanup(func() { cancel(); <-ended })
	srv, _ := w.Serve(t, func(c *api.Config) {
		c.Jobs = qw.q
		c.Job = func(_ context.Context, ref image.Ref, source chunk.Digest, _ image.Platform) error {
			for _, st := range qw.q.Of(source) {
				return api.JobError(ref, st)
			}
			return nil
		}
	})
	qw.Client, qw.url = connect(t, client.Config{URL: srv.URL}), srv.URL
	return qw
}

func (w *queueWorld) push(t *testing.T, source, repo string) jobs.Status {
	t.Helper()
	st, err := w.q.Push(t.Context(), chunk.Sum([]byte(source)), "", jobs.Name{Repo: repo, Tag: "v1"})
	if err != nil {
		t.Fatal(err)
	}
	return st
}

func TestAJobIsFollowedToItsEnd(t *testing.T) {
	w := newQueueWorld(t)
	good, bad := w.push(t, "good", "a"), w.push(t, "bad", "b")
	follow := func(id string, end error) (api.Job, []string) {
		var steps []string
		sent := false
		j, err := w.FollowJob(t.Context(), id, func(j api.Job) {
			step := string(j.State)
			if j.Progress != nil {
				step += " " + j.Progress.Step
			}
			if steps = append(steps, step); !sent && j.Progress != nil && j.Progress.Done == 99 {
				sent = true
				w.gate <- end
			}
		})
		if err != nil {
			t.Fatal(err)
		}
		return j, steps
	}
	j, steps := follow(good.ID(), nil)
	if j.State != jobs.Done || j.Result == nil || !slices.Contains(steps, "running layer") || j.Names[0] != "a:v1" || j.Ended == nil {
		t.Errorf("got %+v over %q", j, steps)
	}
	if j, _ = follow(bad.ID(), errors.New("no image")); j.State != jobs.Failed || j.Reason.Entry != "usr/bin/odd" || j.Reason.Message != "no image" {
		t.Errorf("got %+v", j)
	}
	if j, steps = follow(good.ID(), nil); j.State != jobs.Done || len(steps) != 1 {
		t.Errorf("a job that has ended: %q", steps)
	}
	if _, err := w.FollowJob(t.Context(), jobs.ID(chunk.Sum(nil), ""), func(api.Job) {}); !errors.Is(err, jobs.ErrUnknown) {
		t.Errorf("a job that is none: %v", err)
	}
}

func TestJobsAreListed(t *testing.T) {
	w := newQueueWorld(t)
	for i := range 120 {
		w.push(t, fmt.Sprint(i), string('a'+rune(i%2)))
	}
	for name, c := range map[string]struct {
		filter jobs.Filter
		want   int
	}{
		"all": {jobs.Filter{}, 120}, "of a repository": {jobs.Filter{Repo: "a"}, 60}, "none failed": {jobs.Filter{State: jobs.Failed}, 0},
		"of a source": {jobs.Filter{Source: chunk.Sum([]byte("7"))}, 1}, "the newest": {jobs.Filter{Limit: 70}, 70},
	} {
		list, err := w.Jobs(t.Context(), c.filter)
		if err != nil || len(list) != c.want {
			t.Errorf("%s: %d, %v, want %d", name, len(list), err, c.want)
		}
	}
	for path, code := range map[string]string{
		"/v1/jobs?state=odd": "bad_request", "/v1/jobs?repo=A": "bad_request", "/v1/jobs?source=1": "bad_request", "/v1/jobs/x": "bad_request",
		"/v1/jobs/" + strings.Repeat("a", 64): "job_unknown", "/v1/jobs/" + strings.Repeat("a", 64) + "/events": "job_unknown",
	} {
		resp, err := http.Get(w.url + path)
		if err != nil {
			t.Fatal(err)
		}
		var doc struct{ Error api.Error }
		err = json.NewDecoder(resp.Body).Decode(&doc)
		if resp.Body.Close(); err != nil || doc.Error.Code != code {
			t.Errorf("%s: %d %+v, %v, want %s", path, resp.StatusCode, doc, err, code)
		}
	}
}

func TestAnImageIsWhatItsJobSays(t *testing.T) {
	w := newQueueWorld(t)
	st := w.push(t, "x", "a")
	ref := image.Ref{Repo: "a", Digest: &st.Source}
	ask := func() error {
		_, err := w.Image(t.Context(), ref, image.HostPlatform())
		return err
	}
	watch, err := w.q.Watch(st.ID())
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Close()
	for now := st; now.State != jobs.Running; {
		if now, err = watch.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	other := w.push(t, "y", "a")
	if err := ask(); !errors.Is(err, api.ErrConverting) || !strings.Contains(err.Error(), "being converted") {
		t.Errorf("running: %v", err)
	}
	if _, err := w.Image(t.Context(), image.Ref{Repo: "a", Digest: &other.Source}, image.HostPlatform()); !errors.Is(err, api.ErrPending) {
		t.Errorf("queued: %v", err)
	}
	w.gate <- errors.New("entry is odd")
	if _, err := w.FollowJob(t.Context(), st.ID(), func(api.Job) {}); err != nil {
		t.Fatal(err)
	}
	err = ask()
	e, ok := errors.AsType[*api.Error](err)
	if !ok || !errors.Is(err, api.ErrImageFailed) || e.Status != 422 || e.Retryable || e.Blame != api.BlameUser ||
		e.Details["entry"][0] != "usr/bin/odd" || !strings.Contains(e.Message, "entry is odd (push it again") {
		t.Errorf("failed: %#v", err)
	}
}

// A server that ends does not wait for who listens.
func TestStreamsEndWithTheServer(t *testing.T) {
	w := apitest.New(t)
	q, err := jobs.Open(t.Context(), jobs.Config{Bucket: w.Bucket})
	if err != nil {
		t.Fatal(err)
	}
	_, h := w.Serve(t, func(c *api.Config) { c.Jobs = q })
	srv := api.NewServer(h)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }() // ends with Shutdown
	resp, err := http.Get("http://" + l.Addr().String() + "/v1/jobs/events")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := srv.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if err := <-served; !errors.Is(err, http.ErrServerClosed) {
		t.Error(err)
	}
}
