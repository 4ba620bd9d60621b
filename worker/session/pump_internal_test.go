package session

import (
	"bytes"
	"testing"
)

const pid7 = "bash: [7: "

// split passes text through a filter, cut at the offsets that are set in cuts.
func split(text []byte, cuts []byte) string {
	f := &filter{prefix: pid7}
	var out []byte
	from := 0
	for i := range text {
		if i > 0 && len(cuts) > 0 && cuts[i%len(cuts)]&1 == 1 {
			out = append(out, f.pass(text[from:i])...)
			from = i
		}
	}
	out = append(out, f.pass(text[from:])...)
	return string(append(out, f.rest()...))
}

func TestOnlyTheOneLineIsTakenOut(t *testing.T) {
	const noise = pid7 + "1 (255)] tcsetattr: Inappropriate ioctl for device\n"
	for in, want := range map[string]string{
		"":                             "",
		noise:                          "",
		"a\n" + noise + "b\n":          "a\nb\n",
		"a" + noise + noise + "b":      "ab",
		"bash: [8: 1 (255)] tcsetattr": "bash: [8: 1 (255)] tcsetattr",
		noise[:20]:                     noise[:20],
		pid7 + "other\n" + noise:       pid7 + "other\n",
		pid7 + pid7:                    pid7 + pid7,
		pid7 + string(bytes.Repeat([]byte("x"), 500)): pid7 + string(bytes.Repeat([]byte("x"), 500)),
	} {
		for _, cuts := range [][]byte{nil, {1}, {0, 1}, {0, 0, 0, 0, 0, 0, 1}} {
			if got := split([]byte(in), cuts); got != want {
				t.Errorf("%q cut %v: %q, want %q", in, cuts, got, want)
			}
		}
	}
}

// FuzzFilter: where the reads of a pipe are cut changes nothing, and what is no such
// line passes.
func FuzzFilter(f *testing.F) {
	f.Add([]byte("a\n"+pid7+"1 (255)] tcsetattr: Inappropriate ioctl for device\nb"), []byte{0, 1, 1})
	f.Add([]byte(pid7+pid7+"bash: ["), []byte{1})
	f.Fuzz(func(t *testing.T, text, cuts []byte) {
		whole := split(text, nil)
		if got := split(text, cuts); got != whole {
			t.Errorf("%q, cut: %q", whole, got)
		}
		if !bytes.Contains(text, []byte("tcsetattr")) && whole != string(text) {
			t.Errorf("%q became %q", text, whole)
		}
	})
}
