package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"quarry/api"
	"quarry/worker"
)

func TestControlCharactersAreEscaped(t *testing.T) {
	for in, want := range map[string]string{
		"plain, ünï and 漢字 \\":      "plain, ünï and 漢字 \\",
		"a\nb\tc":                   "a\nb\tc",
		"\x1b[31mred\x1b]0;t\a":     `\x1b[31mred\x1b]0;t\a`,
		"\r\b\x00\x7f":              `\r\b\x00\x7f`,
		"c1 \u009b31m \u0085":       `c1 \u009b31m \u0085`,
		"bytes \xff\x9b":            `bytes \xff\x9b`,
		"\ufffd":                    "\ufffd",
		"bidi \u202e\u2066\u200f":   `bidi \u202e\u2066\u200f`,
		"none \u200b\ufeff\u00ad":   `none \u200b\ufeff\u00ad`,
		"line \u2028\u2029":         `line \u2028\u2029`,
		"tag \U000e0041 \U0010ffff": `tag \U000e0041 \U0010ffff`,
		"e\u0301 \U0001f600":        "e\u0301 \U0001f600",
	} {
		if got := printable(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
	if got := oneLine("a\nb\tc"); got != `a\nb\tc` {
		t.Errorf("one line: %q", got)
	}
	doc, err := json.Marshal(map[string]string{"k": "\u009b\x7f\x1b é \u202e \U000e0041"})
	if err != nil {
		t.Fatal(err)
	}
	safe := printableJSON(doc)
	var back map[string]string
	if err := json.Unmarshal(safe, &back); err != nil || back["k"] != "\u009b\x7f\x1b é \u202e \U000e0041" || strings.ContainsFunc(string(safe), isUnprintable) {
		t.Errorf("%q: %v", safe, err)
	}
}

func TestNoCommandPrintsControlCharacters(t *testing.T) {
	var out, errs bytes.Buffer
	run(t.Context(), []string{"images", "\x1b[31m\u009b\r"}, nil, &out, &errs)
	run(t.Context(), []string{"convert", "oci:/no\x1b[31m", "--name", "a", "--data", t.TempDir(), "--platform", "\x1b/\u009b"}, nil, &out, &errs)
	bar := newProgress(&errs)
	bar.step(api.Progress{Step: "warning", Item: "entry \x1b[31m\n\u009b"})
	bar.end()
	if n := strings.Count(errs.String(), "\n"); n < 3 {
		t.Errorf("stderr has %d lines: %q", n, errs.String())
	}
	if s := strings.ReplaceAll(out.String()+errs.String(), "\n", ""); strings.ContainsFunc(s, isUnprintable) || !strings.Contains(s, `\x1b`) {
		t.Errorf("printed %q", s)
	}
}

func TestSourcesThatCannotBeAreUsageErrors(t *testing.T) {
	o := convertOptions{name: "a", target: target{create: true, data: t.TempDir()}}
	for _, src := range []string{"foo:bar", "oci:", "/path", "debian", "", "registry:x", "docker-archive:", "oci:/no\xff", "oci:no\xff"} {
		o.source = src
		err := runConvert(t.Context(), o, &bytes.Buffer{}, &bytes.Buffer{})
		if !errors.Is(err, errUsage) || exitCode(err) != exitUsage {
			t.Errorf("convert %q: %v", src, err)
			continue
		}
		if text := err.Error(); strings.Contains(src, "\xff") && !(strings.Contains(text, `no\xff`) && strings.Contains(text, "link")) || !strings.Contains(src, "\xff") && !strings.Contains(text, "docker-archive:FILE") {
			t.Errorf("convert %q: %v", src, err)
		}
	}
	if _, err := treeOf(context.Background(), target{}, "oci:", "", 4096); !errors.Is(err, errUsage) {
		t.Errorf("treedigest oci: %v", err)
	}
	if _, err := openDataDir("/no\xff"); err == nil || !strings.Contains(err.Error(), `\xff`) {
		t.Errorf("a data folder whose path is not UTF-8: %v", err)
	}
	for _, c := range []worker.Command{{Args: []string{"a", "\xff"}}, {Env: []string{"K=\xff"}}, {WorkDir: "/\xff"}} {
		if err := prepareCommand(&runOptions{command: c}, nil, nil, nil); !errors.Is(err, errUsage) || !strings.Contains(err.Error(), `\xff`) {
			t.Errorf("run %+v: %v", c, err)
		}
	}
}
