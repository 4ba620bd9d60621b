package archtest_test

import (
	"os"
	"strings"
	"testing"
	"testing/fstest"

	"quarry/internal/archtest"
)

func TestTree(t *testing.T) {
	found, err := archtest.CheckTree(os.DirFS("../.."))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		t.Error(f)
	}
}

// lines returns n lines.
func lines(n int) string { return strings.Repeat("\n", n) }

func TestEachRuleCatchesWhatItIsFor(t *testing.T) {
	for _, tc := range []struct {
		name, path, content string
		line                int
		rule, says          string
	}{
		{"an arrow upwards", "store/chunk/x.go", "package chunk\n\nimport \"quarry/store\"\n", 3, "arrow", "store/chunk may not import store"},
		{"api imports worker", "api/x.go", "package api\nimport _ \"quarry/worker\"\n", 2, "arrow", "api may not import worker"},
		{"worker imports the converter", "worker/x.go", "package worker\nimport _ \"quarry/converter/tree\"\n", 2, "arrow", "converter/tree"},
		{"converter imports the client", "converter/x.go", "package converter\nimport _ \"quarry/api/client\"\n", 2, "arrow", "api/client"},
		{"nbd imports ours", "nbd/x.go", "package nbd\nimport _ \"quarry/store/chunk\"\n", 2, "arrow", "nbd may not import store/chunk"},
		{"the shim imports rafs", "cmd/quarry-shim/x.go", "package main\nimport _ \"quarry/rafs\"\n", 2, "arrow", "rafs"},
		{"a program imports a test suite", "cmd/quarry/x.go", "package main\nimport _ \"quarry/internal/need\"\n", 2, "arrow", "internal/need"},
		{"an arrow under a build tag", "rafs/x.go", "//go:build never\n\npackage rafs\nimport _ \"quarry/store\"\n", 4, "arrow", "store"},
		{"a package nobody placed", "store/fancy/x.go", "package fancy\n", 1, "arrow", "no row"},
		{"pebble outside chunkindex", "store/packed/x.go", "package packed\nimport _ \"github.com/cockroachdb/pebble/v2/vfs\"\n", 2, "arrow", "only chunkindex imports"},
		{"go-containerregistry outside converter/oci", "converter/x.go", "package converter\nimport _ \"github.com/google/go-containerregistry/pkg/v1\"\n", 2, "arrow", "only converter/oci imports"},
		{"log", "rafs/x.go", "package rafs\nimport _ \"log\"\n", 2, "import", "log/slog"},
		{"log in a test", "rafs/x_test.go", "package rafs_test\nimport _ \"log\"\n", 2, "import", "log/slog"},
		{"math/rand", "rafs/x.go", "package rafs\nimport _ \"math/rand\"\n", 2, "import", "math/rand/v2"},
		{"promauto", "api/x.go", "package api\nimport _ \"github.com/prometheus/client_golang/prometheus/promauto\"\n", 2, "import", "promauto"},
		{"a long file", "rafs/x.go", "package rafs" + lines(501), 0, "size", "501 lines"},
		{"a long function", "rafs/x.go", "package rafs\n\n// f is long.\nfunc f() {" + lines(70) + "}\n", 4, "size", "f has 71 lines"},
		{"a long method", "rafs/x.go", "package rafs\nfunc (t T) m() {" + lines(70) + "}\n", 2, "size", "m has 71 lines"},
		{"a long function in a variable", "rafs/x.go", "package rafs\nvar f = func() {" + lines(70) + "}\n", 2, "size", "71 lines"},
		{"a folder called util", "internal/util/x_test.go", "package util\n", 1, "name", `"util"`},
		{"a package called helpers", "rafs/x_test.go", "package helpers_test\n", 1, "name", `"helpers"`},
		{"a folder below types", "types/deep/x_test.go", "package deep\n", 1, "name", `"types"`},
		{"a to-do without a number", "rafs/x.go", "package rafs\n\n/* a\nTODO: b */\n", 4, "todo", "TODO(#12)"},
		{"one of two without a number", "rafs/x_test.go", "package rafs\n// TODO(#1) a FIXME b\n", 2, "todo", "TODO(#12)"},
		{"a skip", "rafs/x_test.go", "package rafs\nimport \"testing\"\nfunc TestX(t *testing.T) {\nt.Skipf(\"\")\n}\n", 4, "skip", "need.Missing"},
		{"a short test", "rafs/x_test.go", "package rafs\nimport \"testing\"\nvar n = testing.Short()\n", 3, "skip", "testing.Short"},
		{"a machine's path in a script", "x.sh", "#!/bin/sh\ncd /wo" + "rk/main\n", 2, "path", "one machine"},
		{"a machine's path in Go", "rafs/x.go", "package rafs\n// see /fa" + "rm/x\n", 2, "path", "one machine"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			found, err := archtest.CheckFile(tc.path, []byte(tc.content))
			if err != nil {
				t.Fatal(err)
			}
			if len(found) != 1 {
				t.Fatalf("%d findings, want 1: %v", len(found), found)
			}
			if f := found[0]; f.Path != tc.path || f.Line != tc.line || f.Rule != tc.rule || !strings.Contains(f.Text, tc.says) {
				t.Errorf("%v; want line %d, rule %s, saying %q", f, tc.line, tc.rule, tc.says)
			}
		})
	}
}

