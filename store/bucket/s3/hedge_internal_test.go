package s3

import (
	"testing"
	"time"
)

func TestSecondRequestsAreFew(t *testing.T) {
	var p pace
	spent := 0
	for range 10000 { // all of them slow
		p.add(time.Second)
		if p.spend() {
			spent++
		}
	}
	if limit := 10000/hedgeCost + samples; spent > limit || spent < 10000/hedgeCost/2 {
		t.Errorf("%d second requests for 10000 reads, want at most %d, and half of that", spent, limit)
	}
}

func TestTheDelayIsThatOfTheSlowest(t *testing.T) {
	var p pace
	if got := p.delay(); got != maxHedge {
		t.Errorf("without reads: %s, want %s", got, maxHedge)
	}
	for i := range samples {
		p.add(time.Duration(i) * 10 * time.Millisecond)
	}
	if got := p.delay(); got != 600*time.Millisecond {
		t.Errorf("got %s, want 600ms, which 61 of 64 reads took at most", got)
	}
	for range samples {
		p.add(time.Microsecond)
	}
	if got := p.delay(); got != minHedge {
		t.Errorf("fast reads: %s, want %s", got, minHedge)
	}
}
