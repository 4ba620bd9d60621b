package registry_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"quarry/store/bucket/buckettest"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/registry"
)

const (
	dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	dockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
)

func (l *lab) wantManifest(t *testing.T, repo string, d digest.Digest, want []byte) {
	t.Helper()
	m, got, err := l.manifest(t, repo, d)
	if err != nil || !bytes.Equal(got, want) || m.Size != int64(len(want)) || m.Digest != d {
		t.Errorf("manifest %s: got %+v and %d bytes, %v", d, m, len(got), err)
	}
}

// Bug 58: a tag that moved leaves the old manifest where it is.
func TestAMovedTagOrphansNothing(t *testing.T) {
	var pushed []registry.Pushed
	l := newLab(t, func(c *registry.Config) {
		c.Pushed = func(_ context.Context, p registry.Pushed) error { pushed = append(pushed, p); return nil }
	})
	a, b := l.image(t, "r", "one"), l.image(t, "r", "two", "three")
	da, db := l.put(t, "r", a, "t"), l.put(t, "r", b, "t", "u")
	for tag, want := range map[string]digest.Digest{"t": db, "u": db} {
		if got, err := l.Resolve(t.Context(), "r", tag); err != nil || got != want {
			t.Errorf("%s: got %s, %v, want %s", tag, got, err, want)
		}
		if n, _ := l.catalog.Name("r", tag); n.Source != chunk.Sum(b) {
			t.Errorf("%s: the catalog has source %s, want %s", tag, n.Source, db)
		}
	}
	l.wantManifest(t, "r", da, a)
	l.wantManifest(t, "r", db, b)
	_, _, err := l.manifest(t, "other", da)
	wantErr(t, "in another repository", err, registry.ErrManifestUnknown)
	var got []string
	for _, p := range pushed {
		got = append(got, p.Repo+":"+p.Tag+" "+p.Source.String()+" "+p.MediaType)
	}
	want := []string{"r:t " + da.String(), "r:t " + db.String(), "r:u " + db.String()}
	for i := range want {
		want[i] += " " + v1.MediaTypeImageManifest
	}
	if !slices.Equal(got, want) {
		t.Errorf("told of %q, want %q", got, want)
	}
}

func TestAManifestIsKeptByEachDigestItIsPushedBy(t *testing.T) {
	l := newLab(t, nil)
	body := l.image(t, "r", "layer")
	long := digest.SHA512.FromBytes(body)
	_, err := l.PutManifest(t.Context(), registry.PutRequest{Repo: "r", Body: body, Digest: long, Tags: []string{"t"}})
	must(t, err)
	if got, err := l.Resolve(t.Context(), "r", "t"); err != nil || got != long {
		t.Errorf("pushed by sha512: the tag has %s, %v", got, err)
	}
	short := l.put(t, "r", body, "u")
	for _, tag := range []string{"t", "u"} {
		if got, err := l.Resolve(t.Context(), "r", tag); err != nil || got != short {
			t.Errorf("pushed by tag: %s has %s, %v", tag, got, err)
		}
	}
	l.wantManifest(t, "r", short, body)
	l.wantManifest(t, "r", long, body)
	_, err = l.PutManifest(t.Context(), registry.PutRequest{Repo: "r", Body: append(body, ' '), Digest: long})
	wantErr(t, "by the digest of other bytes", err, registry.ErrDigestInvalid)
	must(t, l.DeleteManifest(t.Context(), "r", short))
	_, err = l.StatManifest(t.Context(), "r", long)
	wantErr(t, "deleted by its other digest", err, registry.ErrManifestUnknown)
	if tags := l.catalog.Tags("r"); len(tags) != 0 {
		t.Errorf("tags of the deleted manifest: %q", tags)
	}
}

