package archtest

import (
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// reach returns every package that pkg links by the table, itself left out.
func reach(pkg string) []string {
	seen := map[string]bool{}
	var visit func(string)
	visit = func(p string) {
		for _, next := range arrows[p] {
			if !seen[next] {
				seen[next] = true
				visit(next)
			}
		}
	}
	visit(pkg)
	return slices.Sorted(maps.Keys(seen))
}

// A row of a package that is gone would let one of that name in unseen.
func TestEveryRowHasAPackage(t *testing.T) {
	for pkg := range arrows {
		files, err := filepath.Glob(filepath.Join("..", "..", pkg, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		if len(files) == 0 {
			t.Errorf("%s has a row and no Go file: remove the row", pkg)
		}
	}
}

func TestTheTableKeepsTheDesign(t *testing.T) {
	for pkg, row := range arrows {
		for _, next := range row {
			if _, ok := arrows[next]; !ok {
				t.Errorf("%s may import %s, which has no row", pkg, next)
			}
		}
		if slices.Contains(reach(pkg), pkg) {
			t.Errorf("%s reaches itself", pkg)
		}
	}
	shim := []string{"internal/fdpass", "internal/strictjson", "nbd", "nbd/attach", "store/chunk", "worker/holder", "worker/sandbox", "worker/sentry", "worker/session"}
	if got := reach("cmd/quarry-shim"); !slices.Equal(got, shim) {
		t.Errorf("the shim links %v", got)
	}
	if got := reach("nbd"); len(got) != 0 {
		t.Errorf("nbd links %v", got)
	}
	families := []string{"api", "converter", "worker"}
	for pkg := range arrows {
		own, _, _ := strings.Cut(pkg, "/")
		for _, next := range reach(pkg) {
			other, _, _ := strings.Cut(next, "/")
			if next == "worker/sandbox" { // a contract, with nothing of a worker in it
				continue
			}
			if slices.Contains(families, own) && slices.Contains(families, other) && own != other {
				t.Errorf("%s reaches %s", pkg, next)
			}
		}
	}
}
