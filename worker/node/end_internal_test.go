package node

import (
	"strings"
	"testing"

	"quarry/worker/sandbox"
)

func TestHowASandboxEnded(t *testing.T) {
	deleted := &cause{Reason: sandbox.ReasonDeleted, Message: "it was deleted"}
	zero := 0
	for name, c := range map[string]struct {
		f          facts
		reason     string
		blame      string
		retryable  bool
		limit, say string
		code       *int
	}{
		"it was deleted": {f: facts{asked: deleted}, reason: sandbox.ReasonDeleted, blame: sandbox.BlameUser},
		"it was deleted after a read of the image had failed": {
			f:      facts{asked: deleted, evidence: sandbox.Evidence{ImageIOErrors: 2}},
			reason: sandbox.ReasonImageIO, blame: sandbox.BlameInfra, retryable: true, say: "2 reads of the image failed while it ran; it was deleted",
		},
		"nobody counted the reads that failed": {
			f:      facts{asked: deleted, unserved: "the shim 7 has ended"},
			reason: sandbox.ReasonImageIO, blame: sandbox.BlameInfra, retryable: true, say: "1 reads",
		},
		"it used too much memory": {
			f:      facts{evidence: sandbox.Evidence{OOMKills: 1}, limitHits: 1, memoryMB: 512, exit: exit{known: true, signal: 9}},
			reason: sandbox.ReasonOOM, blame: sandbox.BlameAgent, limit: "memory", say: "512 MiB",
		},
		"the machine had no memory": {
			f:      facts{evidence: sandbox.Evidence{OOMKills: 1}, exit: exit{known: true, signal: 9}},
			reason: sandbox.ReasonHostOOM, blame: sandbox.BlameInfra, retryable: true,
		},
		"its first process ended": {
			f:      facts{exit: exit{known: true}, own: true},
			reason: sandbox.ReasonExited, blame: sandbox.BlameAgent, code: &zero,
		},
		"its first process ended, having read what was not there": {
			f:      facts{exit: exit{known: true}, evidence: sandbox.Evidence{ImageIOErrors: 1}},
			reason: sandbox.ReasonImageIO, blame: sandbox.BlameInfra, retryable: true, code: &zero,
		},
		"its first process ended, and the disk was full while it ran": {
			f:      facts{exit: exit{known: true}, own: true, wasFull: true},
			reason: sandbox.ReasonDiskFull, blame: sandbox.BlameInfra, retryable: true, code: &zero, say: "its first process ended with status 0",
		},
		"it was deleted, and the disk was full while its first process ran": {
			f:      facts{asked: deleted, own: true, wasFull: true},
			reason: sandbox.ReasonDiskFull, blame: sandbox.BlameInfra, retryable: true,
		},
		"it was deleted, and its execs tell that the disk was full": {
			f:      facts{asked: deleted, wasFull: true},
			reason: sandbox.ReasonDeleted, blame: sandbox.BlameUser,
		},
		"its Sentry was killed": {
			f:      facts{exit: exit{known: true, signal: 9}},
			reason: sandbox.ReasonRuntime, blame: sandbox.BlameInfra, retryable: true, say: "its Sentry was ended by signal 9",
		},
		"its gofer was killed": {
			f:      facts{exit: exit{known: true, gofer: 9}},
			reason: sandbox.ReasonRuntime, blame: sandbox.BlameInfra, retryable: true, say: "gofer",
		},
		"the disk was full": {
			f:      facts{exit: exit{known: true, signal: 7}, wasFull: true},
			reason: sandbox.ReasonDiskFull, blame: sandbox.BlameInfra, retryable: true,
		},
		"it forked too much": {
			f:      facts{exit: exit{known: true, signal: 6}, evidence: sandbox.Evidence{PIDsRefused: 3}},
			reason: sandbox.ReasonRuntime, blame: sandbox.BlameAgent, limit: "pids",
		},
		"its holder was killed": {
			f:      facts{exit: exit{lost: true}},
			reason: sandbox.ReasonNodeLost, blame: sandbox.BlameInfra, retryable: true,
		},
		"its image is not there": {
			f:      facts{asked: &cause{Reason: sandbox.ReasonImage, Blame: sandbox.BlameUser}},
			reason: sandbox.ReasonImage, blame: sandbox.BlameUser,
		},
		"its image was not had": {
			f:      facts{asked: &cause{Reason: sandbox.ReasonImage}},
			reason: sandbox.ReasonImage, blame: sandbox.BlameInfra, retryable: true,
		},
		"its image is not what was signed": {
			f:      facts{asked: &cause{Reason: sandbox.ReasonVerify}},
			reason: sandbox.ReasonVerify, blame: sandbox.BlameInfra,
		},
	} {
		t.Run(name, func(t *testing.T) {
			e := c.f.ended()
			if e.Reason != c.reason || e.Blame != c.blame || e.Retryable != c.retryable || e.Limit != c.limit || !strings.Contains(e.Message, c.say) {
				t.Errorf("got %+v", e)
			}
			if (e.ExitCode == nil) != (c.code == nil) {
				t.Errorf("exit code: got %v", e.ExitCode)
			}
			if e.Blame == sandbox.BlameAgent && e.Retryable {
				t.Error("what the agent did is not to be tried again")
			}
		})
	}
}
