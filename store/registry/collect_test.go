package registry_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"quarry/store/bucket/buckettest"
	"quarry/store/chunk"
	"quarry/store/registry"
)

// collected is a registry of which garbage is collected, hours after all else.
type collected struct {
	*lab
	now      time.Time
	need     map[digest.Digest]registry.Need
	sources  []chunk.Digest
	dry      bool
	deleted  int
	spared   []chunk.Digest
	problems []string
}

func newCollected(t *testing.T) *collected {
	t.Helper()
	c := &collected{now: time.Unix(1e9, 0), need: map[digest.Digest]registry.Need{}}
	c.lab = newLab(t, func(cfg *registry.Config) { cfg.Now = func() time.Time { return c.now } })
	return c
}

func source(t *testing.T, d digest.Digest) chunk.Digest {
	t.Helper()
	c, err := chunk.Parse(d.String())
	must(t, err)
	return c
}

// collect collects and returns what is left of content and records, without what the
// keys have in common.
func (c *collected) collect(t *testing.T) []string {
	t.Helper()
	c.deleted, c.spared, c.problems = 0, nil, nil
	must(t, c.Collect(t.Context(), registry.Collect{
		Need:    func(s chunk.Digest) registry.Need { return c.need[digest.Digest(s.String())] },
		Sources: c.sources, Grace: time.Hour, DryRun: c.dry,
		Deleted: func(int64) { c.deleted++ },
		Spared:  func(s chunk.Digest) { c.spared = append(c.spared, s) },
		Problem: func(text string) { c.problems = append(c.problems, text) },
	}))
	return buckettest.Keys(t, c.bucket, "oci/")
}

// later lets all promises to clients run out.
func (c *collected) later() { c.now = c.now.Add(2 * time.Hour) }

// keys are those of blobs of a repository and of manifests, with their content.
func keys(repo string, blobs, manifests []digest.Digest) []string {
	set := map[string]bool{}
	for _, d := range blobs {
		set[registry.BlobKey(repo, d)], set[registry.ContentKey(d)] = true, true
	}
	for _, d := range manifests {
		set[registry.ManifestKey(repo, d)], set[registry.ContentKey(d)] = true, true
	}
	return slices.Sorted(maps.Keys(set))
}

func wantKeys(t *testing.T, what string, got []string, want ...[]string) {
	t.Helper()
	all := slices.Concat(want...)
	slices.Sort(all)
	if all = slices.Compact(all); !slices.Equal(got, all) {
		t.Errorf("%s: left are\n%s\nwant\n%s", what, strings.Join(got, "\n"), strings.Join(all, "\n"))
	}
}

func ds(content ...string) []digest.Digest {
	var out []digest.Digest
	for _, s := range content {
		out = append(out, digest.FromString(s))
	}
	return out
}

func TestWhatNobodyNeedsIsCollected(t *testing.T) {
	c := newCollected(t)
	kept := c.put(t, "a", c.image(t, "a", "shared", "kept"), "v1")
	aged := c.put(t, "a", c.image(t, "a", "shared", "aged"))
	loose := c.put(t, "b", c.image(t, "b", "aged", "loose"))
	c.push(t, "a", []byte("never named"))
	c.push(t, "b", []byte("deleted"))
	must(t, c.DeleteBlob(t.Context(), "b", digest.FromString("deleted")))
	c.need[kept], c.need[aged] = registry.Firm, registry.Aged
	before := buckettest.Keys(t, c.bucket, "oci/")

	wantKeys(t, "all was just pushed", c.collect(t), before)
	if want := []chunk.Digest{source(t, aged)}; !slices.Equal(c.spared, want) {
		t.Errorf("spared are %v, want %v", c.spared, want)
	}
	c.later()
	c.dry = true
	wantKeys(t, "dry", c.collect(t), before)
	foreseen := c.deleted
	c.dry = false
	wantKeys(t, "later", c.collect(t),
		keys("a", ds("{}", "shared", "kept"), []digest.Digest{kept}),
		keys("b", ds("{}", "aged", "loose"), []digest.Digest{loose}))
	if c.deleted != foreseen || len(before)-c.deleted != len(buckettest.Keys(t, c.bucket, "oci/")) {
		t.Errorf("%d deleted, %d foreseen, of %d objects", c.deleted, foreseen, len(before))
	}
	if _, err := c.StatManifest(t.Context(), "a", kept); err != nil {
		t.Error(err)
	}
}

// A promise of a moment ago: the blob that a client was told of stays, and the manifest
// that it asked for, with its image.
func TestWhatAClientWasToldOfStays(t *testing.T) {
	c := newCollected(t)
	aged := c.put(t, "a", c.image(t, "a", "layer"))
	c.push(t, "a", []byte("never named"))
	c.need[aged] = registry.Aged
	before := buckettest.Keys(t, c.bucket, "oci/")
	c.later()
	_, err := c.StatManifest(t.Context(), "a", aged)
	must(t, err)
	_, err = c.Blob(t.Context(), "a", digest.FromString("never named"))
	must(t, err)
	wantKeys(t, "told", c.collect(t), before)
	c.later()
	wantKeys(t, "later", c.collect(t))
}

