package oci_test

import (
	"strings"
	"testing"

	"quarry/internal/testimage"
	"quarry/store/image"
)

const (
	dockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
	dockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	dockerConfig   = "application/vnd.docker.container.image.v1+json"
	dockerLayer    = "application/vnd.docker.image.rootfs.diff.tar.gzip"
)

// schema2 stores an image as docker push writes it.
func schema2(l *testimage.Layout, platform, mark string) testimage.Descriptor {
	y, diffID := l.Layer(testimage.Layer{Entries: []testimage.Entry{testimage.File("mark", mark)}, MediaType: dockerLayer})
	parts := append(strings.Split(platform, "/"), "")
	conf := l.JSON(dockerConfig, map[string]any{
		"os": parts[0], "architecture": parts[1], "rootfs": map[string]any{"type": "layers", "diff_ids": []string{diffID}},
	})
	d := l.JSON(dockerManifest, testimage.Manifest{SchemaVersion: 2, MediaType: dockerManifest, Config: conf, Layers: []testimage.Descriptor{y}})
	d.Platform = &testimage.Platform{OS: parts[0], Architecture: parts[1], Variant: parts[2]}
	return d
}

func list(l *testimage.Layout, ds ...testimage.Descriptor) testimage.Descriptor {
	return l.JSON(dockerList, testimage.Index{SchemaVersion: 2, MediaType: dockerList, Manifests: ds})
}

func TestDockersDocumentsAreRead(t *testing.T) {
	l := testimage.New(t)
	amd, again, arm6, arm7 := schema2(l, "linux/amd64", "a"), schema2(l, "linux/amd64", "again"), schema2(l, "linux/arm/v6", "6"), schema2(l, "linux/arm/v7", "7")
	top := list(l, attestation(l, amd), arm6, arm7, amd, again)
	l.Tag("list", top)
	l.Tag("one", amd)
	l.Tag("mixed", l.Index(list(l, arm7), amd)) // an OCI index of both kinds
	for _, tt := range []struct {
		tag, platform string
		want          testimage.Descriptor
	}{
		{"list", "linux/amd64", amd}, {"list", "linux/arm", arm7}, {"list", "linux/arm/v7", arm7}, {"list", "linux/arm/v6", arm6},
		{"one", "", amd}, {"mixed", "linux/arm/v7", arm7}, {"mixed", "linux/amd64", amd},
	} {
		im := open(t, l.Source(":"+tt.tag), parse(t, tt.platform))
		if im.ConfigDigest.String() != configOf(t, l, tt.want) {
			t.Errorf("%s for %s: config %s", tt.tag, tt.platform, im.ConfigDigest)
		}
		if tt.tag == "list" && im.Source.String() != top.Digest {
			t.Errorf("source digest %s", im.Source)
		}
	}
	openError(t, l.Source(":list"), parse(t, "linux/arm/v5"), "linux/amd64, linux/arm/v6, linux/arm/v7")
}

// Two shapes of what buildx adds to an index: a manifest marked with an
// annotation, and an artifact with a subject.
func TestAttestationsAreNeverChosen(t *testing.T) {
	for name, make := range map[string]func(l *testimage.Layout, of testimage.Descriptor) testimage.Descriptor{
		"annotated": attestation,
		"annotated only": func(l *testimage.Layout, of testimage.Descriptor) testimage.Descriptor {
			d := attestation(l, of)
			d.Platform = nil
			return d
		},
		"of an unknown platform": func(l *testimage.Layout, of testimage.Descriptor) testimage.Descriptor {
			d := attestation(l, of)
			d.Annotations = nil
			return d
		},
		"an artifact with a subject": func(l *testimage.Layout, of testimage.Descriptor) testimage.Descriptor {
			empty := l.Blob("application/vnd.oci.empty.v1+json", []byte("{}"))
			proof := l.Blob("application/vnd.in-toto+json", []byte(`{"_type":"x"}`))
			return l.JSON(testimage.MediaManifest, map[string]any{
				"schemaVersion": 2, "mediaType": testimage.MediaManifest, "artifactType": "application/vnd.in-toto+json",
				"config": empty, "layers": []any{proof}, "subject": of,
			})
		},
	} {
		for where, index := range map[string]func(l *testimage.Layout) testimage.Descriptor{
			"first": func(l *testimage.Layout) testimage.Descriptor {
				good := marked(l, "linux/amd64", "good")
				return l.Index(make(l, good), good)
			},
			"last": func(l *testimage.Layout) testimage.Descriptor {
				good := marked(l, "linux/amd64", "good")
				return l.Index(good, make(l, good))
			},
			"in a manifest list": func(l *testimage.Layout) testimage.Descriptor {
				good := marked(l, "linux/amd64", "good")
				return list(l, make(l, good), good)
			},
			"alone": func(l *testimage.Layout) testimage.Descriptor {
				return l.Index(make(l, marked(l, "linux/amd64", "good")))
			},
		} {
			t.Run(name+" "+where, func(t *testing.T) {
				l, _ := build(t, index)
				if where == "alone" {
					openError(t, l.Source(""), amd64, "no runnable platform")
					return
				}
				if im := open(t, l.Source(""), amd64); im.ConfigDigest.String() != configOf(t, l, marked(l, "linux/amd64", "good")) {
					t.Errorf("config %s", im.ConfigDigest)
				}
			})
		}
	}
}

// What follows the platform in a descriptor, os.version and os.features, chooses
// nothing on Linux: of two the first is taken, every time.
func TestTheFirstOfTwoForOnePlatformIsTaken(t *testing.T) {
	l := testimage.New(t)
	a, b := marked(l, "linux/amd64", "a"), marked(l, "linux/amd64", "b")
	entry := func(d testimage.Descriptor, version string) map[string]any {
		return map[string]any{"mediaType": d.MediaType, "digest": d.Digest, "size": d.Size,
			"platform": map[string]any{"os": "linux", "architecture": "amd64", "os.version": version, "os.features": []string{version}}}
	}
	l.Tag("latest", l.JSON(testimage.MediaIndex, map[string]any{"schemaVersion": 2, "mediaType": testimage.MediaIndex, "manifests": []any{entry(b, "2"), entry(a, "1")}}))
	for range 3 {
		if im := open(t, l.Source(""), image.Platform{OS: "linux", Arch: "amd64"}); im.ConfigDigest.String() != configOf(t, l, b) {
			t.Errorf("config %s", im.ConfigDigest)
		}
	}
}
