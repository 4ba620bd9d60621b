package writer_test

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"quarry/store/writer"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func mark() writer.Mark {
	return writer.Mark{
		Version: 1, Epoch: 3, Writer: strings.Repeat("0a", 16), Folder: strings.Repeat("f0", 16),
		Host: "store-1", PID: 4711, URL: "http://10.0.0.1:7070", Count: 99, Released: true,
	}
}

func TestMarkIsGolden(t *testing.T) {
	got, err := mark().Encode()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join("testdata", "mark.golden")
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("mark (-want +got):\n%s", diff)
	}
	back, err := writer.Decode(got)
	if diff := cmp.Diff(mark(), back); diff != "" || err != nil {
		t.Errorf("decoded mark, error %v (-want +got):\n%s", err, diff)
	}
}

func TestDecodeRefuses(t *testing.T) {
	good, err := mark().Encode()
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string][2]string{
		"a newer version":  {`"version":1`, `"version":2`},
		"an unknown field": {`"count":99`, `"count":99,"color":1`},
		"a missing field":  {`"count":99,`, ``},
		"a space":          {`"count":99`, `"count": 99`},
		"a short writer":   {`"writer":"0a`, `"writer":"`},
		"no host":          {`store-1`, ``},
		"a negative pid":   {`4711`, `-4711`},
		"a long URL":       {`http://10.0.0.1:7070`, strings.Repeat("u", writer.MaxURL+1)},
	} {
		bad := strings.Replace(string(good), change[0], change[1], 1)
		if bad == string(good) {
			t.Fatalf("%s: nothing was changed", name)
		}
		if m, err := writer.Decode([]byte(bad)); err == nil {
			t.Errorf("%s: got %+v, want an error", name, m)
		}
	}
}

func FuzzDecode(f *testing.F) {
	good, err := mark().Encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := writer.Decode(b)
		if err != nil {
			return
		}
		if again, err := m.Encode(); err != nil || !bytes.Equal(again, b) {
			t.Errorf("accepted %q, encoded it as %q, error %v", b, again, err)
		}
	})
}
