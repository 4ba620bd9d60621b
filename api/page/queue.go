package page

import (
	"cmp"
	"slices"
	"strings"
	"sync"
	"time"

	"quarry/store/chunk"
	"quarry/store/jobs"
)

const (
	// queueAge is how old the list of jobs may be: many who look cost one.
	queueAge = 500 * time.Millisecond
	// maxQueued and maxEnded bound the jobs looked at, by the queue's own bounds.
	maxQueued = jobs.DefaultMaxActive
	maxEnded  = jobs.DefaultKeep
	// shownJobs and shownFailures bound what is listed of each.
	shownJobs     = 50
	shownFailures = 50
)

// jobList is the queue as it was at one moment. It is not changed.
type jobList struct {
	active   []jobs.Status                  // running, then queued, the oldest first
	failed   []jobs.Status                  // the newest first
	bySource map[chunk.Digest][]jobs.Status // of both
}

// queueView keeps the newest list.
type queueView struct {
	mu    sync.Mutex // guards the rest
	list  *jobList
	taken time.Time
}

// jobs returns the queue as it is now, or was a moment ago.
func (p *Page) jobs() *jobList {
	if p.cfg.Jobs == nil {
		return &jobList{}
	}
	v := &p.queue
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.list != nil && p.cfg.Now().Sub(v.taken) < queueAge {
		return v.list
	}
	l := &jobList{bySource: map[chunk.Digest][]jobs.Status{}}
	for _, state := range []jobs.State{jobs.Running, jobs.Queued} {
		list, _ := p.cfg.Jobs.List(jobs.Filter{State: state, Limit: maxQueued})
		slices.Reverse(list)
		l.active = append(l.active, list...)
	}
	l.failed, _ = p.cfg.Jobs.List(jobs.Filter{State: jobs.Failed, Limit: maxEnded})
	slices.SortStableFunc(l.failed, func(a, b jobs.Status) int { return endOf(b).Compare(endOf(a)) })
	for _, list := range [][]jobs.Status{l.active, l.failed} {
		for _, st := range list {
			l.bySource[st.Source] = append(l.bySource[st.Source], st)
		}
	}
	v.list, v.taken = l, p.cfg.Now()
	return l
}

func endOf(st jobs.Status) time.Time {
	if st.Ended == nil {
		return st.Created
	}
	return *st.Ended
}

// jobLine is one job that is live.
type jobLine struct {
	Names    string
	Platform string
	State    string
	Step     string
	Percent  int64 // -1: not known
	Since    time.Time
	Attempts int
	Reason   string // why the attempt before did not end well
}

// failureLine is one conversion that did not end well.
type failureLine struct {
	Names  string
	State  string
	When   time.Time
	Blame  string
	Source string
	Layer  string
	Entry  string
	Reason string
}

// namesOf returns the names of a job that the viewer may know of, "" when none.
func namesOf(v Viewer, st jobs.Status) string {
	var names []string
	for _, n := range st.Names {
		if v.sees(n.Repo) {
			names = append(names, n.String())
		}
	}
	return strings.Join(names, ", ")
}

// live lists the active jobs, and says how many more there are.
func (l *jobList) live(v Viewer) (lines []jobLine, more int) {
	for _, st := range l.active {
		names := namesOf(v, st)
		if names == "" {
			continue
		}
		if len(lines) == shownJobs {
			more++
			continue
		}
		line := jobLine{Names: names, Platform: st.Platform, State: string(st.State), Since: st.Created, Attempts: st.Attempts, Percent: -1}
		if pr := st.Progress; pr != nil {
			line.Step = strings.TrimSpace(pr.Step + " " + pr.Item)
			if pr.Total > 0 {
				line.Percent = min(100, max(0, pr.Done*100/pr.Total))
			}
		}
		if st.Reason != nil {
			line.Reason = st.Reason.Message
		}
		lines = append(lines, line)
	}
	return lines, more
}

// failures lists what did not end well, the newest first: jobs, and the newest
// conversion of a name by a command.
func (l *jobList) failures(v Viewer, snap *snapshot) (lines []failureLine, more int) {
	for _, st := range l.failed {
		names := namesOf(v, st)
		if names == "" || st.Reason == nil {
			continue
		}
		lines = append(lines, failureLine{
			Names: names, State: "failed", When: endOf(st), Blame: st.Reason.Blame,
			Source: st.Source.String(), Layer: st.Reason.Layer, Entry: st.Reason.Entry, Reason: st.Reason.Message,
		})
	}
	if snap != nil {
		for name, f := range snap.failures {
			if v.sees(f.Repo) {
				line := failureLine{Names: name, State: f.State, When: f.Time, Blame: f.Blame, Source: f.Source, Reason: f.Reason}
				if line.Reason == "" {
					line.Reason = f.String()
				}
				lines = append(lines, line)
			}
		}
	}
	slices.SortFunc(lines, func(a, b failureLine) int { return cmp.Or(b.When.Compare(a.When), strings.Compare(a.Names, b.Names)) })
	shown := min(len(lines), shownFailures)
	return lines[:shown], len(lines) - shown
}
