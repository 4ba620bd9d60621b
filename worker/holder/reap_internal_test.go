package holder

import "testing"

// A Sentry that exits with a status before it was asked has ended with its first process,
// unless that is the sleeper, which never exits by itself.
func TestWhoseEndASentrysIs(t *testing.T) {
	for _, c := range []struct {
		name       string
		entrypoint bool
		status     int
		want       bool
	}{
		{"the first process's", true, 3 << 8, true},
		{"its success", true, 0, true},
		{"runsc's own failure", true, 128 << 8, false},
		{"a signal", true, 9, false},
		{"nobody saw it", true, notKnown, false},
		{"the sleeper's", false, 3 << 8, false},
	} {
		b := newBox(config{Dir: t.TempDir(), Entrypoint: c.entrypoint}, nil, nil)
		if got := b.endedItself(Ended{Sentry: c.status, Gofer: 0}); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}