func TestWhatIsAllowedIsNotFound(t *testing.T) {
	for name, tc := range map[string]struct{ path, content string }{
		"an arrow down":                   {"store/x.go", "package store\nimport _ \"quarry/store/chunk\"\n"},
		"slog and rand/v2":                {"rafs/x.go", "package rafs\nimport (\n_ \"log/slog\"\n_ \"math/rand/v2\"\n)\n"},
		"pebble in chunkindex":            {"chunkindex/x.go", "package chunkindex\nimport _ \"github.com/cockroachdb/pebble/v2\"\n"},
		"a module that only begins alike": {"rafs/x.go", "package rafs\nimport _ \"github.com/cockroachdb/pebblestone\"\n"},
		"an arrow of a test":              {"store/chunk/x_test.go", "package chunk_test\nimport _ \"quarry/worker\"\n"},
		"a long test":                     {"rafs/x_test.go", "package rafs\nfunc f() {" + lines(600) + "}\n"},
		"500 lines and 70 of a function":  {"rafs/x.go", "package rafs\nfunc f() {" + lines(69) + "}" + lines(430)},
		"a to-do with a number":           {"rafs/x.go", "package rafs\n// TODO(#12): a, FIXME(#3) b\n"},
		"the word in a string":            {"rafs/x.go", "package rafs\nconst s = \"TODO\"\n"},
		"a skip by need":                  {"internal/need/x.go", "package need\nimport \"testing\"\nfunc f(t testing.TB) { t.Skip() }\n"},
		"what is no test's skip":          {"rafs/x.go", "package rafs\nfunc f(d D) { d.Skip() }\n"},
		"a path inside an image":          {"x.md", "/root/.bashrc /workspace/x\n"},
		"bytes that are not text":         {"x.bin", "\x00/wo" + "rk/x"},
	} {
		found, err := archtest.CheckFile(tc.path, []byte(tc.content))
		if err != nil || len(found) != 0 {
			t.Errorf("%s: %v, %v", name, found, err)
		}
	}
}

func TestCheckTreeWalks(t *testing.T) {
	bad := &fstest.MapFile{Data: []byte("package x\nimport _ \"log\"\n")}
	found, err := archtest.CheckTree(fstest.MapFS{
		"rafs/bad.go": bad, "api/client/bad.go": bad, "rafs/testdata/bad.go": bad, ".git/bad.go": bad, "bin/bad.go": bad, ".cache/bad.go": bad,
	})
	if err != nil {
		t.Fatal(err)
	}
	if len(found) != 2 || found[0].Path != "api/client/bad.go" || found[1].Path != "rafs/bad.go" {
		t.Fatalf("found %v, want one in each of two files", found)
	}
	if _, err := archtest.CheckTree(fstest.MapFS{"rafs/broken.go": {Data: []byte("package")}}); err == nil {
		t.Error("Go that does not parse was passed over")
	}
}
