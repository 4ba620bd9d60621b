package jobs

import (
	"slices"
	"strconv"
	"strings"

	"quarry/store/chunk"
)

// Filter says which jobs a list has. Zero fields mean all.
type Filter struct {
	State  State
	Repo   string
	Source chunk.Digest
	// Visible says which repositories' jobs are listed; nil: all. A next that names
	// another job would give it away.
	Visible func(repo string) bool
	After   string // what List returned as next
	Limit   int
}

// List returns jobs, the newest first, and where the next page begins, "" behind
// the last.
func (q *Queue) List(f Filter) (page []Status, next string) {
	q.mu.Lock()
	var all []Status
	for _, j := range q.jobs {
		if f.takes(j.rec) {
			all = append(all, j.status())
		}
	}
	q.mu.Unlock()
	slices.SortFunc(all, func(a, b Status) int { return strings.Compare(cursor(b.Record), cursor(a.Record)) })
	for _, st := range all {
		if f.After != "" && cursor(st.Record) >= f.After {
			continue
		}
		if len(page) == f.Limit {
			return page, next
		}
		page, next = append(page, st), cursor(st.Record)
	}
	return page, ""
}

func (f Filter) takes(r Record) bool {
	return (f.State == "" || f.State == r.State) && (f.Repo == "" || r.inRepo(f.Repo)) &&
		(f.Source.IsZero() || f.Source == r.Source) &&
		(f.Visible == nil || slices.ContainsFunc(r.Names, func(n Name) bool { return f.Visible(n.Repo) }))
}

// cursor is a text whose order is that of creation. 19 digits hold the nanoseconds
// of the years up to 2262.
func cursor(r Record) string {
	n := strconv.FormatInt(max(0, r.Created.UnixNano()), 10)
	return strings.Repeat("0", max(0, 19-len(n))) + n + "-" + r.ID()
}
