package registry_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"quarry/store/catalog"
	"quarry/store/chunk"
)

// repos reads a list of repositories page by page, and says how many there were.
func (l *lab) repos(t *testing.T, n int, visible func(string) bool) (all []string, pages int) {
	t.Helper()
	for last := ""; ; {
		list, next, err := l.Repos(t.Context(), last, n, visible)
		must(t, err)
		if len(list) > n || next != "" && next <= last {
			t.Fatalf("a page of %d after %q, next %q", len(list), last, next)
		}
		all, pages = append(all, list...), pages+1
		if last = next; next == "" {
			return all, pages
		}
	}
}

func TestReposThatCanBePulledAreListed(t *testing.T) {
	l := newLab(t, nil)
	for _, repo := range []string{"b", "a/x", "c", "hidden"} {
		l.put(t, repo, l.image(t, repo, repo), "v1", "v2")
	}
	l.put(t, "untagged", l.image(t, "untagged", "u"))
	// Names of what was converted from elsewhere are between them, more than a page
	// looks up.
	for i := range 600 {
		must(t, l.catalog.SetName(t.Context(), catalog.Name{Repo: fmt.Sprintf("b/%03d", i), Tag: "latest", Source: chunk.Sum([]byte("elsewhere")), Serial: 1}))
	}
	visible := func(repo string) bool { return repo != "hidden" }
	want := []string{"a/x", "b", "c"}
	for _, n := range []int{1, 2, 1000} {
		got, pages := l.repos(t, n, visible)
		if !slices.Equal(got, want) {
			t.Errorf("%d a page: got %s, want %s", n, got, want)
		}
		if pages < 3 {
			t.Errorf("%d a page: %d pages: one looked up more than its share of 600 names", n, pages)
		}
	}
	if got, _ := l.repos(t, 1000, func(string) bool { return true }); !strings.Contains(strings.Join(got, " "), "hidden") {
		t.Errorf("who sees all: %s", got)
	}
}
