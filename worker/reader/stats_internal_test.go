package reader

import (
	"encoding/json"
	"strings"
	"testing"
)

// TestANameThatIsNotUTF8IsToldOf, on its way through JSON too.
func TestANameThatIsNotUTF8IsToldOf(t *testing.T) {
	var f failures
	f.note(ReadError{Path: "/caf\xe9/\u202e漢", Err: strings.Repeat("漢", maxErrorText)})
	var st, got Stats
	f.fill(&st)
	doc, err := json.Marshal(st)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(doc, &got); err != nil {
		t.Fatal(err)
	}
	e := got.Errors[0]
	if e.Path != `/caf\xe9/`+"\u202e漢" || strings.ContainsRune(e.Err, '\ufffd') || len(e.Err) > maxErrorText+20 {
		t.Errorf("path %q, an error of %d bytes", e.Path, len(e.Err))
	}
}
