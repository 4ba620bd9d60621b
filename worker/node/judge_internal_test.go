package node

import (
	"fmt"
	"testing"

	"quarry/worker/holder"
)

// However many execs a sandbox has had, the node knows of a bounded number, and never
// forgets one that runs.
func TestTheExecsThatAreWatchedAreBounded(t *testing.T) {
	b := &box{watched: map[string]bool{}, begun: map[string]begin{"runs": {}}, blamed: map[string]string{}}
	if !b.watches("runs") || b.watches("runs") {
		t.Fatal("the first is not watched once")
	}
	for i := range 5 * holder.KeptExecs {
		if id := fmt.Sprint(i); !b.watches(id) || b.watches(id) {
			t.Fatalf("exec %d is not watched once", i)
		}
	}
	if len(b.watched) > 2*holder.KeptExecs+1 || len(b.inTurn) != len(b.watched) {
		t.Errorf("%d are known, %d in turn", len(b.watched), len(b.inTurn))
	}
	if b.watches("runs") {
		t.Error("the one that runs is forgotten")
	}
}
