package worker

import (
	"context"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
)

// A keeper that is stopped, frozen or stuck holds its lock, so that no other takes its
// place: a command that needs one looks whether it runs, and kills one that does not.

// keeperLooks is how many looks in a row, superviseEvery apart, may find that the
// keeper has not run. One that has nothing to do does every scanEvery. A reader that
// became deaf as well is killed by the next keeper soon enough for startTimeout.
const keeperLooks = 5

const _ = uint64(startTimeout - (keeperLooks+1)*superviseEvery - deafAfter - 2*listenEvery)

// rest counts the looks in a row that found a process as the look before had found it:
// it has not run at all. Looks are counted, and not the time, which goes on while a
// machine sleeps, or jumps.
type rest struct {
	switches uint64
	looks    int
}

func (r *rest) look(p *proc.Process) int {
	n, err := p.Switches()
	if err != nil || n != r.switches {
		r.switches, r.looks = n, 0
	} else {
		r.looks++
	}
	return r.looks
}

// keeperWatch is what a command knows of the keeper.
type keeperWatch struct {
	w    *Worker
	pid  int
	rest rest
}

// look kills the keeper when it has not run for keeperLooks looks, and waits for a
// moment for its end. It reports whether it did.
func (k *keeperWatch) look(ctx context.Context) bool {
	p, err := proc.Holder(k.w.Dir.KeeperLock())
	if err != nil {
		return false
	}
	defer p.Close()
	if p.PID() != k.pid {
		k.pid, k.rest = p.PID(), rest{}
	}
	looks := k.rest.look(p)
	if looks < keeperLooks {
		return false
	}
	k.w.log().WarnContext(ctx, "keeper does not run any more and is killed; another is started", "pid", k.pid, "looks", looks, "every", superviseEvery)
	k.pid = 0
	p.Signal(unix.SIGKILL)
	ctx, cancel := context.WithTimeout(ctx, superviseEvery)
	defer cancel()
	p.Wait(ctx)
	return true
}

// killStopped waits, when the keeper is stopped, until it runs again or is killed. A
// look at one that runs is cheap: a command may end before supervised has looked often
// enough to tell.
func (w *Worker) killStopped(ctx context.Context) {
	k := keeperWatch{w: w}
	for n := 0; n < 2*keeperLooks && proc.HolderStopped(w.Dir.KeeperLock()); n++ {
		if k.look(ctx) || !sleep(ctx, superviseEvery) {
			return
		}
	}
}
