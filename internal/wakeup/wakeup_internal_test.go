package wakeup

import (
	"context"
	"encoding/binary"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"quarry/internal/need"
)

// rig is a request that goes to a plain file, by a clock that the test moves.
type rig struct {
	*Latency
	t     *testing.T
	path  string
	clock atomic.Int64
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t, path: filepath.Join(t.TempDir(), "cpu_dma_latency")}
	if err := os.WriteFile(r.path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.clock.Store(int64(time.Hour))
	var err error
	if r.Latency, err = open(r.path, polling, func() time.Duration { return time.Duration(r.clock.Load()) }); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { r.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		done.Wait()
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// asked waits until the kernel was last asked for that.
func (r *rig) asked(want uint32) {
	r.t.Helper()
	var got []byte
	for range 6000 {
		if got, _ = os.ReadFile(r.path); len(got) == 4 && binary.NativeEndian.Uint32(got) == want {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	r.t.Fatalf("the kernel was asked for %d, want %d", got, want)
}

func (r *rig) note(n int, apart time.Duration) {
	for range n {
		r.clock.Add(int64(apart))
		r.Note()
	}
}

func TestTheKernelIsAskedWhileReadsFollowOneAnother(t *testing.T) {
	r := newRig(t)
	r.note(2*streak, 2*near) // each by itself
	select {
	case <-r.wanted:
		t.Fatal("the kernel is asked for reads that are far apart")
	default:
	}
	r.note(streak+1, near/2)
	r.asked(polling)
	if r.Held() != 0 {
		t.Errorf("asked for %s, and it is still", r.Held())
	}
	r.clock.Add(int64(hold))
	r.asked(anything)
	r.note(streak+1, near/2)
	r.asked(polling)
	if r.Held() < hold {
		t.Errorf("the kernel was asked for %s in all, want %s at least", r.Held(), hold)
	}
}

func TestTheKernelTakesTheRequest(t *testing.T) {
	need.Root(t)
	if _, err := os.Stat(devicePath); err != nil {
		need.Missing(t, devicePath)
	}
	l, err := Open()
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, micros := range []uint32{l.value, anything} {
		if err := l.ask(micros); err != nil {
			t.Fatal(err)
		}
		raw, err := os.ReadFile(devicePath)
		if err != nil {
			t.Fatal(err)
		}
		if got := binary.NativeEndian.Uint32(raw); micros == l.value && got > micros {
			t.Errorf("the kernel heeds %d µs, want %d or less", got, micros)
		}
	}
}

func TestNoRequestIsMadeWhereTheKernelTakesNone(t *testing.T) {
	if _, err := open(filepath.Join(t.TempDir(), "none"), polling, nil); err == nil {
		t.Error("a file that is not there was opened")
	}
	var l *Latency
	l.Note()
	l.Run(t.Context())
	if l.Held() != 0 || l.Close() != nil {
		t.Error("no request asks for something")
	}
}
