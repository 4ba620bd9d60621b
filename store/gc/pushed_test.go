package gc_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	indexmem "quarry/chunkindex/mem"
	"quarry/store/bucket/mem"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/gc"
	"quarry/store/packed"
	"quarry/store/registry"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// push pushes content as a blob of repository a.
func push(t *testing.T, s *registry.Store, content string) v1.Descriptor {
	t.Helper()
	id, err := s.StartUpload("a", "")
	must(t, err)
	d, size := digest.FromString(content), int64(len(content))
	must(t, s.FinishUpload(t.Context(), "a", id, registry.Part{Body: strings.NewReader(content), At: -1, Size: size}, d))
	return v1.Descriptor{MediaType: v1.MediaTypeImageLayer, Digest: d, Size: size}
}

// Whatever a collection does meanwhile, a manifest without a tag, as an index's child is
// before the index, stays once its push was acknowledged, and so does its layer.
func TestWhatIsPushedMeanwhileStays(t *testing.T) {
	ctx, b := t.Context(), mem.New()
	var since time.Duration // no step takes a moment only
	now := func() time.Time { return time.Unix(1e9, 0).Add(since) }
	cat, err := catalog.Open(ctx, catalog.Config{Journal: b})
	must(t, err)
	store, err := packed.Open(ctx, packed.Config{Bucket: b, Catalog: cat, Index: indexmem.New(), TmpDir: t.TempDir(), Workers: 1})
	must(t, err)
	reg, err := registry.Open(registry.Config{Bucket: b, Names: cat, Dir: t.TempDir(), Now: now})
	must(t, err)
	defer reg.Close()
	stored := func(context.Context) (sources []chunk.Digest, err error) {
		for obj, err := range b.List(ctx, registry.ReposPrefix) {
			if err != nil {
				return nil, err
			}
			if _, hex, ok := strings.Cut(obj.Key, "/_manifests/sha256/"); ok {
				d, err := chunk.ParseHex(hex)
				must(t, err)
				sources = append(sources, d)
			}
		}
		return sources, nil
	}
	c := gc.New(gc.Config{
		Bucket: b, Catalog: cat, Store: store, Gate: gc.NewGate(), Pushed: reg.Collect, Told: reg.Told, Stored: stored,
		Leases: func(context.Context, bool) ([]gc.Lease, error) { return nil, nil },
		Now:    now, Since: func() time.Duration { return since },
	})

	pushed := map[string]digest.Digest{}
	step := func(name string) {
		since += time.Minute
		defer func() { since += time.Minute }()
		layer := push(t, reg, "layer of "+name)
		body, err := json.Marshal(v1.Manifest{
			Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest,
			Config: push(t, reg, "config of "+name), Layers: []v1.Descriptor{layer},
		})
		must(t, err)
		m, err := reg.PutManifest(ctx, registry.PutRequest{Repo: "a", MediaType: v1.MediaTypeImageManifest, Body: body})
		must(t, err)
		pushed[fmt.Sprintf("manifest pushed at %q", name)] = m.Digest
	}
	if _, err := c.Run(ctx, gc.Options{Limits: &gc.Limits{Push: time.Nanosecond}, Step: step}); err != nil {
		t.Fatal(err)
	}
	if len(pushed) < 5 {
		t.Errorf("it had %d steps", len(pushed))
	}
	for what, d := range pushed {
		m, err := reg.StatManifest(ctx, "a", d)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		body, err := reg.ReadManifest(ctx, m)
		must(t, err)
		doc, err := registry.ParseManifest(m.MediaType, body)
		must(t, err)
		for _, l := range doc.Blobs {
			if _, err := reg.Blob(ctx, "a", l.Digest); err != nil {
				t.Errorf("%s: %v", what, err)
			}
		}
	}
}
