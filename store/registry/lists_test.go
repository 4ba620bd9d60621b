package registry_test

import (
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"quarry/store/bucket/buckettest"
	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/registry"
)

// repos reads a list of repositories page by page, and says how many there were.
func (l *lab) repos(t *testing.T, n int, visible func(string) bool) (all []string, pages int) {
	t.Helper()
	for last := ""; ; {
		list, next, err := l.Repos(t.Context(), last, n, visible)
		must(t, err)
		if len(list) > n || pages > 5000 {
			t.Fatalf("page %d of %d after %q, next %q", pages, len(list), last, next)
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

// A page looks up no more of a repository with many tags that were not pushed than of
// many repositories.
func TestAPageOfReposEndsInARepository(t *testing.T) {
	var looked atomic.Int64
	l := newLab(t, func(c *registry.Config) {
		c.Bucket = &buckettest.Faulty{Bucket: c.Bucket, Before: func(op buckettest.Op) error {
			if op.Method == "Stat" {
				looked.Add(1)
			}
			return nil
		}}
	})
	for _, repo := range []string{"a", "late", "z"} {
		l.put(t, repo, l.image(t, repo, repo), "v1")
	}
	for i := range 600 {
		for _, repo := range []string{"late", "never"} {
			must(t, l.catalog.SetName(t.Context(), catalog.Name{Repo: repo, Tag: fmt.Sprintf("t%03d", i), Source: chunk.Sum([]byte("elsewhere")), Serial: 1}))
		}
	}
	for _, n := range []int{1, 1000} {
		var all []string
		for last := ""; ; {
			looked.Store(0)
			list, next, err := l.Repos(t.Context(), last, n, func(string) bool { return true })
			must(t, err)
			if got := looked.Load(); got > 256 {
				t.Errorf("%d looked up after %q", got, last)
			}
			all = append(all, list...)
			if last = next; next == "" {
				break
			}
		}
		if want := []string{"a", "late", "z"}; !slices.Equal(all, want) {
			t.Errorf("%d a page: got %s, want %s", n, all, want)
		}
	}
}
