package page

import (
	"context"
	"fmt"
	"strings"

	"quarry/store/catalog"
	"quarry/store/chunk"
	"quarry/store/jobs"
)

const (
	// shownFamilies and shownMembers bound what is listed of each.
	shownFamilies = 20
	shownMembers  = 12
)

// view is what the template shows.
type view struct {
	Filter             string
	Page, Pages        int
	First, Last, Total int // names on this page, from 1, and of all that match
	Prev, Next         string
	Admin              bool
	Part               bool // the viewer does not see all names

	Rows         []row
	Jobs         []jobLine
	MoreJobs     int
	Failures     []failureLine
	MoreFailures int
	Families     []familyLine
	MoreFamilies int
	Groups       []group
	Notes        []string
	Sharing      string // how the comparison stands, "" when it is there
}

// row is one name.
type row struct {
	Repo, Tag string
	Failed    bool // its newest conversion did not end well, whatever it names
	Images    []imageLine
}

// imageLine is one image of a name: a platform of it.
type imageLine struct {
	Platform string
	State    string
	Reason   string
	Measured bool
	Files    int64
	Stored   int64
	Compared bool
	Alone    int64
	// Of a bar as long as the largest image of the page, in thousandths.
	AloneBar, SharedBar int64
}

// familyLine is one family.
type familyLine struct {
	Names  string
	More   int
	Images int
	Stored int64
	Saved  int64
	Share  int64 // Saved of Stored in percent
	Kept   int64 // the rest of it
}

func (p *Page) view(ctx context.Context, viewer Viewer, q query) *view {
	v := &view{Filter: q.repo, Admin: viewer.Admin}
	all := p.cfg.Catalog.Names()
	names := make([]catalog.Name, 0, len(all))
	for _, n := range all {
		if viewer.sees(n.Repo) {
			names = append(names, n)
		}
	}
	v.Part = len(names) < len(all)
	snap, list := p.snapshot(ctx), p.jobs()
	var cmp *comparison
	if snap != nil {
		cmp = p.sharingOf(v, viewer, snap, names)
		v.Notes = snap.notes
	} else {
		v.Notes = []string{"The bucket is being listed: states and sizes follow."}
	}
	for _, n := range v.choose(names, q) {
		v.Rows = append(v.Rows, p.row(n, snap, list, cmp))
	}
	v.bars()
	v.Jobs, v.MoreJobs = list.live(viewer)
	v.Failures, v.MoreFailures = list.failures(viewer, snap)
	if viewer.Admin {
		v.Groups = p.figures(len(all))
	}
	return v
}

// choose picks the names of the page that is asked for.
func (v *view) choose(names []catalog.Name, q query) []catalog.Name {
	match := names[:0:0]
	for _, n := range names {
		if strings.Contains(n.Repo, q.repo) {
			match = append(match, n)
		}
	}
	v.Total = len(match)
	v.Pages = max(1, (v.Total+perPage-1)/perPage)
	v.Page = min(q.page, v.Pages)
	from := (v.Page - 1) * perPage
	to := min(from+perPage, v.Total)
	v.First, v.Last = min(from+1, v.Total), to
	if v.Page > 1 {
		v.Prev = q.link(v.Page - 1)
	}
	if v.Page < v.Pages {
		v.Next = q.link(v.Page + 1)
	}
	return match[from:to]
}

// row says how one name stands.
func (p *Page) row(n catalog.Name, snap *snapshot, list *jobList, cmp *comparison) row {
	r := row{Repo: n.Repo, Tag: n.Tag}
	if snap == nil {
		r.Images = []imageLine{{State: "unknown"}}
		return r
	}
	_, r.Failed = snap.failures[n.Repo+":"+n.Tag]
	made := map[string]bool{}
	for _, st := range snap.images[n.Source] {
		made[st.platform.String()] = true
		r.Images = append(r.Images, p.imageLine(n, st, cmp))
	}
	for _, job := range list.bySource[n.Source] {
		if made[job.Platform] || job.Platform == "" && len(made) > 0 {
			continue // it is made again, and is there meanwhile
		}
		line := imageLine{Platform: job.Platform, State: stateOf(job.State)}
		if job.Reason != nil {
			line.Reason = job.Reason.Message
		}
		r.Images = append(r.Images, line)
	}
	if len(r.Images) == 0 {
		r.Images = []imageLine{{State: "missing", Reason: "there is no image of it, and no job makes one: push or convert it again"}}
	}
	return r
}

