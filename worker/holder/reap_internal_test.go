package holder

import (
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"
)

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

// Who is told of the end finds all that the first process has written, however slowly it
// is read.
func TestTheLastOutputComesBeforeTheEnd(t *testing.T) {
	dir := t.TempDir()
	b := newBox(config{Dir: dir}, slog.New(slog.DiscardHandler), nil)
	read, write, err := outputPipe()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := write.WriteString("last"); err != nil {
		t.Fatal(err)
	}
	b.initEnds = map[int]*os.File{1: write}
	s := newStream(filepath.Join(dir, "stdout"), maxInitOutput, read, func() {})
	b.init = []*stream{s}
	b.tasks.Go(func() {
		time.Sleep(20 * time.Millisecond) // as on a busy machine
		s.drain()
	})
	b.finish(Ended{Sentry: notKnown, Gofer: notKnown})
	if got, err := os.ReadFile(s.path); err != nil || string(got) != "last" {
		t.Errorf("got %q, %v", got, err)
	}
	b.tasks.Wait()
}
