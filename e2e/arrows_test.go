package e2e_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	ocilayout "github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"quarry/api"
	"quarry/api/client"
	"quarry/e2e/lab"
	"quarry/internal/testimage"
	"quarry/store/bucket/s3/s3test"
	"quarry/store/image"
	"quarry/store/jobs"
)

// stopper stands between a node and its bucket and can stop the node behind any change
// that it makes: the change is made, its answer never comes, and no request after it is
// answered or does anything. Whoever kills the node then has killed it at that arrow of
// the order of writes.
type stopper struct {
	next http.Handler

	mu      sync.Mutex               // guards what follows
	want    func(change string) bool // stop behind this one
	stopped bool
	behind  string
	reached chan struct{} // closed when the change is made
}

// kept are objects whose changes are no steps of a push or of a collection: the mark of
// the writer, its probe, and leases.
var kept = []string{"run/", "tmp/", "leases/"}

// entryType finds the type of a journal entry.
var entryType = regexp.MustCompile(`"type":"([a-z_]+)"`)

// changeOf says what a request changes; "" for nothing that counts.
func changeOf(r *http.Request) string {
	op := s3test.Op(r)
	_, key, _ := strings.Cut(strings.Trim(r.URL.Path, "/"), "/")
	if op != "PutObject" && op != "CompleteUpload" && op != "DeleteObject" ||
		slices.ContainsFunc(kept, func(p string) bool { return strings.HasPrefix(key, p) }) {
		return ""
	}
	kind, rest, _ := strings.Cut(key, "/")
	switch kind {
	case "oci":
		kind, _, _ = strings.Cut(rest, "/")
		for _, part := range []string{"/_blobs/", "/_manifests/"} {
			if strings.Contains(rest, part) {
				kind = strings.Trim(part, "/")
			}
		}
		kind = "oci " + kind
	case "images":
		if strings.Contains(rest, "/sigs/") {
			kind = "sigs"
		}
	case "log":
		body, _ := io.ReadAll(r.Body)
		r.Body = io.NopCloser(bytes.NewReader(body))
		if m := entryType.FindSubmatch(body); m != nil {
			kind += " " + string(m[1])
		}
	}
	return strings.TrimSuffix(op, "Object") + " " + kind
}

// stopBehind stops the node behind the first change for which want is true; nil lets it
// go on for good.
func (s *stopper) stopBehind(want func(change string) bool) (reached <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.want, s.stopped, s.behind, s.reached = want, false, "", make(chan struct{})
	return s.reached
}

// take says whether a request is answered, or is the last that is made.
func (s *stopper) take(change string) (answer, last bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return false, false
	}
	if change == "" || s.want == nil || !s.want(change) {
		return true, false
	}
	s.stopped, s.behind = true, change
	return false, true
}

// arrows are those behind which nodes were killed, each once.
type arrows struct {
	each string   // a kind of change of which the second is another arrow than the first
	done []string // in the order in which they came
}

// next returns a rule that stops at the first arrow that is new.
func (a *arrows) next() func(string) bool {
	nth := map[string]int{}
	return func(change string) bool {
		nth[change]++
		if change == a.each && nth[change] > 1 {
			change = fmt.Sprintf("%s (%d)", change, nth[change])
		}
		if slices.Contains(a.done, change) {
			return false
		}
		a.done = append(a.done, change)
		return true
	}
}

// want fails when the changes are not those that the order of writes has.
func (a *arrows) want(t *testing.T, want ...string) {
	t.Helper()
	t.Logf("killed behind %d changes: %s", len(a.done), strings.Join(a.done, ", "))
	for _, w := range want {
		if !slices.Contains(a.done, w) {
			t.Errorf("nothing was killed behind %s", w)
		}
	}
}

// ServeHTTP implements http.Handler.
func (s *stopper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	answer, last := s.take(changeOf(r))
	if answer {
		s.next.ServeHTTP(w, r)
		return
	}
	if last {
		s.next.ServeHTTP(httptest.NewRecorder(), r)
		close(s.reached)
	}
	io.Copy(io.Discard, r.Body) // the server sees only then that the client has gone
	<-r.Context().Done()
}

func (s *stopper) where() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.behind
}

// fragile is a store node that is killed and started again, over a bucket that stays.
type fragile struct {
	*lab.Lab
	t       *testing.T
	stop    *stopper
	data    string
	bucket  string // its URL
	objects string // the folder in which the S3 server has it
	server  *lab.Server
	local   *client.Client               // by the data folder's socket
	files   map[string]map[string]string // content of each image that was made
}