// stateOf is the word for a job that is still to make its image.
func stateOf(s jobs.State) string {
	switch s {
	case jobs.Running:
		return "converting"
	case jobs.Failed:
		return "failed"
	}
	return "pending"
}

func (p *Page) imageLine(n catalog.Name, st stated, cmp *comparison) imageLine {
	line := imageLine{Platform: st.platform.String(), State: "ready", Reason: st.problem}
	switch {
	case st.problem != "":
		line.State = "failed"
		return line
	case !st.signed || len(n.Statement) == 0:
		line.State = "unsigned"
	}
	if m, ok := p.measureOf(st.bootstrap); ok {
		line.Measured, line.Files, line.Stored, line.Reason = m.problem == "", m.files, m.stored, m.problem
	}
	if cmp != nil && line.Measured {
		line.Alone, line.Compared = cmp.alone[st.bootstrap]
	}
	return line
}

// bars gives each image its bar.
func (v *view) bars() {
	var largest int64 = 1
	for _, r := range v.Rows {
		for _, line := range r.Images {
			largest = max(largest, line.Stored)
		}
	}
	for _, r := range v.Rows {
		for i := range r.Images {
			line := &r.Images[i]
			if line.Compared {
				line.AloneBar = line.Alone * 1000 / largest
			}
			line.SharedBar = line.Stored*1000/largest - line.AloneBar
		}
	}
}

// sharingOf compares the images of the names that the viewer sees, so that the
// figures tell nothing of what others store.
func (p *Page) sharingOf(v *view, viewer Viewer, snap *snapshot, names []catalog.Name) *comparison {
	var images, repos []chunk.Digest
	nameOf := map[chunk.Digest]string{}
	last := ""
	for _, n := range names {
		if n.Repo != last {
			last = n.Repo
			repos = append(repos, chunk.Sum([]byte(n.Repo)))
		}
		for _, st := range snap.images[n.Source] {
			if _, there := nameOf[st.bootstrap]; !there && st.problem == "" {
				nameOf[st.bootstrap] = n.Repo + ":" + n.Tag
				images = append(images, st.bootstrap)
			}
		}
	}
	var id chunk.Digest // everything has the zero one
	if v.Part {
		id = sumOf(repos)
	}
	cmp, now := p.comparison(id, images)
	switch {
	case cmp == nil:
		v.Sharing = "What the images share is being computed."
		return nil
	case cmp.problem != "":
		v.Sharing = "What the images share is not computed: " + cmp.problem + "."
		return nil
	case !now:
		v.Sharing = fmt.Sprintf("What the images share is as of %s, and follows.", cmp.ended.UTC().Format("15:04 UTC"))
	}
	for _, f := range cmp.families {
		if len(v.Families) == shownFamilies {
			v.MoreFamilies++
			continue
		}
		if line, ok := familyOf(f, nameOf); ok {
			v.Families = append(v.Families, line)
		}
	}
	return cmp
}

// familyOf names the members that are still there.
func familyOf(f family, nameOf map[chunk.Digest]string) (familyLine, bool) {
	line := familyLine{Images: len(f.members), Stored: f.stored, Saved: f.saved}
	if f.stored > 0 {
		line.Share = f.saved * 100 / f.stored
	}
	line.Kept = 100 - line.Share
	var names []string
	for _, d := range f.members {
		if name, ok := nameOf[d]; ok {
			names = append(names, name)
		}
	}
	shown := min(len(names), shownMembers)
	line.Names, line.More = strings.Join(names[:shown], ", "), len(names)-shown
	return line, len(names) > 0
}
