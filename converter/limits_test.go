package converter_test

import (
	"os"
	"strings"
	"testing"

	"quarry/converter"
	"quarry/internal/testimage"
)

func TestLimitsAreReadAndSet(t *testing.T) {
	for text, want := range map[string]int64{
		"MaxBytes=1": 1, "MaxBytes=512Gi": 512 << 30, "Names=3Ki": 3072, "Depth=7": 7, "MaxRatio=1Mi": 1 << 20, "PathBytes=2Ti": 2 << 40,
		"NameBytes=255": 255, "XattrBytes=262148": 262148,
	} {
		if _, got, err := converter.ParseLimit(text); err != nil || got != want {
			t.Errorf("%s: %d, %v, want %d", text, got, err, want)
		}
	}
	for text, word := range map[string]string{
		"MaxBytes": "NAME=VALUE", "": "NAME=VALUE", "Nothing=1": "MaxBytes", "maxbytes=1": "no such limit", "MaxBytes=0": "1 or more", "MaxBytes=-1": "1 or more",
		"MaxBytes=": "a number", "MaxBytes=x": "a number", "MaxBytes=1K": "a number", "MaxBytes=1KiB": "a number", "MaxBytes=9000000Ti": "a number", "MaxBytes=1.5Gi": "a number", "Depth=4096": "4095 is the most",
		"NameBytes=400": "255 is the most", "TargetBytes=4096": "4095 is the most", "XattrNameBytes=256": "255 is the most",
		"XattrValueBytes=64Ki": "65535 is the most", "XattrBytes=1Mi": "262148 is the most",
	} {
		if _, _, err := converter.ParseLimit(text); err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("%q: got %v, want an error with %q", text, err, word)
		}
	}
	for _, name := range converter.LimitNames() {
		var l converter.Limits
		if err := l.Set(name, 5); err != nil || l == (converter.Limits{}) {
			t.Errorf("%s: set to nothing: %v", name, err)
		}
	}
	if err := new(converter.Limits).SetAll(map[string]int64{"Names": 1, "nope": 1}); err == nil {
		t.Error("an unknown name was set")
	}
}

func TestTheDocumentsListEveryLimit(t *testing.T) {
	var text []byte
	for _, doc := range []string{"../docs/conversion.md", "../docs/sources.md"} {
		p, err := os.ReadFile(doc)
		if err != nil {
			t.Fatal(err)
		}
		text = append(text, p...)
	}
	for _, name := range converter.LimitNames() {
		if !strings.Contains(string(text), "`"+name+"`") {
			t.Errorf("neither docs/conversion.md nor docs/sources.md speaks of the limit %s", name)
		}
	}
}

// An image over a limit fails with layer, entry and limit.
func TestALimitThatIsReachedIsNamed(t *testing.T) {
	for limit, words := range map[string][]string{
		"MaxEntries": {"read layer sha256:", `entry "a/b/c/d"`},
		"MaxBytes":   {"read layer sha256:"},
		"Depth":      {"layer 2 of 2", "a/b/c/d"},
		"Names":      {"layer 2 of 2", "a/b/c/d"},
		"PathBytes":  {"layer 2 of 2", "a/b/c/d"},
	} {
		s := newStore(t)
		var l converter.Limits
		value := int64(1)
		if limit == "PathBytes" {
			value = 5
		}
		if err := l.Set(limit, value); err != nil {
			t.Fatal(err)
		}
		deep := layerOf(testimage.File("a/b/c/d", "x"))
		if limit == "MaxEntries" {
			deep = layerOf(testimage.File("a", "x"), testimage.File("a/b/c/d", "x"))
		}
		s.Limits = l
		s.fail(t, testimage.Build(t, layerOf(testimage.File("a", "")), deep).Source(""), append(words, "(limit "+limit+")")...)
	}
}
