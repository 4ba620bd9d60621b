package folder_test

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/api/apitest"
	"quarry/api/client"
	"quarry/internal/need"
	"quarry/signer"
	"quarry/store/chunk"
	"quarry/store/image"
	"quarry/worker/folder"
)

// node is a store node and a worker that fetches from it over HTTP.
type node struct {
	*apitest.World
	*client.Client
	images *folder.Images
}

func newNode(t *testing.T) *node {
	t.Helper()
	w := apitest.New(t)
	srv, _ := w.Serve(t, nil)
	c, err := client.New(client.Config{URL: srv.URL, Backoff: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	d, err := folder.Open(shortDir(t))
	if err != nil {
		t.Fatal(err)
	}
	return &node{World: w, Client: c, images: &folder.Images{
		Dir: d, Source: c, Origin: folder.Origin{Stores: []string{srv.URL}},
		Trust: signer.NewTrust(w.Key.Public()), Log: slog.New(slog.DiscardHandler),
	}}
}

// shortDir returns the path of a folder that does not exist yet, short enough
// for the sockets in it.
func shortDir(t *testing.T) string {
	t.Helper()
	return filepath.Join(need.ShortDir(t), "w")
}

// fetch fetches ref and returns the requests and bytes received that it took.
func (n *node) fetch(t *testing.T, ref image.Ref, want *apitest.Image) (requests, received uint64) {
	t.Helper()
	before := n.Stats()
	im, err := n.images.Fetch(t.Context(), ref, image.HostPlatform())
	if err != nil {
		t.Fatal(err)
	}
	if string(im.Bootstrap) != string(want.Bootstrap) || string(im.Config) != string(want.Config) {
		t.Errorf("%s is another image than the one published", ref)
	}
	after := n.Stats()
	return after.Requests - before.Requests, after.BytesIn - before.BytesIn
}

// small is what the answer of a warm start fits: two envelopes and headers.
const small = 4096

func TestAFetchIsOneRequest(t *testing.T) {
	n := newNode(t)
	first := n.Publish(t, "team/task:v1", 300, 1)
	if r, _ := n.fetch(t, first.Ref, first); r != 1 {
		t.Errorf("cold: %d requests, want 1", r)
	}
	for range 2 {
		if r, b := n.fetch(t, first.Ref, first); r != 1 || b > small {
			t.Errorf("warm: %d requests and %d bytes, want 1 and at most %d", r, b, small)
		}
	}
	pinned := image.Ref{Repo: first.Ref.Repo, Digest: &first.Source}
	for _, most := range []uint64{1 << 20, small} {
		if r, b := n.fetch(t, pinned, first); r != 1 || b > most {
			t.Errorf("pinned: %d requests and %d bytes, want 1 and at most %d", r, b, most)
		}
	}
	second := n.Publish(t, "team/task:v1", 300, 2)
	for _, most := range []uint64{1 << 20, small} {
		if r, b := n.fetch(t, second.Ref, second); r != 1 || b > most {
			t.Errorf("after the tag moved: %d requests and %d bytes, want 1 and at most %d", r, b, most)
		}
	}
}

func TestADamagedCopyOrListIsHealedInOneRequest(t *testing.T) {
	n := newNode(t)
	img := n.Publish(t, "team/task:v1", 300, 1)
	n.fetch(t, img.Ref, img)
	root := n.images.Dir.Path()
	boots, err := filepath.Glob(filepath.Join(root, "images", "*", "bootstrap"))
	if err != nil || len(boots) != 1 {
		t.Fatalf("bootstraps %v, error %v", boots, err)
	}
	list := filepath.Join(root, "latest.json")
	for what, damage := range map[string]func() error{
		"a short bootstrap":  func() error { return os.Truncate(boots[0], 4096) },
		"no bootstrap":       func() error { return os.Remove(boots[0]) },
		"an empty statement": func() error { return os.Truncate(filepath.Join(filepath.Dir(boots[0]), "statement"), 0) },
		"an empty origin":    func() error { return os.Truncate(filepath.Join(filepath.Dir(boots[0]), "origin.json"), 0) },
		"no list":            func() error { return os.Remove(list) },
		"a list cut off":     func() error { return os.Truncate(list, 10) },
		"a huge list":        func() error { return os.Truncate(list, 1<<30) },
		"a list of another": func() error {
			raw, err := os.ReadFile(list)
			if err != nil {
				return err
			}
			at := strings.Index(string(raw), "sha256:") + len("sha256:")
			copy(raw[at:], strings.Repeat("0", 64))
			return os.WriteFile(list, raw, 0o600)
		},
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		if r, _ := n.fetch(t, img.Ref, img); r != 1 {
			t.Errorf("%s: %d requests, want 1", what, r)
		}
		if o, err := n.images.Dir.Origin(n.ID(t, img)); err != nil || len(o.Stores) != 1 {
			t.Errorf("after %s: origin %+v, %v", what, o, err)
		}
		if r, b := n.fetch(t, img.Ref, img); r != 1 || b > small {
			t.Errorf("after %s: %d requests and %d bytes, want 1 and at most %d", what, r, b, small)
		}
	}
}

func TestTheListOfImagesIsBounded(t *testing.T) {
	n := newNode(t)
	img := n.Publish(t, "team/task:v1", 1, 1)
	var list strings.Builder
	for i := range 1024 {
		if i > 0 {
			list.WriteByte(',')
		}
		list.WriteString(`{"ref":"a:b","platform":"plan9/mips","image":"` + img.Source.String() + `"}`)
	}
	path := filepath.Join(n.images.Dir.Path(), "latest.json")
	if err := os.WriteFile(path, []byte("["+list.String()+"]"), 0o600); err != nil {
		t.Fatal(err)
	}
	n.fetch(t, img.Ref, img)
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(raw), `"ref"`); got != 1024 || !strings.Contains(string(raw), img.Ref.String()) {
		t.Errorf("got %d entries, want 1024 with %s", got, img.Ref)
	}
}

// startRest is a source that says more than was asked for.
type startRest struct {
	folder.Source
	rest io.ReadCloser
}

func (s startRest) Start(ctx context.Context, ref image.Ref, p image.Platform, have *chunk.Digest, prefetch bool,
	verify func(name, statement []byte) (*image.Verified, error)) (config, bootstrap []byte, rest io.ReadCloser, err error) {
	config, bootstrap, _, err = s.Source.Start(ctx, ref, p, have, false, verify)
	return config, bootstrap, s.rest, err
}

// closes counts.
type closes struct {
	io.Reader
	n int
}

func (c *closes) Close() error { c.n++; return nil }

// Once kept has the rest of an answer it is kept's to close, whatever fails after.
func TestTheRestOfAnAnswerIsClosedOnce(t *testing.T) {
	n := newNode(t)
	img := n.Publish(t, "team/task:v1", 3, 1)
	rest := &closes{}
	n.images.Source = startRest{n.Client, rest}
	lock := filepath.Join(n.images.Dir.Path(), "latest.lock")
	if err := os.Mkdir(lock, 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := n.images.FetchStart(t.Context(), img.Ref, image.HostPlatform(), true, func(_ chunk.Digest, rest io.ReadCloser) { rest.Close() })
	if err == nil || rest.n != 1 {
		t.Errorf("after kept: closed %d times, want once; error %v", rest.n, err)
	}
	images := filepath.Join(n.images.Dir.Path(), "images")
	if err := errors.Join(os.RemoveAll(images), os.WriteFile(images, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	_, err = n.images.FetchStart(t.Context(), img.Ref, image.HostPlatform(), true, func(chunk.Digest, io.ReadCloser) { t.Error("kept is called for what is not") })
	if err == nil || rest.n != 2 {
		t.Errorf("before kept: closed %d times, want once; error %v", rest.n-1, err)
	}
}