// Bugs 49, 82 and 84.
func TestWhichManifestsAreTaken(t *testing.T) {
	l := newLab(t, nil)
	image := l.image(t, "r", "layer")
	child := l.put(t, "r", image)
	elsewhere := l.image(t, "other", "layer of the other")
	l.put(t, "other", elsewhere)
	with := func(change func(m map[string]any)) []byte {
		var m map[string]any
		must(t, json.Unmarshal(image, &m))
		change(m)
		return encode(t, m)
	}
	index := func(mediaType string, children ...v1.Descriptor) []byte {
		return encode(t, v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: mediaType, Manifests: children})
	}
	desc := v1.Descriptor{MediaType: v1.MediaTypeImageManifest, Digest: child, Size: int64(len(image))}
	other := func(change func(*v1.Descriptor)) v1.Descriptor { d := desc; change(&d); return d }
	missing := func(mediaType string) func(map[string]any) {
		return func(m map[string]any) {
			d := describe(mediaType, []byte("never pushed"))
			d.URLs = []string{"http://127.0.0.1:1/x"}
			m["layers"] = []v1.Descriptor{d}
		}
	}
	docker := func(m map[string]any) { m["mediaType"] = dockerManifest }
	for _, test := range []struct {
		name, mediaType string
		body            []byte
		want            error
	}{
		{"an OCI image", v1.MediaTypeImageManifest, image, nil},
		{"a docker image", dockerManifest, with(docker), nil},
		{"an image without a type in it", dockerManifest, with(func(m map[string]any) { delete(m, "mediaType") }), nil},
		{"an image without a type in the request", "", image, nil},
		{"no type at all", "", with(func(m map[string]any) { delete(m, "mediaType") }), registry.ErrManifestInvalid},
		{"another type in the request", v1.MediaTypeImageManifest, with(docker), registry.ErrManifestInvalid},
		{"no layers", v1.MediaTypeImageManifest, with(func(m map[string]any) { m["layers"] = []any{} }), nil},
		{"layers are missing", v1.MediaTypeImageManifest, with(func(m map[string]any) { delete(m, "layers") }), registry.ErrManifestInvalid},
		{"layers and manifests", v1.MediaTypeImageManifest, with(func(m map[string]any) { m["manifests"] = []any{} }), registry.ErrManifestInvalid},
		{"layers twice", v1.MediaTypeImageManifest, []byte(strings.Replace(string(image), `"layers"`, `"layers":[],"layers"`, 1)), registry.ErrManifestInvalid},
		{"layers in another case", v1.MediaTypeImageManifest, with(func(m map[string]any) { m["Layers"] = []any{} }), registry.ErrManifestInvalid},
		{"fields nobody knows", v1.MediaTypeImageManifest, with(func(m map[string]any) { m["x"] = map[string]any{"layers": 1} }), nil},
		{"schema 1", "application/vnd.docker.distribution.manifest.v1+prettyjws", []byte(`{"schemaVersion":1,"name":"r","fsLayers":[]}`), registry.ErrManifestInvalid},
		{"an unknown type", "application/vnd.example+json", with(func(m map[string]any) { delete(m, "mediaType") }), registry.ErrManifestInvalid},
		{"no JSON", v1.MediaTypeImageManifest, []byte("x"), registry.ErrManifestInvalid},
		{"bytes after it", v1.MediaTypeImageManifest, append(slices.Clone(image), "{}"...), registry.ErrManifestInvalid},
		{"a digest of an unknown algorithm", v1.MediaTypeImageManifest, []byte(strings.Replace(string(image), "sha256:", "sha1:", 1)), registry.ErrDigestInvalid},
		{"a layer that is missing", v1.MediaTypeImageManifest, with(missing(v1.MediaTypeImageLayerGzip)), registry.ErrManifestBlobUnknown},
		{"a foreign layer that is missing", v1.MediaTypeImageManifest, with(missing("application/vnd.docker.image.rootfs.foreign.diff.tar.gzip")), nil},
		{"a layer that must not be distributed", v1.MediaTypeImageManifest, with(missing("application/vnd.oci.image.layer.nondistributable.v1.tar+gzip")), nil},
		{"a layer of another size", v1.MediaTypeImageManifest, []byte(strings.Replace(string(image), `"size":5`, `"size":6`, 1)), registry.ErrSizeInvalid},
		{"a subject nobody has", v1.MediaTypeImageManifest, with(func(m map[string]any) { m["subject"] = describe(v1.MediaTypeImageManifest, []byte("gone")) }), nil},
		{"an index", v1.MediaTypeImageIndex, index(v1.MediaTypeImageIndex, desc), nil},
		{"a docker list", dockerList, index(dockerList, desc), nil},
		{"an index of no children", v1.MediaTypeImageIndex, []byte(`{"schemaVersion":2,"manifests":[]}`), nil},
		{"an index before its child", v1.MediaTypeImageIndex, index("", describe(v1.MediaTypeImageManifest, []byte("later"))), registry.ErrManifestBlobUnknown},
		{"a child of another repository", v1.MediaTypeImageIndex, index("", describe(v1.MediaTypeImageManifest, elsewhere)), registry.ErrManifestBlobUnknown},
		{"a child of another size", v1.MediaTypeImageIndex, index("", other(func(d *v1.Descriptor) { d.Size++ })), registry.ErrSizeInvalid},
		{"a child of another type", v1.MediaTypeImageIndex, index("", other(func(d *v1.Descriptor) { d.MediaType = dockerManifest })), registry.ErrManifestInvalid},
		{"too much", v1.MediaTypeImageManifest, make([]byte, registry.MaxManifest+1), registry.ErrTooLarge},
		{"the largest", v1.MediaTypeImageManifest, append(slices.Clone(image), bytes.Repeat([]byte(" "), registry.MaxManifest-len(image))...), nil},
		{"many references", v1.MediaTypeImageManifest, with(func(m map[string]any) {
			m["layers"] = slices.Repeat([]v1.Descriptor{describe(v1.MediaTypeImageLayer, []byte("layer"))}, registry.MaxReferences)
		}), registry.ErrManifestInvalid},
	} {
		t.Run(test.name, func(t *testing.T) {
			before := objects(t, l.bucket, registry.ReposPrefix)
			m, err := l.PutManifest(t.Context(), registry.PutRequest{Repo: "r", MediaType: test.mediaType, Body: test.body})
			wantErr(t, "put", err, test.want)
			if err == nil {
				l.wantManifest(t, "r", m.Digest, test.body)
			} else if after := objects(t, l.bucket, registry.ReposPrefix); after != before {
				t.Errorf("a refused manifest left %d objects", after-before)
			}
		})
	}
}

