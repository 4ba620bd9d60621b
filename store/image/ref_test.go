package image_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/store/image"
)

func TestParseRef(t *testing.T) {
	d := digest("source")
	for text, want := range map[string]image.Ref{
		"debian":                           {Repo: "debian", Tag: "latest"},
		"debian:12":                        {Repo: "debian", Tag: "12"},
		"library/debian:12-slim_X.y":       {Repo: "library/debian", Tag: "12-slim_X.y"},
		"localhost/a":                      {Repo: "localhost/a", Tag: "latest"},
		"a__b/c--d/e.f":                    {Repo: "a__b/c--d/e.f", Tag: "latest"},
		"a:_":                              {Repo: "a", Tag: "_"},
		"a@" + d.String():                  {Repo: "a", Digest: &d},
		"a:b@" + d.String():                {Repo: "a", Tag: "b", Digest: &d},
		strings.Repeat("a", 255):           {Repo: strings.Repeat("a", 255), Tag: "latest"},
		"a:" + strings.Repeat("A", 128):    {Repo: "a", Tag: strings.Repeat("A", 128)},
		"docker.io/library/busybox:latest": {Repo: "docker.io/library/busybox", Tag: "latest"},
	} {
		got, err := image.ParseRef(text)
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", text, diff)
		}
	}
}

func TestParseRefRefuses(t *testing.T) {
	for text, says := range map[string]string{
		"":                       "name is empty",
		":tag":                   "name is empty",
		"Debian":                 "lower-case",
		"a/":                     `part ""`,
		"/a":                     `part ""`,
		"a//b":                   `part ""`,
		"../a":                   `part ".."`,
		"a/./b":                  `part "."`,
		"-a":                     "only between them",
		"a-":                     "only between them",
		"a b":                    "lower-case",
		"é":                      "lower-case",
		"a\n":                    "lower-case",
		"a:":                     `tag ""`,
		"a:-b":                   "neither",
		"a:.b":                   "neither",
		"a:b:c":                  `tag "b:c"`,
		"a:b\n":                  "want letters",
		"localhost:5000/a/b:tag": `leave out "localhost:5000/"`,
		"a@":                     "sha256:<64",
		"a@sha512:00":            "sha256:<64",
		"a@sha256:" + strings.ToUpper(digest("x").Hex()): "lower-case",
		strings.Repeat("a", 256):                         "at most 255",
		"a:" + strings.Repeat("a", 129):                  "at most 128",
	} {
		if r, err := image.ParseRef(text); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %+v, %v; want an error that says %q", text, r, err, says)
		}
	}
}

func TestParseNameTakesNoDigest(t *testing.T) {
	if r, err := image.ParseName("a/b"); err != nil || r.String() != "a/b:latest" {
		t.Errorf("ParseName = %v, %v", r, err)
	}
	if _, err := image.ParseName("a@" + digest("x").String()); err == nil || !strings.Contains(err.Error(), "no digest") {
		t.Errorf("a digest: %v", err)
	}
	if _, err := image.ParseName("A"); err == nil {
		t.Error("a bad name was accepted")
	}
}

func TestPlatformsAreNormalised(t *testing.T) {
	for text, want := range map[string]string{
		"linux/amd64":     "linux/amd64",
		"Linux/x86_64":    "linux/amd64",
		"linux/x86-64":    "linux/amd64",
		"linux/amd64/v1":  "linux/amd64",
		"linux/amd64/v3":  "linux/amd64/v3",
		"linux/aarch64":   "linux/arm64",
		"linux/arm64/v8":  "linux/arm64",
		"linux/arm64/8":   "linux/arm64",
		"linux/arm64/v9":  "linux/arm64/v9",
		"linux/arm":       "linux/arm/v7",
		"linux/arm/6":     "linux/arm/v6",
		"linux/armhf":     "linux/arm/v7",
		"linux/armel":     "linux/arm/v6",
		"linux/i686":      "linux/386",
		"linux/riscv64":   "linux/riscv64",
		"linux/mips64le":  "linux/mips64le",
		"freebsd/ppc64le": "freebsd/ppc64le",
	} {
		p, err := image.ParsePlatform(text)
		if err != nil || p.String() != want || p.Key() != strings.ReplaceAll(want, "/", "-") {
			t.Errorf("%s: %s (key %s), %v; want %s", text, p, p.Key(), err, want)
		}
	}
	for _, text := range []string{"", "linux", "linux/", "/amd64", "linux/amd64/", "linux/amd64/v1/x", "linux/am-d64", "linux/a b", "../x", "linux/" + strings.Repeat("a", 33)} {
		if p, err := image.ParsePlatform(text); err == nil || !strings.Contains(err.Error(), "linux/amd64") {
			t.Errorf("%q: %v, %v; want an error with an example", text, p, err)
		}
	}
	if p := image.HostPlatform(); p.OS == "" || p.Arch == "" {
		t.Errorf("HostPlatform = %+v", p)
	}
}

func TestParseStatementKeyIsTheInverseOfStatementKey(t *testing.T) {
	d := digest("source")
	for _, p := range []image.Platform{{OS: "linux", Arch: "amd64"}, {OS: "linux", Arch: "arm", Variant: "v7"}} {
		source, platform, ok := image.ParseStatementKey(image.StatementKey(d, p))
		if !ok || source != d || platform != p {
			t.Errorf("got %s, %s, %t, want %s, %s", source, platform, ok, d, p)
		}
	}
	for _, key := range []string{
		"", "images/", "images/" + d.Hex(), "images/" + d.Hex() + "/linux-amd64", "images/" + d.Hex() + "/linux-amd64/sigs/statement",
		"images/" + d.Hex() + "/linux-amd64/statement/", "images/" + d.Hex() + "/linux-x86_64/statement", "images/" + d.Hex() + "/linux/statement",
		"images/" + strings.ToUpper(d.Hex()) + "/linux-amd64/statement", "images/abc/linux-amd64/statement", d.Hex() + "/linux-amd64/statement",
	} {
		if _, _, ok := image.ParseStatementKey(key); ok {
			t.Errorf("%q was taken for the key of a statement", key)
		}
	}
}

func TestKeys(t *testing.T) {
	d, p := digest("source"), image.Platform{OS: "linux", Arch: "arm", Variant: "v7"}
	for got, want := range map[string]string{
		image.BootstrapKey(d):        "bootstraps/" + d.Hex(),
		image.ConfigKey(d):           "configs/" + d.Hex(),
		image.BlobKey(d):             "blobs/" + d.Hex(),
		image.LayerKey(d):            "layers/" + d.Hex(),
		image.StatementKey(d, p):     "images/" + d.Hex() + "/linux-arm-v7/statement",
		image.SigPrefix(d, p):        "images/" + d.Hex() + "/linux-arm-v7/sigs/",
		image.SigKey(d, p, "abc123"): "images/" + d.Hex() + "/linux-arm-v7/sigs/abc123",
	} {
		if got != want {
			t.Errorf("key %s, want %s", got, want)
		}
	}
}