func newFragile(t *testing.T) *fragile {
	t.Helper()
	s3 := s3test.New(t)
	f := &fragile{Lab: newLab(t), t: t, files: map[string]map[string]string{}}
	target, err := url.Parse(s3.URL)
	if err != nil {
		t.Fatal(err)
	}
	f.stop = &stopper{next: &httputil.ReverseProxy{
		Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64},
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Host = r.In.Host // which is signed
		},
	}}
	front := httptest.NewServer(f.stop)
	t.Cleanup(func() { front.CloseClientConnections(); front.Close() })
	name := s3.Bucket(t)
	f.objects = s3.Folder(name)
	f.bucket = fmt.Sprintf("s3://%s?endpoint=%s", name, url.QueryEscape(front.URL))
	f.data = f.Path("d")
	if f.local, err = client.New(client.Config{Socket: filepath.Join(f.data, "run", "quarry.sock"), Attempts: 1}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.local.Close)
	f.start()
	return f
}

func (f *fragile) start() {
	f.t.Helper()
	f.stop.stopBehind(nil)
	var err error
	f.server, err = f.Serve(context.WithoutCancel(f.t.Context()), f.data, "--no-auth", "--bucket", f.bucket)
	if err != nil {
		f.t.Fatal(err)
	}
}

// sound wants check to find nothing, and every name that was acknowledged.
func (f *fragile) sound(when string, names []string) {
	f.t.Helper()
	sum, err := f.local.Check(f.t.Context(), api.CheckRequest{}, func(p api.Problem) {
		if !p.Note {
			f.t.Errorf("%s: check: %s: %s: %s", when, p.Kind, p.Object, p.Message)
		}
	})
	if err != nil || sum.Problems > 0 {
		f.t.Fatalf("%s: check: %d problems, %v", when, sum.Problems, err)
	}
	known, err := f.local.Names(f.t.Context())
	if err != nil {
		f.t.Fatal(err)
	}
	for _, n := range names {
		if !slices.ContainsFunc(known, func(k api.NameInfo) bool { return k.Repo+":"+k.Tag == n }) {
			f.t.Fatalf("%s: %s was acknowledged and is gone", when, n)
		}
	}
}

// make makes a new image: one file of its own, and one that it shares with the other
// image of its pair.
func (f *fragile) make() (string, v1.Image) {
	f.t.Helper()
	n := len(f.files)
	file := func(seed int) string {
		p := make([]byte, 40_000)
		rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(p)
		return string(p)
	}
	files := map[string]string{"own": file(2 * n), "shared": file(2*(n/2) + 1)}
	l := testimage.Build(f.t, testimage.Layer{Entries: []testimage.Entry{
		testimage.File("own", files["own"]), testimage.File("shared", files["shared"]),
	}})
	tag := fmt.Sprintf("t/image%d:latest", n)
	f.files[tag] = files
	index, err := ocilayout.ImageIndexFromPath(l.Dir)
	if err != nil {
		f.t.Fatal(err)
	}
	m, err := index.IndexManifest()
	if err != nil {
		f.t.Fatal(err)
	}
	im, err := index.Image(m.Manifests[0].Digest)
	if err != nil {
		f.t.Fatal(err)
	}
	return tag, im
}

// push pushes once, as any client does. A nil error is the store's acknowledgement.
func (f *fragile) push(ctx context.Context, tag string, im v1.Image) error {
	ref, err := name.ParseReference(f.server.Addr()+"/"+tag, name.Insecure)
	if err != nil {
		return err
	}
	return remote.Write(ref, im, remote.WithContext(ctx), remote.WithRetryBackoff(remote.Backoff{Steps: 1}))
}

// ready waits until the image of a name that was pushed is converted.
func (f *fragile) ready(ctx context.Context, tag string) error {
	ref, err := image.ParseName(tag)
	if err != nil {
		return err
	}
	for {
		_, err := f.local.Image(ctx, ref, image.HostPlatform())
		var known *api.Error
		if err == nil || !errors.As(err, &known) || known.Code != "pending" && known.Code != "converting" {
			return err
		}
		all, err := f.local.Jobs(ctx, jobs.Filter{Repo: ref.Repo})
		if err != nil {
			return err
		}
		for _, j := range all {
			if _, err := f.local.FollowJob(ctx, j.ID, func(api.Job) {}); err != nil {
				return err
			}
		}
	}
}

// atArrow does something until the node is stopped behind a change that is new, and
// says which; "" when it makes none. The node was killed and started again then.
func (f *fragile) atArrow(a *arrows, do func(context.Context) error) (behind string, err error) {
	f.t.Helper()
	reached := f.stop.stopBehind(a.next())
	ctx, cancel := context.WithCancel(f.t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- do(ctx) }() // ends when the node is killed at the latest
	select {
	case err := <-ended:
		f.stop.stopBehind(nil)
		return "", err
	case <-reached:
	}
	behind = f.stop.where()
	if err := f.server.Kill(); err != nil {
		f.t.Fatal(err)
	}
	cancel()
	err = <-ended
	f.start()
	return behind, err
}