// A push that has found its blobs, and whose manifest is not listed yet, keeps them
// however long it takes.
func TestAPushUnderWayKeepsItsBlobs(t *testing.T) {
	c := newCollected(t)
	var body []byte
	c.cfg.Bucket = &buckettest.Faulty{Bucket: c.bucket, Before: func(op buckettest.Op) error {
		if op.Method == "Put" && body != nil && op.Key == registry.ContentKey(digest.FromBytes(body)) {
			c.later()
			c.collect(t)
		}
		return nil
	}}
	c.open(t)
	image := c.image(t, "a", "layer")
	c.later()
	body = image
	d := c.put(t, "a", body)
	wantKeys(t, "after it", buckettest.Keys(t, c.bucket, "oci/"), keys("a", ds("{}", "layer"), []digest.Digest{d}))
	body = nil
	c.push(t, "a", []byte("another"))
	c.later()
	wantKeys(t, "when it has ended", c.collect(t), keys("a", ds("{}", "layer"), []digest.Digest{d}))
}

// A tag that was moved to it since it was marked keeps a manifest.
func TestATagSinceTheMarkKeepsAManifest(t *testing.T) {
	c := newCollected(t)
	aged := c.put(t, "a", c.image(t, "a", "layer"), "v1")
	c.need[aged] = registry.Aged
	before := buckettest.Keys(t, c.bucket, "oci/")
	c.later()
	wantKeys(t, "tagged", c.collect(t), before)
}

func index(t *testing.T, c *collected, repo string, children ...digest.Digest) []byte {
	t.Helper()
	ix := v1.Index{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{}}
	for _, d := range children {
		m, err := c.StatManifest(t.Context(), repo, d)
		must(t, err)
		ix.Manifests = append(ix.Manifests, v1.Descriptor{MediaType: m.MediaType, Digest: d, Size: m.Size})
	}
	return encode(t, ix)
}

func signature(t *testing.T, c *collected, repo, content string, subject digest.Digest) []byte {
	t.Helper()
	c.push(t, repo, []byte("{}"))
	c.push(t, repo, []byte(content))
	sub := v1.Descriptor{MediaType: v1.MediaTypeImageManifest, Digest: subject, Size: 1}
	return encode(t, v1.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest, ArtifactType: "test/signature",
		Config: describe("application/vnd.oci.empty.v1+json", []byte("{}")), Layers: []v1.Descriptor{describe("test/signature", []byte(content))},
		Subject: &sub,
	})
}

// What never had a name goes with what it is a part of, or refers to, and stays with it.
func TestPartsGoWithTheWhole(t *testing.T) {
	c := newCollected(t)
	var child [4]digest.Digest
	for i := range child {
		child[i] = c.put(t, "a", c.image(t, "a", fmt.Sprintf("layer %d", i)))
	}
	old := c.put(t, "a", index(t, c, "a", child[0], child[1], child[2]))
	fresh := c.put(t, "a", index(t, c, "a", child[1], child[3]))
	c.put(t, "a", signature(t, c, "a", "of old", old))
	sigFresh := c.put(t, "a", signature(t, c, "a", "of fresh", fresh))
	sigNone := c.put(t, "a", signature(t, c, "a", "of nothing here", digest.FromString("elsewhere")))
	c.need[old], c.need[fresh], c.need[child[2]], c.need[child[3]] = registry.Aged, registry.Firm, registry.Firm, registry.Aged
	c.later()
	left := c.collect(t)
	wantKeys(t, "parts", left,
		keys("a", ds("{}", "layer 1", "layer 2", "layer 3", "of fresh", "of nothing here"), []digest.Digest{child[1], child[2], child[3], fresh, sigFresh, sigNone}),
		[]string{registry.ReferrerKey("a", fresh, sigFresh), registry.ReferrerKey("a", digest.FromString("elsewhere"), sigNone)})
}

// A job reads the content of its source, whatever its repository has by now.
func TestTheContentOfAJobStays(t *testing.T) {
	c := newCollected(t)
	d := c.put(t, "a", c.image(t, "a", "layer"), "v1")
	must(t, c.DeleteManifest(t.Context(), "a", d))
	c.sources = []chunk.Digest{source(t, d), chunk.Sum([]byte("converted from elsewhere"))}
	c.later()
	want := []string{registry.ContentKey(d), registry.ContentKey(digest.FromString("{}")), registry.ContentKey(digest.FromString("layer"))}
	wantKeys(t, "while it runs", c.collect(t), want)
	c.sources = nil
	wantKeys(t, "when it has ended", c.collect(t))
}

// What a damaged manifest needs is not known: its repository is left alone, others are not.
func TestADamagedManifestLeavesItsRepositoryAlone(t *testing.T) {
	for name, damage := range map[string]func(*collected, digest.Digest){
		"flipped": func(c *collected, d digest.Digest) { buckettest.Corrupt(t, c.bucket, registry.ContentKey(d), 5) },
		"gone":    func(c *collected, d digest.Digest) { must(t, c.bucket.Delete(t.Context(), registry.ContentKey(d))) },
		"record":  func(c *collected, d digest.Digest) { buckettest.Corrupt(t, c.bucket, registry.ManifestKey("a", d), 5) },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCollected(t)
			d := c.put(t, "a", c.image(t, "a", "layer"), "v1")
			c.push(t, "a", []byte("unnamed"))
			c.push(t, "b", []byte("nobody's"))
			damage(c, d)
			before := buckettest.Keys(t, c.bucket, "oci/")
			c.later()
			left := c.collect(t)
			if len(before)-len(left) != 2 || len(c.problems) != 1 || !strings.Contains(c.problems[0], "repository a is left alone") {
				t.Errorf("%d of %d objects are left, problems %q", len(left), len(before), c.problems)
			}
		})
	}
}
