package layermodel

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Diff says where two trees differ, one line a path; "" means nowhere.
func Diff(got, want Tree) string {
	var b strings.Builder
	all := maps.Clone(want)
	maps.Copy(all, got)
	gotLinks, wantLinks := firstNames(got), firstNames(want)
	for _, p := range slices.Sorted(maps.Keys(all)) {
		g, w := describe(got, gotLinks, p), describe(want, wantLinks, p)
		if g != w {
			fmt.Fprintf(&b, "%q:\n\tgot  %s\n\twant %s\n", p, g, w)
		}
	}
	return b.String()
}

// String lists the tree, one line a path.
func (t Tree) String() string {
	var b strings.Builder
	links := firstNames(t)
	for _, p := range slices.Sorted(maps.Keys(t)) {
		fmt.Fprintf(&b, "%q %s\n", p, describe(t, links, p))
	}
	return b.String()
}

// firstNames returns the bytewise first path of every file.
func firstNames(t Tree) map[*Node]string {
	first := map[*Node]string{}
	for _, p := range slices.Sorted(maps.Keys(t)) {
		if _, ok := first[t[p]]; !ok {
			first[t[p]] = p
		}
	}
	return first
}

func describe(t Tree, links map[*Node]string, p string) string {
	n := t[p]
	if n == nil {
		return "nothing"
	}
	if first := links[n]; first != p {
		return fmt.Sprintf("hard link to %q", first)
	}
	return fmt.Sprintf("%c %04o %d:%d %d.%09d %d,%d %q %q %q", n.Type, n.Mode, n.UID, n.GID, n.Mtime, n.Nsec, n.Major, n.Minor, n.Target, n.Body, n.Xattrs)
}