// Bug 57: whatever fails in the middle, a repeated delete ends it.
func TestADeleteThatFailedHalfWayIsEndedByAnother(t *testing.T) {
	for n := int64(1); ; n++ {
		fault := func(buckettest.Op) error { return nil }
		l := newLab(t, func(c *registry.Config) {
			c.Bucket = &buckettest.Faulty{Bucket: c.Bucket, Before: func(op buckettest.Op) error { return fault(op) }}
		})
		subject := l.image(t, "r", "subject")
		var m v1.Manifest
		must(t, json.Unmarshal(l.image(t, "r", "layer"), &m))
		m.Subject = new(v1.Descriptor)
		*m.Subject = describe(v1.MediaTypeImageManifest, subject)
		body := encode(t, m)
		d := l.put(t, "r", body, "a", "b", "c")
		_, err := l.PutManifest(t.Context(), registry.PutRequest{Repo: "r", Body: body, Digest: digest.SHA512.FromBytes(body)})
		must(t, err)
		fault = buckettest.FailNth(n, "Delete")
		failed := l.DeleteManifest(t.Context(), "r", d)
		if failed != nil {
			wantErr(t, "delete", failed, buckettest.ErrInjected)
			must(t, l.DeleteManifest(t.Context(), "r", d))
		}
		wantErr(t, "once more", l.DeleteManifest(t.Context(), "r", d), registry.ErrManifestUnknown)
		if tags := l.catalog.Tags("r"); len(tags) != 0 {
			t.Errorf("tags that stay: %q", tags)
		}
		if n := objects(t, l.bucket, registry.ManifestsPrefix("r")); n != 0 {
			t.Errorf("%d records stay", n)
		}
		if list, _, err := l.Referrers(t.Context(), "r", m.Subject.Digest, "", ""); err != nil || len(list) != 0 {
			t.Errorf("referrers that stay: %v, %v", list, err)
		}
		l.put(t, "r", body, "a")
		l.wantManifest(t, "r", d, body)
		if failed == nil {
			if n < 4 {
				t.Errorf("only %d deletes were made to fail", n-1)
			}
			return
		}
	}
}

func TestOfManyDeletesOneWins(t *testing.T) {
	l := newLab(t, nil)
	d := l.put(t, "r", l.image(t, "r", "layer"), "a", "b")
	var g errgroup.Group
	won := make(chan bool, 10)
	for range cap(won) {
		g.Go(func() error {
			err := l.DeleteManifest(t.Context(), "r", d)
			won <- err == nil
			if err != nil {
				wantErr(t, "the others", err, registry.ErrManifestUnknown)
			}
			return nil
		})
	}
	must(t, g.Wait())
	close(won)
	winners := 0
	for w := range won {
		if w {
			winners++
		}
	}
	if winners != 1 {
		t.Errorf("%d deletes succeeded, want 1", winners)
	}
	wantErr(t, "of a blob", l.DeleteManifest(t.Context(), "r", digest.FromString("layer")), registry.ErrManifestUnknown)
}

