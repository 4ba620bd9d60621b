package catalog_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/store/bucket"
	"quarry/store/catalog"
	"quarry/store/chunk"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func digest(s string) chunk.Digest { return chunk.Sum([]byte(s)) }

// entries are one of each type, and the corners of their fields.
func entries() []catalog.Entry {
	return []catalog.Entry{
		catalog.Pack{ID: digest("p1"), Size: 67108864},
		catalog.Pack{ID: digest("p2"), Size: 1<<63 - 1},
		catalog.CondemnedChunk{Digest: digest("c"), Pack: digest("p1"), Off: 0},
		catalog.PackRetired{ID: digest("p1")},
		catalog.Name{Repo: "library/debian", Tag: "12", Source: digest("s"), Serial: 1},
		catalog.Name{
			Repo: "a", Tag: `é<&>"\`, Source: digest("s"), Serial: 1<<64 - 1,
			Statement: json.RawMessage(`{"payloadType":"a+b","payload":"PDw+Pg==","signatures":[{"keyid":"0","sig":"<&>\u003c"}]}`),
		},
		catalog.NameDeleted{Repo: "library/debian", Tag: "12", Serial: 2},
		catalog.Epoch{
			N: 1, Writer: strings.Repeat("0a", 16), Folder: strings.Repeat("f0", 16), Host: "store-1", PID: 4711,
			Time: time.Date(2026, 11, 30, 9, 5, 46, 0, time.UTC),
		},
		catalog.Clock{Unix: 1796029546},
		catalog.PackCondemned{ID: digest("p2")},
		catalog.PackDeleted{ID: digest("p1")},
		catalog.ImageDeleted{Source: digest("s")},
		catalog.Pinned{Source: digest("s")},
		catalog.Unpinned{Source: digest("s")},
	}
}

func TestEntriesAreGolden(t *testing.T) {
	var got bytes.Buffer
	for _, e := range entries() {
		b, err := catalog.EncodeEntry(e)
		if err != nil {
			t.Fatal(err)
		}
		got.Write(append(b, '\n'))
		back, err := catalog.DecodeEntry(b)
		if err != nil {
			t.Fatalf("decode %s: %v", b, err)
		}
		if diff := cmp.Diff(e, back); diff != "" {
			t.Errorf("decoded entry differs (-want +got):\n%s", diff)
		}
	}
	path := filepath.Join("testdata", "entries.golden")
	if *update {
		if err := os.WriteFile(path, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
}

var (
	hexA = "sha256:" + strings.Repeat("a", 64)
	good = `{"v":1,"type":"pack_added","pack":"` + hexA + `","size":1}`
)

func TestDecodeRefuses(t *testing.T) {
	if _, err := catalog.DecodeEntry([]byte(good)); err != nil {
		t.Fatalf("the entry that the others are made of: %v", err)
	}
	with := func(s, field, value string) string {
		i := strings.Index(s, `"`+field+`":`) + len(field) + 3
		end := i + strings.IndexAny(s[i:], ",}")
		return s[:i] + value + s[end:]
	}
	name := func(field, value string) string {
		return with(`{"v":1,"type":"name","repo":"r","tag":"t","source":"`+hexA+`","serial":1,"statement":null}`, field, value)
	}
	epoch := func(field, value string) string {
		id := strings.Repeat("0a", 16)
		return with(`{"v":2,"type":"epoch","epoch":1,"writer":"`+id+`","folder":"`+id+`","host":"h","pid":1,"time":"2026-11-30T09:00:00Z"}`, field, value)
	}
	if _, err := catalog.DecodeEntry([]byte(epoch("pid", "1"))); err != nil {
		t.Fatalf("the epoch that the others are made of: %v", err)
	}
	if _, err := catalog.DecodeEntry([]byte(name("serial", "1"))); err != nil {
		t.Fatalf("the name that the others are made of: %v", err)
	}
	for _, test := range []struct{ name, entry, want string }{
		{"nothing", "", "no JSON object"},
		{"not JSON", "pack_added", "no JSON object"},
		{"no object", "[1]", "no JSON object"},
		{"null", "null", "version 0"},
		{"no version", strings.Replace(good, `"v":1,`, "", 1), "version 0"},
		{"a newer version", strings.Replace(good, `"v":1`, `"v":4`, 1), "version 4, this quarry knows 1 to 3"},
		{"another version than its type has", strings.Replace(good, `"v":1`, `"v":2`, 1), "one form"},
		{"an epoch of the first version", strings.Replace(epoch("epoch", "1"), `"v":2`, `"v":1`, 1), "one form"},
		{"epoch 0", epoch("epoch", "0"), "epochs start at 1"},
		{"a short writer", epoch("writer", `"0a"`), "32 lower-case hex digits"},
		{"a writer in capitals", epoch("writer", `"`+strings.Repeat("0A", 16)+`"`), "32 lower-case hex digits"},
		{"no folder", epoch("folder", `""`), "32 lower-case hex digits"},
		{"no host", epoch("host", `""`), "host"},
		{"a long host", epoch("host", `"`+strings.Repeat("h", catalog.MaxHost+1)+`"`), "host"},
		{"pid 0", epoch("pid", "0"), "pid 0"},
		{"a time with an offset", epoch("time", `"2026-11-30T09:00:00+01:00"`), "not in UTC"},
		{"a time with a fraction", epoch("time", `"2026-11-30T09:00:00.5Z"`), "whole seconds"},
		{"a time with zeros", epoch("time", `"2026-11-30T09:00:00.0Z"`), "one form"},
		{"a pin of the first version", `{"v":1,"type":"pinned","source":"` + hexA + `"}`, "one form"},
		{"a clock before 1970", `{"v":3,"type":"clock","unix":0}`, "not after 1970"},
		{"a pin of nothing", `{"v":3,"type":"pinned","source":null}`, "source digest is missing"},
		{"no type", `{"v":1}`, "one form"},
		{"an unknown type", strings.Replace(good, "pack_added", "pack_eaten", 1), "pack_eaten: unknown entry type"},
		{"an unknown field", strings.Replace(good, `"size":1`, `"size":1,"color":2`, 1), `unknown field "color"`},
		{"a field of another type", strings.Replace(good, `"size":1`, `"size":1,"off":2`, 1), `unknown field "off"`},
		{"a missing field", strings.Replace(good, `,"size":1`, "", 1), "size 0"},
		{"a missing statement", strings.Replace(name("serial", "1"), `,"statement":null`, "", 1), "one form"},
		{"a repeated field", strings.Replace(good, `"size":1`, `"size":2,"size":1`, 1), "one form"},
		{"a version twice", strings.Replace(good, `{`, `{"v":1,`, 1), "one form"},
		{"a field in capitals", strings.Replace(good, `"size"`, `"SIZE"`, 1), "one form"},
		{"spaces", strings.Replace(good, `,"size"`, `, "size"`, 1), "one form"},
		{"a byte after it", good + "\n", "one form"},
		{"another entry after it", good + good, "no JSON object"},
		{"another order", strings.Replace(good, `"v":1,"type":"pack_added"`, `"type":"pack_added","v":1`, 1), "one form"},
		{"an escape", strings.Replace(name("repo", `"r"`), `"r"`, `"\u0072"`, 1), "one form"},
		{"a number as text", strings.Replace(good, `"size":1`, `"size":"1"`, 1), "cannot unmarshal"},
		{"a fraction", strings.Replace(good, `"size":1`, `"size":1.5`, 1), "cannot unmarshal"},
		{"an exponent", strings.Replace(good, `"size":1`, `"size":1e3`, 1), "cannot unmarshal"},
		{"size zero", strings.Replace(good, `"size":1`, `"size":0`, 1), "size 0"},
		{"a negative size", strings.Replace(good, `"size":1`, `"size":-1`, 1), "size -1"},
		{"a digest in capitals", strings.Replace(good, hexA, "sha256:"+strings.Repeat("A", 64), 1), "64 lower-case hex digits"},
		{"a short digest", strings.Replace(good, hexA, "sha256:aa", 1), "64 lower-case hex digits"},
		{"a digest of zeros", strings.Replace(good, hexA, chunk.Digest{}.String(), 1), "pack digest is missing"},
		{"a null digest", strings.Replace(good, `"`+hexA+`"`, "null", 1), "pack digest is missing"},
		{"a negative offset", `{"v":1,"type":"chunk_condemned","digest":"` + hexA + `","pack":"` + hexA + `","off":-1}`, "offset -1"},
		{"an empty repository", name("repo", `""`), "repository"},
		{"a long repository", name("repo", `"`+strings.Repeat("r", catalog.MaxRepo+1)+`"`), "repository"},
		{"an empty tag", name("tag", `""`), "tag"},
		{"a long tag", name("tag", `"`+strings.Repeat("t", catalog.MaxTag+1)+`"`), "tag"},
		{"bytes that are no UTF-8", name("tag", "\"\xff\""), "one form"},
		{"serial 0", name("serial", "0"), "serial of r:t is 0"},
		{"a huge serial", name("serial", "18446744073709551616"), "cannot unmarshal"},
		{"a statement that is no object", name("statement", `"x"`), "no JSON object"},
		{"a statement with spaces", name("statement", `{ }`), "one form"},
		{"more than an entry can be", strings.Repeat(" ", bucket.MaxEntry+1), "at most"},
	} {
		t.Run(test.name, func(t *testing.T) {
			e, err := catalog.DecodeEntry([]byte(test.entry))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, error %v, want an error with %q", e, err, test.want)
			}
		})
	}
}

func TestEncodeRefuses(t *testing.T) {
	huge := json.RawMessage(`{"payload":"` + strings.Repeat("A", bucket.MaxEntry) + `"}`)
	for _, test := range []struct {
		name  string
		entry catalog.Entry
		want  string
	}{
		{"no digest", catalog.Pack{Size: 1}, "pack digest is missing"},
		{"a tag that is no UTF-8", catalog.Name{Repo: "r", Tag: "\xff", Source: digest("s"), Serial: 1}, "tag"},
		{"a statement that is no JSON", catalog.Name{Repo: "r", Tag: "t", Source: digest("s"), Serial: 1, Statement: json.RawMessage("{")}, "name"},
		{"a huge statement", catalog.Name{Repo: "r", Tag: "t", Source: digest("s"), Serial: 1, Statement: huge}, "at most 1048576"},
	} {
		if _, err := catalog.EncodeEntry(test.entry); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: got error %v, want one with %q", test.name, err, test.want)
		}
	}
}

func FuzzDecodeEntry(f *testing.F) {
	golden, err := os.ReadFile(filepath.Join("testdata", "entries.golden"))
	if err != nil {
		f.Fatal(err)
	}
	for line := range bytes.Lines(golden) {
		f.Add(bytes.TrimSuffix(line, []byte("\n")))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		e, err := catalog.DecodeEntry(b)
		if err != nil {
			return
		}
		again, err := catalog.EncodeEntry(e)
		if err != nil || !bytes.Equal(again, b) {
			t.Errorf("accepted %q, encoded it as %q, error %v", b, again, err)
		}
	})
}