// same wants every image to have the files that were pushed.
func (f *fragile) same(names []string) {
	f.t.Helper()
	for _, n := range names {
		out, err := f.Quarry(f.t.Context(), "export", "--data", f.data, n)
		if err != nil {
			f.t.Fatal(err)
		}
		got := map[string]string{}
		r := tar.NewReader(strings.NewReader(out))
		for h, err := r.Next(); err != io.EOF; h, err = r.Next() {
			if err != nil {
				f.t.Fatal(err)
			}
			if p, err := io.ReadAll(r); err != nil {
				f.t.Fatal(err)
			} else if h.Typeflag == tar.TypeReg {
				got[strings.TrimPrefix(h.Name, "./")] = string(p)
			}
		}
		if !maps.Equal(got, f.files[n]) {
			f.t.Errorf("%s has other files than were pushed", n)
		}
	}
}

const (
	// fewImages are kept, so that checks are short.
	fewImages = 3
)

// TestKilledAtEveryArrow kills a node with -9 behind each change that a push, the
// conversion it starts, and a collection make in the bucket. What was acknowledged
// before is there afterwards, whole, without anybody doing anything.
func TestKilledAtEveryArrow(t *testing.T) {
	f := newFragile(t)
	var names []string
	all := arrows{each: "Put jobs"}
	for more := true; more; {
		tag, im := f.make()
		acknowledged := false
		behind, err := f.atArrow(&all, func(ctx context.Context) error {
			if err := f.push(ctx, tag, im); err != nil {
				return err
			}
			acknowledged = true
			return f.ready(ctx, tag)
		})
		when := "a push, killed behind " + behind
		if more = behind != ""; !more && err != nil {
			t.Fatal(err)
		}
		if acknowledged {
			names = append(names, tag)
		}
		f.sound(when, names)
		if !acknowledged {
			if err := f.push(t.Context(), tag, im); err != nil {
				t.Fatalf("%s: pushed again: %v", when, err)
			}
			names = append(names, tag)
		}
		if err := f.ready(t.Context(), tag); err != nil {
			t.Fatalf("%s: %v", when, err)
		}
		if len(names) > fewImages {
			f.same(names)
			f.remove(names[:fewImages])
			names = names[fewImages:]
			if err := f.collect(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	all.want(t, "Put oci blobs", "Put oci _blobs", "Put oci _manifests", "Put log name", "Put jobs", "Put jobs (2)", "Put jobs (3)", "Put packs", "Put log pack_added",
		"Put layers", "Put bootstraps", "Put configs", "Put blobs", "Put images", "Put sigs")
	f.same(names)
	f.collectAtEveryArrow(names)
}

// collectAtEveryArrow is the same for collections. In each, the one image of a pair goes,
// whose pack has what the other needs, and all of an older pair's other.
func (f *fragile) collectAtEveryArrow(names []string) {
	var all arrows
	if len(f.files)%2 == 1 {
		names = append(names, f.pushed())
	}
	for more := true; more; {
		first, second := f.pushed(), f.pushed()
		f.remove([]string{first})
		behind, err := f.atArrow(&all, f.collect)
		if more = behind != ""; !more && err != nil {
			f.t.Fatal(err)
		}
		f.sound("a collection, killed behind "+behind, append(names[:len(names):len(names)], second))
		f.same([]string{second})
		f.remove([]string{second})
	}
	all.want(f.t, "Put log pack_condemned", "Put packs", "Put log pack_added", "Put log image_deleted", "Delete images", "Delete bootstraps",
		"Delete configs", "Delete blobs", "Put log pack_retired", "Put log pack_deleted", "Delete packs", "Delete layers")
	f.same(names)
}

// pushed pushes a new image and waits for it.
func (f *fragile) pushed() string {
	f.t.Helper()
	tag, im := f.make()
	err := f.push(f.t.Context(), tag, im)
	if err == nil {
		err = f.ready(f.t.Context(), tag)
	}
	if err != nil {
		f.t.Fatal(err)
	}
	return tag
}

func (f *fragile) remove(names []string) {
	f.t.Helper()
	for _, n := range names {
		ref, err := image.ParseName(n)
		if err == nil {
			err = f.local.DeleteName(f.t.Context(), ref)
		}
		if err != nil {
			f.t.Fatal(err)
		}
	}
}

func (f *fragile) collect(ctx context.Context) error {
	var report any
	return f.local.GC(ctx, api.GCRequest{Retain: "0s", Grace: "0s", Ratio: 1}, &report, nil)
}
