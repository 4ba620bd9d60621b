package node

import "testing"

// A hibernation that was begun because a pause is known to be long is none of the pause
// after it.
func TestANapIsForThePauseItWasMeantFor(t *testing.T) {
	r := newBoxRig(t)
	must := func(fn func() error) {
		t.Helper()
		if err := r.locked(fn); err != nil {
			t.Fatal(err)
		}
	}
	pause := func() error { return r.b.hold(byCall) }
	resume := func() error { return r.b.letGo(byCall) }
	meant := func() error { r.b.napForCall(); return nil }
	turn := r.b.n.naps
	for name, c := range map[string]struct {
		between []func() error
		naps    bool
	}{
		"the same pause":      {nil, true},
		"the next one":        {[]func() error{resume, pause}, false},
		"its model's":         {[]func() error{func() error { return r.b.hold(byModel) }, resume}, false},
		"no pause any more":   {[]func() error{resume}, false},
		"its model waits too": {[]func() error{func() error { return r.b.hold(byModel) }, func() error { return r.b.letGo(byModel) }}, true},
	} {
		must(pause)
		turn <- struct{}{} // another one is being put to disk
		must(meant)
		for _, fn := range c.between {
			must(fn)
		}
		<-turn
		r.b.n.work.Wait()
		if got := r.b.napping(); got != c.naps {
			t.Errorf("%s: hibernated %v", name, got)
		}
		must(func() error { return r.b.letGo(byCall | byModel) })
	}
}
