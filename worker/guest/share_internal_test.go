package guest

import (
	"strings"
	"testing"
)

// Whatever a path is called, and whatever else is mounted, it is found by its name and
// by no other.
func FuzzMountedIn(f *testing.F) {
	const list = "1 0 0:1 / / rw - overlay none rw\n2 1 0:2 / /tmp rw,nosuid shared:1 - tmpfs none rw\n"
	for _, at := range []string{"/opt/tests", "/a b", "/tab\there", "/new\nline", `/back\slash`, `/\040`, "/cr\r", "/nbsp\u00a0x", "/a - b", "/tmp"} {
		f.Add(list, at)
	}
	f.Add("x\n - \n1 2 3 4 - ", "/x")
	f.Fuzz(func(t *testing.T, list, at string) {
		if !strings.HasPrefix(at, "/") {
			return // no target is relative
		}
		before := mountedIn(list, at)
		all := strings.TrimSuffix(list, "\n") + "\n9 1 0:9 / " + escaped.Replace(at) + " ro - erofs none ro\n"
		if got := mountedIn(all, at); got != erofs {
			t.Errorf("%q: %q", at, got)
		}
		if got := mountedIn(all, at+"x"); got != mountedIn(list, at+"x") {
			t.Errorf("%qx: %q", at, got)
		}
		if got := mountedIn(list, at); got != before {
			t.Errorf("%q: %q and %q", at, got, before)
		}
	})
}
