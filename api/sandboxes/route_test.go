package sandboxes

import (
	"strings"
	"testing"
)

func FuzzFind(f *testing.F) {
	f.Add("GET", "/v1/sandboxes/a/exec/b/output", "stream=stdout&offset=1")
	f.Add("PUT", "/v1/sandboxes/a/files", "path=%2fx")
	f.Fuzz(func(t *testing.T, method, path, query string) {
		rt, c, err := find(method, path, query)
		if err != nil {
			if e := toError(err); e.Status < 400 || e.Status >= 500 {
				t.Fatalf("a bad request line is answered with %d %s", e.Status, e.Code)
			}
			return
		}
		if rt.method != method || strings.ContainsAny(c.id+c.exec, "/\x00") || strings.HasPrefix(c.id, ".") || len(c.id) > maxID {
			t.Fatalf("%q %q was accepted as %s with %q and %q", method, path, rt.name, c.id, c.exec)
		}
	})
}
