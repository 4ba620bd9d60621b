package node

import (
	"fmt"
	"strings"
	"time"

	"quarry/worker/sandbox"
)

// cause is why a node ends a sandbox, or has found it ended.
type cause struct {
	Reason  string    `json:"reason"`
	Message string    `json:"message"`
	Limit   string    `json:"limit"`
	Blame   string    `json:"blame"` // "" is what blame says
	At      time.Time `json:"at"`
}

// exit is how the Sentry ended, when that is known.
type exit struct {
	known   bool
	status  int  // of the first process
	signal  int  // that ended the Sentry
	gofer   int  // signal that ended the gofer before
	restore bool // it ended because it could not be restored
	lost    bool // the holder has ended, so nobody collected the status
	detail  string
}

// facts is all that tells how a sandbox ended.
type facts struct {
	asked     *cause // the node's own decision
	exit      exit
	evidence  sandbox.Evidence
	limitHits int64  // how often its memory limit was reached
	unserved  string // why reads of the image may have failed uncounted
	wasFull   bool   // the node's disk was, while the sandbox was there
	own       bool   // it had a first process of its own, which no exec speaks for
	memoryMB  int64
	at        time.Time
}

// scarceDisk is how little room on the node's disk counts as none: a Sentry is killed
// by what it cannot write to its file of the upper layer.
const scarceDisk = 4 << 20

// ended says how it ended, who is to blame, and whether trying again may help. An end
// that the sandbox did not cause is never its fault.
func (f facts) ended() sandbox.End {
	e := sandbox.End{At: f.at, Evidence: f.evidence}
	switch {
	case f.asked != nil:
		e.Reason, e.Message, e.Limit = f.asked.Reason, f.asked.Message, f.asked.Limit
	case f.evidence.OOMKills > 0 && f.limitHits > 0:
		e.Reason, e.Limit = sandbox.ReasonOOM, "memory"
		e.Message = fmt.Sprintf("it used more than its %d MiB of memory", f.memoryMB)
	case f.evidence.OOMKills > 0:
		e.Reason, e.Message = sandbox.ReasonHostOOM, "the machine had no memory left, and the kernel ended it"
	case f.exit.restore:
		e.Reason, e.Message = sandbox.ReasonRestore, "it was hibernated and could not be restored: "+f.exit.detail
	case f.exit.known && f.exit.signal == 0 && f.exit.gofer == 0:
		e.Reason = sandbox.ReasonExited
		status := f.exit.status
		e.ExitCode = &status
		e.Message = fmt.Sprintf("its first process ended with status %d", status)
	case f.wasFull:
		e.Reason, e.Message = sandbox.ReasonDiskFull, "the node's disk was full, and the sandbox's runtime ended"
	case f.exit.lost:
		e.Reason, e.Message = sandbox.ReasonNodeLost, "the node's process that held it has ended"
	default:
		e.Reason, e.Signal = sandbox.ReasonRuntime, f.exit.signal
		e.Message = f.exit.crash()
		if f.evidence.PIDsRefused > 0 {
			e.Limit = "pids"
			e.Message = "it had more processes than the machine gives it, which its runtime did not survive"
		}
	}
	if f.asked != nil && f.exit.known && f.exit.signal == 0 && e.Reason == sandbox.ReasonExited {
		status := f.exit.status
		e.ExitCode = &status
	}
	e = f.withFullDisk(f.withImageErrors(e))
	e.Blame, e.Retryable = blame(e)
	if f.asked != nil && f.asked.Blame != "" && e.Reason == f.asked.Reason {
		e.Blame, e.Retryable = f.asked.Blame, false
	}
	return e
}

// withFullDisk lets a full disk of the node stand before what it may have caused in the
// first process: that may have swallowed that a write failed. An exec has its own mark.
func (f facts) withFullDisk(e sandbox.End) sandbox.End {
	if !f.wasFull || !f.own {
		return e
	}
	switch e.Reason {
	case sandbox.ReasonDeleted, sandbox.ReasonExited, sandbox.ReasonTTL, sandbox.ReasonIdle, sandbox.ReasonDrained:
		e.Message = "the node's disk was full while it ran, and what its first process wrote may have failed for that; " + e.Message
		e.Reason = sandbox.ReasonDiskFull
	}
	return e
}

// withImageErrors lets failed reads of the image stand before what they may have
// caused: what ran may have taken them for the truth.
func (f facts) withImageErrors(e sandbox.End) sandbox.End {
	if f.evidence.ImageIOErrors == 0 && f.unserved == "" {
		return e
	}
	if f.unserved != "" {
		e.Evidence.ImageErrors = append(e.Evidence.ImageErrors, f.unserved)
		e.Evidence.ImageIOErrors = max(e.Evidence.ImageIOErrors, 1)
	}
	switch e.Reason {
	case sandbox.ReasonDeleted, sandbox.ReasonExited, sandbox.ReasonTTL, sandbox.ReasonIdle, sandbox.ReasonRuntime, sandbox.ReasonDrained:
		e.Message = fmt.Sprintf("%d reads of the image failed while it ran; %s", e.Evidence.ImageIOErrors, e.Message)
		e.Reason = sandbox.ReasonImageIO
	}
	return e
}

func (x exit) crash() string {
	var parts []string
	switch {
	case x.gofer != 0:
		parts = append(parts, fmt.Sprintf("its gofer was ended from outside by signal %d", x.gofer))
	case x.signal != 0:
		parts = append(parts, fmt.Sprintf("its Sentry was ended by signal %d", x.signal))
	case !x.known:
		parts = append(parts, "its Sentry has ended, and nobody knows how")
	}
	if x.detail != "" {
		parts = append(parts, x.detail)
	}
	return strings.Join(parts, ": ")
}

// blame says who has to act on an end, and whether the same again may end otherwise.
func blame(e sandbox.End) (who string, retryable bool) {
	switch e.Reason {
	case sandbox.ReasonDeleted:
		return sandbox.BlameUser, false
	case sandbox.ReasonTTL, sandbox.ReasonIdle:
		return sandbox.BlameUser, false
	case sandbox.ReasonExited, sandbox.ReasonOOM:
		return sandbox.BlameAgent, false
	case sandbox.ReasonVerify:
		return sandbox.BlameInfra, false
	case sandbox.ReasonRuntime:
		if e.Limit == "pids" {
			return sandbox.BlameAgent, false
		}
	}
	return sandbox.BlameInfra, true
}