func TestTagsListWhatCanBePulled(t *testing.T) {
	l := newLab(t, nil)
	_, _, err := l.Tags(t.Context(), "r", "", 10)
	wantErr(t, "nothing was pushed", err, registry.ErrNameUnknown)
	body := l.image(t, "r", "layer")
	l.put(t, "r", body, "c", "a", "b")
	must(t, l.catalog.SetName(t.Context(), catalog.Name{Repo: "r", Tag: "converted", Source: chunk.Sum(nil), Serial: 1}))
	for _, test := range []struct {
		last string
		n    int
		want string
		more bool
	}{{"", 10, "[a b c]", false}, {"", 2, "[a b]", true}, {"b", 2, "[c]", false}, {"", 0, "[]", true}, {"c", 1, "[]", false}} {
		got, more, err := l.Tags(t.Context(), "r", test.last, test.n)
		if err != nil || fmt.Sprint(got) != test.want || more != test.more {
			t.Errorf("%d after %q: got %q, %t, %v, want %s", test.n, test.last, got, more, err, test.want)
		}
	}
	must(t, l.DeleteTag(t.Context(), "r", "b"))
	wantErr(t, "a tag that is gone", l.DeleteTag(t.Context(), "r", "b"), registry.ErrManifestUnknown)
	wantErr(t, "a name that was not pushed", l.DeleteTag(t.Context(), "r", "converted"), registry.ErrManifestUnknown)
	l.wantManifest(t, "r", digest.FromBytes(body), body)
}

// Bug 50.
func TestReferrers(t *testing.T) {
	l := newLab(t, nil)
	subject := digest.FromString("need not be there")
	refer := func(artifactType string, i int) digest.Digest {
		var m v1.Manifest
		must(t, json.Unmarshal(l.image(t, "r", "layer"), &m))
		m.ArtifactType = artifactType
		m.Annotations = map[string]string{"n": fmt.Sprint(i), "<&>": "é"}
		m.Subject = &v1.Descriptor{MediaType: v1.MediaTypeImageManifest, Digest: subject, Size: 1}
		return l.put(t, "r", encode(t, m))
	}
	list := func(artifactType string) []v1.Descriptor {
		t.Helper()
		got, next, err := l.Referrers(t.Context(), "r", subject, artifactType, "")
		if err != nil || next != "" {
			t.Errorf("referrers: %v, next %q", err, next)
		}
		return got
	}
	if got := list(""); got == nil || len(got) != 0 {
		t.Errorf("of nothing: got %v, want an empty list", got)
	}
	refer("text/a", 1)
	d := refer("", 2)
	if got := list(""); len(got) != 2 {
		t.Errorf("got %+v, want two", got)
	}
	got := list(v1.MediaTypeImageConfig)
	if len(got) != 1 || got[0].Digest != d || got[0].MediaType != v1.MediaTypeImageManifest || got[0].Size == 0 ||
		got[0].Annotations["n"] != "2" || got[0].Annotations["<&>"] != "é" {
		t.Errorf("by the type of the config: got %+v", got)
	}
	must(t, l.DeleteManifest(t.Context(), "r", d))
	if got := list(""); len(got) != 1 {
		t.Errorf("after a delete: got %+v, want one", got)
	}
	for i := range registry.MaxPage {
		refer("text/b", i)
	}
	seen := map[digest.Digest]bool{}
	pages := 0
	for last := digest.Digest(""); pages == 0 || last != ""; pages++ {
		page, next, err := l.Referrers(t.Context(), "r", subject, "", last)
		must(t, err)
		for _, d := range page {
			seen[d.Digest] = true
		}
		last = next
	}
	if len(seen) != registry.MaxPage+1 || pages != 2 {
		t.Errorf("got %d in %d pages, want %d in 2", len(seen), pages, registry.MaxPage+1)
	}
}

// A process that another has taken the bucket over from acknowledges no manifest, also
// none without a tag: gc of the other one may have deleted what it names.
func TestAFencedPushIsNotAcknowledged(t *testing.T) {
	var fenced error
	l := newLab(t, func(c *registry.Config) { c.Confirm = func(context.Context) error { return fenced } })
	body := l.image(t, "a", "layer")
	fenced = catalog.ErrFenced
	_, err := l.PutManifest(t.Context(), registry.PutRequest{Repo: "a", Body: body, Digest: digest.FromBytes(body)})
	wantErr(t, "by digest", err, catalog.ErrFenced)
	fenced = nil
	l.put(t, "a", body)
}
