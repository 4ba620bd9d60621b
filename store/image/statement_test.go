package image_test

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"quarry/store/chunk"
	"quarry/store/image"
)

func exampleStatement() image.Statement {
	blob := digest("blob")
	return image.Statement{
		Source: digest("source"), Platform: image.Platform{OS: "linux", Arch: "amd64"}, Config: digest("config"), Bootstrap: digest("bootstrap"),
		BootstrapSize: 8192, Blob: &blob, Tree: digest("tree"), ChunkSize: chunk.DefaultSize, Converter: "quarry 1",
	}
}

func exampleName() image.NameStatement {
	return image.NameStatement{
		Repo: "library/debian", Tag: "12", Source: digest("source"), Serial: 7,
		Issued: time.Date(2021, 1, 2, 3, 4, 5, 600, time.UTC),
	}
}

func encodeStatement(t testing.TB, s image.Statement) []byte {
	t.Helper()
	b, err := image.EncodeStatement(s)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func encodeName(t testing.TB, n image.NameStatement) []byte {
	t.Helper()
	b, err := image.EncodeNameStatement(n)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestStatementRoundTrip(t *testing.T) {
	noData := exampleStatement()
	noData.Blob = nil
	noData.Platform.Variant = "v3"
	for _, want := range []image.Statement{exampleStatement(), noData} {
		b := encodeStatement(t, want)
		got, err := image.DecodeStatement(b)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("decoded differs (-want +got):\n%s", diff)
		}
		if image.ID(b) != chunk.Sum(b) {
			t.Error("the image id is not the payload's digest")
		}
	}
}

func TestNameStatementRoundTrip(t *testing.T) {
	expires := exampleName().Issued.Add(time.Hour)
	withExpiry := exampleName()
	withExpiry.Expires = &expires
	for _, want := range []image.NameStatement{exampleName(), withExpiry} {
		got, err := image.DecodeNameStatement(encodeName(t, want))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("decoded differs (-want +got):\n%s", diff)
		}
	}
	elsewhere := withExpiry
	elsewhere.Issued = elsewhere.Issued.In(time.FixedZone("", 3600))
	there := expires.In(time.FixedZone("", -3600))
	elsewhere.Expires = &there
	if !bytes.Equal(encodeName(t, elsewhere), encodeName(t, withExpiry)) {
		t.Error("one moment in two zones has two encodings")
	}
}

func TestDecodeStatementRefuses(t *testing.T) {
	good := string(encodeStatement(t, exampleStatement()))
	replace := func(old, new string) string {
		t.Helper()
		s := strings.Replace(good, old, new, 1)
		if s == good {
			t.Fatalf("%s is not in %s", old, good)
		}
		return s
	}
	for _, tc := range []struct {
		name, payload string
		want          error
		says          string
	}{
		{"nothing", "", image.ErrMalformed, ""},
		{"a newer version", replace(`"version":1`, `"version":2`), image.ErrVersion, "version 2"},
		{"no version", replace(`"version":1,`, ""), image.ErrMalformed, "no version"},
		{"an unknown field", replace(`{`, `{"tags":[],`), image.ErrMalformed, "tags"},
		{"a trailing newline", good + "\n", image.ErrMalformed, ""},
		{"a zero digest", replace(digest("tree").Hex(), chunk.Digest{}.Hex()), image.ErrMalformed, "tree digest is zero"},
		{"a zero blob", replace(digest("blob").Hex(), chunk.Digest{}.Hex()), image.ErrMalformed, "blob digest is zero"},
		{"an upper-case digest", replace(digest("tree").Hex(), strings.ToUpper(digest("tree").Hex())), image.ErrMalformed, "lower-case"},
		{"another name of the platform", replace("linux/amd64", "linux/x86_64"), image.ErrMalformed, ""},
		{"no platform", replace("linux/amd64", ""), image.ErrMalformed, "platform"},
		{"an empty bootstrap", replace("8192", "0"), image.ErrMalformed, "bootstrap"},
		{"a huge bootstrap", replace("8192", "8192000000000"), image.ErrMalformed, "bootstrap"},
		{"an odd chunk size", replace("262144", "262145"), image.ErrMalformed, "chunk size"},
		{"no converter", replace("quarry 1", ""), image.ErrMalformed, "converter"},
		{"too long", good + strings.Repeat(" ", image.MaxStatement), image.ErrMalformed, "at most"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s, err := image.DecodeStatement([]byte(tc.payload))
			if !errors.Is(err, tc.want) || !strings.Contains(err.Error(), tc.says) {
				t.Fatalf("%+v, %v; want %v that says %q", s, err, tc.want, tc.says)
			}
		})
	}
}

func TestEncodeNameStatementRefuses(t *testing.T) {
	early := exampleName().Issued
	for name, change := range map[string]func(*image.NameStatement){
		"repo":             func(n *image.NameStatement) { n.Repo = "Debian" },
		"tag":              func(n *image.NameStatement) { n.Tag = "" },
		"source":           func(n *image.NameStatement) { n.Source = chunk.Digest{} },
		"serial zero":      func(n *image.NameStatement) { n.Serial = 0 },
		"serial too large": func(n *image.NameStatement) { n.Serial = image.MaxSerial + 1 },
		"no time":          func(n *image.NameStatement) { n.Issued = time.Time{} },
		"year 10000":       func(n *image.NameStatement) { n.Issued = n.Issued.AddDate(8000, 0, 0) },
		"expires at once":  func(n *image.NameStatement) { n.Expires = &early },
	} {
		n := exampleName()
		change(&n)
		if b, err := image.EncodeNameStatement(n); !errors.Is(err, image.ErrMalformed) {
			t.Errorf("%s: %s, %v; want ErrMalformed", name, b, err)
		}
	}
}

func TestDecodeNameStatementRefuses(t *testing.T) {
	good := string(encodeName(t, exampleName()))
	for name, swap := range map[string][2]string{
		"another zone":      {"05.0000006Z", "05.0000006+01:00"},
		"zeros at the end":  {"05.0000006Z", "05.00000060Z"},
		"UTC as an offset":  {"05.0000006Z", "05.0000006+00:00"},
		"a serial as text":  {`"serial":7`, `"serial":"7"`},
		"a negative serial": {`"serial":7`, `"serial":-7`},
		"expires null":      {`0006Z"`, `0006Z","expires":null`},
	} {
		bad := strings.Replace(good, swap[0], swap[1], 1)
		if bad == good {
			t.Fatalf("%s: %s is not in %s", name, swap[0], good)
		}
		if n, err := image.DecodeNameStatement([]byte(bad)); !errors.Is(err, image.ErrMalformed) {
			t.Errorf("%s: %+v, %v; want ErrMalformed", name, n, err)
		}
	}
}
