package e2e_test

import (
	"archive/tar"
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
	"slices"
	"strings"
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

// fragile is a store node that is killed and started again, over a bucket that stays.
type fragile struct {
	*lab.Lab
	t       *testing.T
	data    string
	flags   []string // of serve
	server  *lab.Server
	local   *client.Client               // by the data folder's socket
	files   map[string]map[string]string // content of each image that was made
	layouts map[string]string            // where its OCI layout is
}

// newFragile starts a node on the data folder; without flags its bucket is there too.
func newFragile(t *testing.T, l *lab.Lab, data string, flags ...string) *fragile {
	t.Helper()
	f := &fragile{Lab: l, t: t, files: map[string]map[string]string{}, layouts: map[string]string{}, data: data, flags: append([]string{"--no-auth"}, flags...)}
	var err error
	if f.local, err = client.New(client.Config{Socket: filepath.Join(f.data, "run", "quarry.sock"), Attempts: 1}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(f.local.Close)
	f.start()
	return f
}

// newRemote starts a node over an S3 server, with a stopper between them.
func newRemote(t *testing.T) (*fragile, *stopper, *s3test.Server) {
	t.Helper()
	s3 := s3test.New(t)
	target, err := url.Parse(s3.URL)
	if err != nil {
		t.Fatal(err)
	}
	stop := &stopper{next: &httputil.ReverseProxy{
		Transport: &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: 64},
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			r.Out.Host = r.In.Host // which is signed
		},
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
	}}
	front := httptest.NewServer(stop)
	t.Cleanup(func() { front.CloseClientConnections(); front.Close() })
	l := newLab(t)
	bucket := fmt.Sprintf("s3://%s?endpoint=%s", s3.Bucket(t), url.QueryEscape(front.URL))
	return newFragile(t, l, l.Path("d"), "--bucket", bucket), stop, s3
}

func (f *fragile) start() {
	f.t.Helper()
	var err error
	f.server, err = f.Serve(context.WithoutCancel(f.t.Context()), f.data, f.flags...)
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

// random is content that compresses badly, the same for one seed.
func random(seed, size int) string {
	p := make([]byte, size)
	rand.NewChaCha8([32]byte{byte(seed), byte(seed >> 8)}).Read(p)
	return string(p)
}

// smallFile is the size of the files that make makes.
const smallFile = 40_000

// make makes a new image: one file of its own, and one that it shares with the other
// image of its pair.
func (f *fragile) make() (string, v1.Image) {
	f.t.Helper()
	n := len(f.files)
	tag := fmt.Sprintf("t/image%d:latest", n)
	return tag, f.makeOf(tag, map[string]string{"own": random(2*n, smallFile), "shared": random(2*(n/2)+1, smallFile)})
}

// makeOf makes an image of these files, which is to be pushed under a name.
func (f *fragile) makeOf(tag string, files map[string]string) v1.Image {
	f.t.Helper()
	f.files[tag] = files
	var layer testimage.Layer
	for _, name := range slices.Sorted(maps.Keys(files)) {
		layer.Entries = append(layer.Entries, testimage.File(name, files[name]))
	}
	l := testimage.Build(f.t, layer)
	f.layouts[tag] = l.Dir
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
	return im
}

// push pushes once, as any client does. A nil error is the store's acknowledgement.
func (f *fragile) push(ctx context.Context, tag string, im v1.Image) error {
	ref, err := name.ParseReference(f.server.Addr()+"/"+tag, name.Insecure)
	if err != nil {
		return err
	}
	return remote.Write(ref, im, remote.WithContext(ctx), remote.WithRetryBackoff(remote.Backoff{Steps: 1}))
}

// ready waits until the image of a name that was pushed is converted and signed.
func (f *fragile) ready(ctx context.Context, tag string) error {
	ref, err := image.ParseName(tag)
	if err != nil {
		return err
	}
	for {
		_, err := f.local.Image(ctx, ref, image.HostPlatform())
		var known *api.Error
		if err == nil || !errors.As(err, &known) || !slices.Contains([]string{"pending", "converting", "unsigned"}, known.Code) {
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

// collect collects what nobody needs at this moment. Pushes go on beside it, so what
// they were told of stays.
func (f *fragile) collect(ctx context.Context, pushGrace string) error {
	var report any
	return f.local.GC(ctx, api.GCRequest{Retain: "0s", Grace: "0s", PushGrace: pushGrace, Ratio: 1}, &report, nil)
}

// collectAll is collect while nobody pushes.
func (f *fragile) collectAll(ctx context.Context) error { return f.collect(ctx, "0s") }
