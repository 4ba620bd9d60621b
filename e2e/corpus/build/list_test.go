package build_test

import (
	"strings"
	"testing"

	"quarry/e2e/corpus/build"
)

// The corpus is worth its figures only while it is like what people push:
// families with independent builds, several layers, and images unlike them.
func TestTheCorpusIsWhatItsReportSaysItIs(t *testing.T) {
	families := map[string][]build.Recipe{}
	names := map[string]bool{}
	for _, r := range build.List() {
		if names[r.Name()] {
			t.Errorf("%s is there twice", r.Name())
		}
		names[r.Name()] = true
		families[r.Family] = append(families[r.Family], r)
		if len(r.Steps) < 1 {
			t.Errorf("%s has one layer, want at least two", r.Name())
		}
		if len(r.Env) == 0 || len(r.Cmd) == 0 {
			t.Errorf("%s says nothing of how it is run", r.Name())
		}
	}
	large, single := 0, 0
	for name, members := range families {
		switch len(members) {
		case 1:
			single++
		case 2:
			t.Errorf("family %s has two members; want three or it is none", name)
		default:
			large++
			checkFamily(t, members)
		}
	}
	if len(names) < 16 || large < 4 || single < 4 {
		t.Errorf("%d images, %d families, %d others; want at least 16, 4 and 4", len(names), large, single)
	}
}

// checkFamily: same base and dependencies, another checkout and entry order.
func checkFamily(t *testing.T, members []build.Recipe) {
	t.Helper()
	first := members[0]
	orders := map[build.Order]bool{first.Order: true}
	checkouts := map[string]bool{last(first).Script: true}
	for _, r := range members[1:] {
		if r.Variant != first.Variant || strings.Join(r.Packages, " ") != strings.Join(first.Packages, " ") || len(r.Steps) != len(first.Steps) {
			t.Errorf("%s has another base than %s", r.Name(), first.Name())
			continue
		}
		for i := range r.Steps[:len(r.Steps)-1] {
			if a, b := r.Steps[i], first.Steps[i]; a.Script != b.Script || strings.Join(a.Packages, " ") != strings.Join(b.Packages, " ") {
				t.Errorf("layer %d of %s is made otherwise than that of %s", i+2, r.Name(), first.Name())
			}
		}
		orders[r.Order], checkouts[last(r).Script] = true, true
	}
	if len(checkouts) != len(members) {
		t.Errorf("family %s has %d checkouts for %d members", first.Family, len(checkouts), len(members))
	}
	if len(orders) < 3 {
		t.Errorf("family %s has %d entry orders, want 3", first.Family, len(orders))
	}
}

func last(r build.Recipe) build.Step { return r.Steps[len(r.Steps)-1] }
