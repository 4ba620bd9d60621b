package node

import (
	"fmt"
	"testing"

	"quarry/worker"
)

func TestAMountIsReadAheadOnce(t *testing.T) {
	a := ahead{mounts: map[string]worker.Served{}}
	one, next := worker.Served{PID: 1, Start: 7}, worker.Served{PID: 1, Start: 8}
	if !a.begin("/m", one) || !a.begin("/n", one) {
		t.Error("a mount that is new is not read ahead")
	}
	if one.FailedReads = 3; a.begin("/m", one) {
		t.Error("a mount is read ahead for its second sandbox")
	}
	if !a.begin("/m", next) {
		t.Error("a mount that was made anew is not read ahead")
	}
	a.forget("/m")
	if !a.begin("/m", next) {
		t.Error("of a mount nothing was read, and nobody tries again")
	}
	for i := range 3 * maxAheadMounts {
		a.begin(fmt.Sprint(i), one)
	}
	if n := len(a.mounts); n > maxAheadMounts {
		t.Errorf("%d mounts are kept in mind", n)
	}
}
