package e2e_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"quarry/store/bucket/s3/s3test"
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

// atArrow does something until the node is stopped behind a change that is new, and
// says which; "" when it makes none. The node was killed and started again then.
func (f *fragile) atArrow(stop *stopper, a *arrows, do func(context.Context) error) (behind string, err error) {
	f.t.Helper()
	reached := stop.stopBehind(a.next())
	ctx, cancel := context.WithCancel(f.t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- do(ctx) }() // ends when the node is killed at the latest
	select {
	case err := <-ended:
		stop.stopBehind(nil)
		return "", err
	case <-reached:
	}
	behind = stop.where()
	if err := f.server.Kill(); err != nil {
		f.t.Fatal(err)
	}
	cancel()
	err = <-ended
	stop.stopBehind(nil)
	f.start()
	return behind, err
}

const (
	// fewImages are kept, so that checks are short.
	fewImages = 3
)

// TestKilledAtEveryArrow kills a node with -9 behind each change that a push, the
// conversion it starts, and a collection make in the bucket. What was acknowledged
// before is there afterwards, whole, without anybody doing anything.
func TestKilledAtEveryArrow(t *testing.T) {
	f, stop, s3 := newRemote(t)
	var names []string
	all := arrows{each: "Put jobs"}
	for more := true; more; {
		tag, im := f.make()
		acknowledged := false
		behind, err := f.atArrow(stop, &all, func(ctx context.Context) error {
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
			f.same(names[:1])
			f.remove(names[:fewImages])
			names = names[fewImages:]
			if err := f.collectAll(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	all.want(t, "Put oci blobs", "Put oci _blobs", "Put oci _manifests", "Put log name", "Put jobs", "Put jobs (2)", "Put jobs (3)", "Put packs", "Put log pack_added",
		"Put layers", "Put bootstraps", "Put configs", "Put blobs", "Put images", "Put sigs")
	f.same(names)
	f.collectAtEveryArrow(stop, s3, names)
}

// collectAtEveryArrow is the same for collections. In each, the one image of a pair goes,
// whose pack has what the other needs, and all of an older pair's other.
func (f *fragile) collectAtEveryArrow(stop *stopper, s3 *s3test.Server, names []string) {
	var all arrows
	if len(f.files)%2 == 1 {
		names = append(names, f.pushed())
	}
	for more := true; more; {
		first, second := f.pushed(), f.pushed()
		f.remove([]string{first})
		behind, err := f.atArrow(stop, &all, f.collectAll)
		if more = behind != ""; !more && err != nil {
			f.t.Fatal(err)
		}
		f.sound("a collection, killed behind "+behind, append(names[:len(names):len(names)], second))
		f.readAll(second)
		f.remove([]string{second})
	}
	all.want(f.t, "Put log pack_condemned", "Put packs", "Put log pack_added", "Put log image_deleted", "Delete images", "Delete bootstraps",
		"Delete configs", "Delete blobs", "Put log pack_retired", "Put log pack_deleted", "Delete packs", "Delete layers",
		"Delete oci _manifests", "Delete oci _blobs", "Delete oci blobs")
	f.same(names)
	f.remove(names)
	if err := f.collectAll(f.t.Context()); err != nil {
		f.t.Fatal(err)
	}
	f.nothingLeft(s3)
}

// nothingLeft wants nothing in the bucket that belongs to an image.
func (f *fragile) nothingLeft(s3 *s3test.Server) {
	f.t.Helper()
	err := filepath.WalkDir(s3.Folder("bucket-1"), func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		key, err := filepath.Rel(s3.Folder("bucket-1"), path)
		first, _, _ := strings.Cut(key, "/")
		if !slices.Contains([]string{"log", "run", "jobs", "leases", "store.json"}, first) {
			f.t.Errorf("garbage stays: %s", key)
		}
		return err
	})
	if err != nil {
		f.t.Fatal(err)
	}
}
