package page_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"quarry/api/apitest"
	"quarry/api/page"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/store/jobs"
)

var everything = page.Viewer{Admin: true}

// only is a viewer of one repository prefix.
func only(prefix string) page.Viewer {
	return page.Viewer{Sees: func(repo string) bool { return repo == prefix || strings.HasPrefix(repo, prefix+"/") }}
}

func newPage(t testing.TB, w *apitest.World, change func(*page.Config)) *page.Page {
	t.Helper()
	cfg := page.Config{Catalog: w.Catalog, Bucket: w.Bucket, Stored: w.StoredSizes}
	if change != nil {
		change(&cfg)
	}
	p := page.New(cfg)
	t.Cleanup(p.Close)
	return p
}

func get(t testing.TB, p *page.Page, v page.Viewer, target string, headers ...string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequest(http.MethodGet, target, nil)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	w := httptest.NewRecorder()
	if err := p.Serve(w, r, v); err != nil {
		t.Fatalf("%s: %v", target, err)
	}
	return w
}

// await asks again until the page says what it must.
func await(t testing.TB, p *page.Page, v page.Viewer, target string, want ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		body := get(t, p, v, target).Body.String()
		missing := ""
		for _, s := range want {
			if !strings.Contains(body, s) {
				missing = s
			}
		}
		if missing == "" {
			return body
		}
		select {
		case <-ctx.Done():
			t.Fatalf("the page never says %q:\n%s", missing, body)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// setName binds a name to a source that has no image.
func setName(t testing.TB, w *apitest.World, repo, tag string, source chunk.Digest) {
	t.Helper()
	n := catalog.Name{Repo: repo, Tag: tag, Source: source, Serial: w.Catalog.Serial(repo, tag) + 1, Statement: []byte(`{}`)}
	if err := w.Catalog.SetName(t.Context(), n); err != nil {
		t.Fatal(err)
	}
}

func putFailure(t testing.TB, w *apitest.World, f image.Failure) {
	t.Helper()
	f.State, f.Converter, f.Time = image.FailureFailed, "test", time.Unix(1e9, 0)
	b, err := image.EncodeFailure(f)
	if err != nil {
		t.Fatal(err)
	}
	w.PutObject(t, image.FailureKey(f.Repo, f.Tag), b)
}

// aQueue has a job that runs, one that waits for it, and one that failed as told.
func aQueue(t *testing.T, w *apitest.World, running, waiting, failing jobs.Name, why jobs.Reason) *jobs.Queue {
	t.Helper()
	begun := make(chan struct{})
	q, err := jobs.Open(t.Context(), jobs.Config{
		Bucket: w.Bucket,
		Convert: func(ctx context.Context, r jobs.Record, progress func(jobs.Progress)) (jobs.Result, error) {
			if r.Names[0] == failing {
				return jobs.Result{}, errors.New(why.Message)
			}
			progress(jobs.Progress{Step: "layer", Item: "1 of <2>", Done: 30, Total: 40, Unit: "bytes"})
			close(begun)
			<-ctx.Done()
			return jobs.Result{}, ctx.Err()
		},
		Final: func(err error) *jobs.Reason {
			if err.Error() == why.Message {
				return &why
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); q.Serve(ctx) }() // ends with cancel
	t.Cleanup(func() { cancel(); <-ended })
	for _, n := range []jobs.Name{failing, running, waiting} {
		setName(t, w, n.Repo, n.Tag, chunk.Sum([]byte(n.String())))
		st, err := q.Push(t.Context(), chunk.Sum([]byte(n.String())), "", n)
		if err != nil {
			t.Fatal(err)
		}
		switch n {
		case failing:
			watch, err := q.Watch(st.ID())
			if err != nil {
				t.Fatal(err)
			}
			defer watch.Close()
			for st.State.Active() {
				if st, err = watch.Next(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
		case running:
			<-begun
		}
	}
	return q
}

func TestWhatPushersWroteIsEscaped(t *testing.T) {
	w := apitest.New(t)
	w.Publish(t, "team/app:1", 3, 1)
	evil := `<script>alert("reason")</script>`
	putFailure(t, w, image.Failure{Repo: "team/app", Tag: "1", Source: "oci:" + evil, Reason: evil, Blame: image.BlameInput})
	q := aQueue(t, w, jobs.Name{Repo: "r", Tag: "1"}, jobs.Name{Repo: "w", Tag: "1"}, jobs.Name{Repo: "f", Tag: "1"},
		jobs.Reason{Entry: `" onmouseover="alert(1)` + evil, Layer: chunk.Sum(nil).String(), Message: evil + "&lt;", Blame: jobs.BlameInput})
	p := newPage(t, w, func(c *page.Config) { c.Jobs = q })
	body := await(t, p, everything, "/?repo=%22%3E%3Cscript%3Ealert(1)%3C/script%3E%27", "&lt;script&gt;alert(", "1 of &lt;2&gt;")
	for _, bad := range []string{"<script>alert", `" onmouseover`, "<b>&", "<2>", "style="} {
		if strings.Contains(body, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	if n := strings.Count(body, "<script"); n != 1 {
		t.Errorf("%d scripts, want the page's own alone", n)
	}
	h := get(t, p, everything, "/").Header()
	if csp := h.Get("Content-Security-Policy"); !strings.Contains(csp, "default-src 'none'") || strings.Contains(csp, "unsafe") {
		t.Errorf("Content-Security-Policy: %s", csp)
	}
	if got := h.Get("Cache-Control"); got != "no-store" {
		t.Errorf("Cache-Control: %s", got)
	}
}

func TestStatesAreShown(t *testing.T) {
	w := apitest.New(t)
	w.Publish(t, "a/ready:1", 3, 1)
	unsigned := w.Publish(t, "a/unsigned:1", 3, 2)
	if err := w.Bucket.Delete(t.Context(), image.SigKey(unsigned.Source, unsigned.Platform, w.Key.Public().ID())); err != nil {
		t.Fatal(err)
	}
	setName(t, w, "a/gone", "1", chunk.Sum([]byte("gone")))
	putFailure(t, w, image.Failure{Repo: "a/ready", Tag: "1", Source: "registry://x", Reason: "layer 2 is no archive", Blame: image.BlameInput})
	q := aQueue(t, w, jobs.Name{Repo: "a/runs", Tag: "1"}, jobs.Name{Repo: "a/waits", Tag: "1"}, jobs.Name{Repo: "a/fails", Tag: "1"},
		jobs.Reason{Layer: "sha256:" + strings.Repeat("ab", 32), Entry: "etc/passwd", Message: "entry is odd", Blame: jobs.BlameInput})
	p := newPage(t, w, func(c *page.Config) { c.Jobs = q })
	body := await(t, p, everything, "/",
		`>a/ready<wbr>:1`, `"state ready"`, `"state unsigned"`, `"state missing"`, `"state converting"`, `"state pending"`, `"state failed"`,
		"newest conversion failed", "layer 2 is no archive", "<dd>etc/passwd</dd>", "<dd>sha256:"+strings.Repeat("ab", 32)+"</dd>", "entry is odd", `value="75"`, "1 of &lt;2&gt;")
	if strings.Count(body, `"state ready"`) != 1 {
		t.Error("more than one image is ready")
	}
}

func TestWhatImagesShareIsShown(t *testing.T) {
	w := apitest.New(t)
	small, large := w.Publish(t, "team/app:1", 5, 1), w.Publish(t, "team/app:2", 9, 1) // has the files of 1
	w.Publish(t, "other/app:1", 4, 7)
	w.Publish(t, "other/app:2", 4, 7) // the same bootstrap under another name
	p := newPage(t, w, nil)
	body := await(t, p, everything, "/", "2 images", "team/app:1, team/app:2")
	if strings.Contains(body, "being computed") || strings.Contains(body, "other/app:1, ") {
		t.Errorf("the comparison is not whole:\n%s", body)
	}
	var adds int64
	had := map[chunk.Digest]bool{}
	for _, c := range small.Blob.Chunks {
		had[c.Digest] = true
	}
	for _, c := range large.Blob.Chunks {
		if !had[c.Digest] {
			n, err := w.StoredSizes(t.Context(), []chunk.Digest{c.Digest})
			if err != nil {
				t.Fatal(err)
			}
			adds += n[0]
		}
	}
	if want := fmt.Sprintf("adds %.0f KiB of", float64(adds)/1024); !strings.Contains(body, want) && !strings.Contains(body, fmt.Sprintf("adds %.1f KiB of", float64(adds)/1024)) {
		t.Errorf("the page does not say %q", want)
	}
	if !strings.Contains(body, "adds 0 B of") {
		t.Error("the smaller image adds something")
	}
	w.Publish(t, "team/app:3", 12, 1)
	await(t, p, everything, "/", "3 images", "team/app:1, team/app:2, team/app:3")
}

func TestADamagedBootstrapIsSaidAndTheRestIsCompared(t *testing.T) {
	w := apitest.New(t)
	w.Publish(t, "a/x:1", 3, 1)
	bad := w.Publish(t, "a/y:1", 5, 2)
	w.PutObject(t, image.BootstrapKey(chunk.Sum(bad.Bootstrap)), bad.Bootstrap[:len(bad.Bootstrap)-1])
	await(t, newPage(t, w, nil), everything, "/", "its bootstrap cannot be read", `aria-label="adds `)
}

func TestOthersRepositoriesAreNotShown(t *testing.T) {
	w := apitest.New(t)
	w.Publish(t, "mine/app:1", 5, 1)
	w.Publish(t, "secret/app:1", 5, 1) // has all of mine
	w.Publish(t, "minework/app:1", 3, 5)
	putFailure(t, w, image.Failure{Repo: "secret/other", Tag: "9", Source: "x", Reason: "why", Blame: image.BlameInput})
	putFailure(t, w, image.Failure{Repo: "mine/other", Tag: "9", Source: "x", Reason: "mine failed", Blame: image.BlameInput})
	q := aQueue(t, w, jobs.Name{Repo: "mine/run", Tag: "1"}, jobs.Name{Repo: "secret/wait", Tag: "1"}, jobs.Name{Repo: "secret/fail", Tag: "1"},
		jobs.Reason{Message: "no good", Blame: jobs.BlameInput})
	if _, err := q.Push(t.Context(), chunk.Sum([]byte("mine/run:1")), "", jobs.Name{Repo: "secret/run", Tag: "1"}); err != nil {
		t.Fatal(err) // one job of a name that is seen and one that is not
	}
	reg := prometheus.NewRegistry()
	p := newPage(t, w, func(c *page.Config) { c.Jobs, c.Metrics = q, reg })
	await(t, p, everything, "/", "secret/app<wbr>:1", "mine/run:1, secret/run:1", `id="node"`)
	body := await(t, p, only("mine"), "/", "mine failed", "mine/run:1", "of the repositories that your token covers", `aria-label="adds `)
	for _, bad := range []string{"secret", "minework", `id="node"`, "adds 0 B", "2 images", "no good"} {
		if strings.Contains(body, bad) {
			t.Errorf("a viewer of mine is shown %q", bad)
		}
	}
}

func TestNamesArePaged(t *testing.T) {
	w := apitest.New(t)
	for i := range 250 {
		setName(t, w, fmt.Sprintf("r%d/x", i%2), fmt.Sprintf("%03d", i), chunk.Sum([]byte{byte(i)}))
	}
	p := newPage(t, w, nil)
	for _, c := range []struct {
		target     string
		rows       int
		want, lack string
	}{
		{"/", 100, "1 to 100 of 250 names", "rel=\"prev\""},
		{"/", 100, `href="/?page=2"`, "Page 2 of"},
		{"/?page=3", 50, "201 to 250 of 250 names", "rel=\"next\""},
		{"/?page=99", 50, "Page 3 of 3", "rel=\"next\""},
		{"/?repo=r1", 100, `href="/?page=2&amp;repo=r1"`, "r0/x"},
		{"/?repo=r1&page=2", 25, "101 to 125 of 125 names", "r0/x"},
		{"/?repo=none", 0, "No names", "<table"},
	} {
		body := get(t, p, everything, c.target).Body.String()
		if n := strings.Count(body, `class="name"`); n != c.rows || !strings.Contains(body, c.want) || strings.Contains(body, c.lack) {
			t.Errorf("%s: %d rows, want %d, with %q and without %q:\n%.3000s", c.target, n, c.rows, c.want, c.lack, body)
		}
	}
}

func TestAQueryIsReadStrictly(t *testing.T) {
	p := newPage(t, apitest.New(t), nil)
	for _, q := range []string{"page=0", "page=x", "page=1&page=2", "repo=%zz", "repo=%ff", "all=1", "repo=" + strings.Repeat("a", 256)} {
		err := p.Serve(httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/?"+q, nil), everything)
		if !errors.Is(err, page.ErrRequest) {
			t.Errorf("%s: %v, want ErrRequest", q, err)
		}
	}
}

func TestWhatDidNotChangeIsNotSentAgain(t *testing.T) {
	p := newPage(t, apitest.New(t), nil)
	for _, path := range []string{page.Path, page.StylePath, page.ScriptPath} {
		await(t, p, everything, page.Path, "<p class=\"sum\">None.</p>\n</section>\n\n<section id=\"node\"") // all is known
		first := get(t, p, everything, path)
		again := get(t, p, everything, path, "If-None-Match", first.Header().Get("ETag"))
		if first.Code != http.StatusOK || again.Code != http.StatusNotModified || again.Body.Len() > 0 {
			t.Errorf("%s: %d, then %d with %d bytes, want 304 without any", path, first.Code, again.Code, again.Body.Len())
		}
	}
}

func TestThePageIsSmallAndHasNoScriptInside(t *testing.T) {
	total := 0
	for _, name := range []string{"page.html", "page.css", "page.js"} {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		total += len(b)
		if name == "page.html" && (strings.Contains(string(b), "<style") || strings.Count(string(b), "<script") != strings.Count(string(b), `<script src=`)) {
			t.Error("page.html has a style or a script inside")
		}
	}
	if total > 50<<10 {
		t.Errorf("the page has %d bytes, want at most 50 KiB", total)
	}
}

func TestACloseEndsWhatRuns(t *testing.T) {
	w := apitest.New(t)
	w.Publish(t, "a/x:1", 3, 1)
	p := newPage(t, w, nil)
	get(t, p, everything, "/")
	p.Close()
	get(t, p, everything, "/") // answers, and starts nothing
}

// BenchmarkPage is a page of 2 000 names whose bucket was listed.
func BenchmarkPage(b *testing.B) {
	w := apitest.New(b)
	img := w.Publish(b, "a/x:1", 3, 1)
	for i := range 2000 {
		setName(b, w, fmt.Sprintf("r%d/x", i%50), fmt.Sprintf("%04d", i), img.Source)
	}
	p := newPage(b, w, func(c *page.Config) { c.Metrics = prometheus.NewRegistry() })
	await(b, p, everything, "/", "Packs", "ready")
	for b.Loop() {
		get(b, p, everything, "/")
	}
}
