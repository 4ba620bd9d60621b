package api_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/api"
	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/store/image"
)

func failureOf(t *testing.T, w *apitest.World, repo, tag string, f image.Failure) image.Failure {
	t.Helper()
	f.Repo, f.Tag, f.Converter = repo, tag, "quarry-converter/2"
	f.Source, f.Time = "oci:/images/x", time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	b, err := image.EncodeFailure(f)
	if err != nil {
		t.Fatal(err)
	}
	w.PutObject(t, image.FailureKey(repo, tag), b)
	return f
}

func TestANameWhoseConversionFailedAnswersTheReason(t *testing.T) {
	w := apitest.New(t)
	w.Publish(t, "a/b:v1", 1, 1)
	failureOf(t, w, "a/b", "bad", image.Failure{State: image.FailureFailed, Reason: `layer 2 of 3: entry "etc": is odd`, Blame: image.BlameInput})
	failureOf(t, w, "c", "bad", image.Failure{State: image.FailureFailed, Reason: "disk full", Blame: image.BlameStore})
	failureOf(t, w, "c", "half", image.Failure{State: image.FailureUnfinished})
	srv, _ := w.Serve(t, nil)
	for name, tt := range map[string]struct{ word, blame, state string }{
		"a/b:bad": {`layer 2 of 3: entry "etc": is odd`, api.BlameUser, image.FailureFailed},
		"c:bad":   {"disk full", api.BlameInfra, image.FailureFailed},
		"c:half":  {"interrupted", api.BlameInfra, image.FailureUnfinished},
	} {
		for _, route := range []string{"images", "start"} {
			e := wantError(t, ask(t, "GET", srv.URL+"/v1/"+route+"/"+name+"?platform=linux/amd64", ""), 422, "image_failed")
			if !strings.Contains(e.Message, tt.word) || !strings.Contains(e.Message, "oci:/images/x") || e.Blame != tt.blame || e.Details["state"][0] != tt.state {
				t.Errorf("%s of %s: %+v", route, name, e)
			}
		}
	}
	c, err := client.New(client.Config{URL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Image(t.Context(), image.Ref{Repo: "c", Tag: "bad"}, image.HostPlatform()); !errors.Is(err, api.ErrImageFailed) {
		t.Errorf("the client returns %v", err)
	}
	wantError(t, ask(t, "GET", srv.URL+"/v1/images/c:none", ""), 404, "repo_unknown")
}

func TestAFailureHidesNoImage(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a/b:v1", 1, 1)
	want := failureOf(t, w, "a/b", "v1", image.Failure{State: image.FailureFailed, Reason: "no", Blame: image.BlameInput})
	srv, _ := w.Serve(t, nil)
	var got api.Image
	a := ask(t, "GET", srv.URL+"/v1/images/a/b:v1", "")
	if err := json.Unmarshal(a.body, &got); err != nil || a.StatusCode != 200 || got.Status != api.StatusReady {
		t.Fatalf("status %d, body %s, error %v", a.StatusCode, a.body, err)
	}
	if diff := cmp.Diff(got.Failure, &want); diff != "" {
		t.Errorf("failure (-got +want):\n%s", diff)
	}
	byDigest := ask(t, "GET", srv.URL+"/v1/images/a/b@"+img.Source.String(), "")
	if strings.Contains(string(byDigest.body), "failure") {
		t.Errorf("by digest: %s", byDigest.body)
	}
	for _, junk := range []string{"", "{}", strings.Repeat("x", image.MaxFailure+1)} {
		w.PutObject(t, image.FailureKey("a/b", "v1"), []byte(junk))
		if a := ask(t, "GET", srv.URL+"/v1/images/a/b:v1", ""); a.StatusCode != 200 || strings.Contains(string(a.body), "failure") {
			t.Errorf("with a record of %d bytes: %d %s", len(junk), a.StatusCode, a.body)
		}
	}
}

func TestARecordOfNoUseIsNoReason(t *testing.T) {
	w := apitest.New(t)
	w.Publish(t, "a/b:v1", 1, 1)
	srv, _ := w.Serve(t, func(c *api.Config) { c.Local = true })
	for _, junk := range []string{"", "{}", strings.Repeat("x", image.MaxFailure+1)} {
		for _, name := range []string{"a/b:v1", "a/b:bad"} {
			_, tag, _ := strings.Cut(name, ":")
			w.PutObject(t, image.FailureKey("a/b", tag), []byte(junk))
		}
		wantError(t, ask(t, "GET", srv.URL+"/v1/images/a/b:bad", ""), 404, "tag_unknown")
		if a := ask(t, "DELETE", srv.URL+"/v1/images/a/b:bad", ""); a.StatusCode != 204 {
			t.Errorf("delete: %d %s", a.StatusCode, a.body)
		}
		wantError(t, ask(t, "DELETE", srv.URL+"/v1/images/a/b:bad", ""), 404, "tag_unknown")
	}
	if a := ask(t, "DELETE", srv.URL+"/v1/images/a/b:v1", ""); a.StatusCode != 204 {
		t.Errorf("delete: %d %s", a.StatusCode, a.body)
	}
	wantError(t, ask(t, "GET", srv.URL+"/v1/images/a/b:v1", ""), 404, "repo_unknown")
}

func TestANameWhoseStatementIsGoneIsDamage(t *testing.T) {
	w := apitest.New(t)
	img := w.Publish(t, "a/b:v1", 1, 1)
	if err := w.Bucket.Delete(t.Context(), image.StatementKey(img.Source, img.Platform)); err != nil {
		t.Fatal(err)
	}
	srv, _ := w.Serve(t, nil)
	for _, route := range []string{"images", "start"} {
		e := wantError(t, ask(t, "GET", srv.URL+"/v1/"+route+"/a/b:v1?platform=linux/amd64", ""), 500, "object_corrupt")
		if !strings.Contains(e.Message, "a/b:v1") || !strings.Contains(e.Message, "convert the image again") {
			t.Errorf("%s: message %q", route, e.Message)
		}
		wantError(t, ask(t, "GET", srv.URL+"/v1/"+route+"/a/b@"+img.Source.String(), ""), 404, "image_unknown")
	}
}

func TestDeletingANameDeletesItsFailure(t *testing.T) {
	w := apitest.New(t)
	w.Publish(t, "a/b:v1", 1, 1)
	for _, tag := range []string{"v1", "bad"} {
		failureOf(t, w, "a/b", tag, image.Failure{State: image.FailureUnfinished})
	}
	srv, _ := w.Serve(t, func(c *api.Config) { c.Local = true })
	for _, name := range []string{"a/b:v1", "a/b:bad"} {
		if a := ask(t, "DELETE", srv.URL+"/v1/images/"+name, ""); a.StatusCode != 204 {
			t.Errorf("delete %s: %d %s", name, a.StatusCode, a.body)
		}
		if a := ask(t, "GET", srv.URL+"/v1/images/"+name, ""); a.StatusCode != 404 {
			t.Errorf("get %s: %d %s", name, a.StatusCode, a.body)
		}
		if a := ask(t, "DELETE", srv.URL+"/v1/images/"+name, ""); a.StatusCode != 404 {
			t.Errorf("delete %s again: %d %s", name, a.StatusCode, a.body)
		}
	}
}
