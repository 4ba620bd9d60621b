package wait

import "time"

// Idle decides for a sandbox whose agent is outside of it: between the agent's
// commands there is nothing for it to do. It pauses one in which no foreground
// command has run and almost no processor was used for a time.
//
// It has no clock, no goroutine and no lock. Reads of logs, states and files are not
// told to it: who looks at a sandbox keeps it neither awake nor wakes it.
type Idle struct {
	after time.Duration
	share float64

	uses   int
	paused bool
	since  time.Time // nothing was done since
	mark   sample
	next   time.Time
}

// idleParts is how many parts of the time are looked at by themselves, so that work
// that ends is followed by a pause after the time and a part of it at most.
const idleParts = 4

// NewIdle makes one that pauses after a time in which at most this share of one
// processor is used; 0 is the 2 % that a runtime's own timers need.
func NewIdle(after time.Duration, share float64, now time.Time) *Idle {
	if share <= 0 {
		share = 0.02
	}
	i := &Idle{after: after, share: share}
	i.begin(now)
	return i
}

func (i *Idle) begin(now time.Time) {
	i.since, i.mark, i.next = now, sample{}, now
}

// Use notes a foreground command or a file that is written, and says whether the
// sandbox must be resumed before it. Every Use is ended by one Done.
func (i *Idle) Use() (resume bool) {
	i.uses++
	return i.paused
}

// Done notes that what was used is used no more.
func (i *Idle) Done(now time.Time) {
	i.uses--
	i.begin(now)
}

// Paused notes that the sandbox is paused or runs, whoever did that.
func (i *Idle) Paused(is bool, now time.Time) {
	if i.paused && !is {
		i.begin(now)
	}
	i.paused = is
}

// Next is when Sample is to be called; the zero time is not before the next Done or
// Paused.
func (i *Idle) Next() time.Time {
	if i.paused || i.uses > 0 || i.after <= 0 {
		return time.Time{}
	}
	return i.next
}

// Sample takes the processor time that the sandbox has used in all, and says whether
// to pause it. With an error of the reading, or while it is busy by what else is
// known of it, it is not idle.
func (i *Idle) Sample(cpu time.Duration, err error, busy bool, now time.Time) (pause bool) {
	if i.Next().IsZero() || now.Before(i.next) {
		return false
	}
	last := i.mark
	i.mark, i.next = sample{now, cpu}, now.Add(max(i.after/idleParts, time.Millisecond))
	switch used := cpu - last.cpu; {
	case err != nil || busy:
		i.since, i.mark = now, sample{}
		return false
	case last.at.IsZero():
		i.since = now
		return false
	case used < 0 || float64(used) > i.share*float64(now.Sub(last.at)):
		i.since = now
		return false
	}
	return now.Sub(i.since) >= i.after
}
