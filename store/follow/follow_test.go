package follow_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"quarry/store/catalog"
	"quarry/store/follow"
)

// journal is a store that answers as it is told to.
type journal struct {
	mu    sync.Mutex // guards the rest
	err   error
	parts int // not whole yet
	polls int
}

func (j *journal) Follow(_ context.Context, left func(int)) (bool, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.polls++
	if j.parts > 0 {
		j.parts--
		left(j.parts)
		return false, nil
	}
	if j.err != nil {
		left(4)
	}
	return j.err == nil, j.err
}

func (j *journal) count() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.polls
}

func (j *journal) set(err error, parts int) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.err, j.parts = err, parts
}

func start(t *testing.T, j *journal) (*follow.Follower, *bytes.Buffer) {
	t.Helper()
	var log bytes.Buffer
	f := follow.New(follow.Config{Store: j, Log: slog.New(slog.NewJSONHandler(&log, nil)), Applied: func() uint64 { return 7 }})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); f.Run(ctx) }() // ends with ctx
	t.Cleanup(func() { cancel(); <-done })
	return f, &log
}

func TestANodeThatFollowsIsReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal{parts: 5}
		f, _ := start(t, j)
		synctest.Wait()
		if got := j.count(); got != 6 {
			t.Errorf("%d polls before the first pause, want 6: it was behind", got)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		if err := f.Ready(); err != nil {
			t.Errorf("not ready: %v", err)
		}
		if l := f.Lag(); l.Entries != 0 || l.Seconds > 2*follow.Every.Seconds() || l.Applied != 7 || l.Error != "" {
			t.Errorf("got lag %+v", l)
		}
		if low, high := int(time.Hour/follow.Every*4/5), int(time.Hour/follow.Every*4/3); j.count() < low || j.count() > high {
			t.Errorf("%d polls in an hour, want %d to %d", j.count(), low, high)
		}
	})
}

// TestABucketThatComesAndGoes: a short absence is none that anybody has to hear of.
func TestABucketThatComesAndGoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		j := &journal{}
		f, log := start(t, j)
		time.Sleep(time.Minute)
		j.set(errors.New("connection refused"), 0)
		time.Sleep(follow.MaxLag / 2)
		if err := f.Ready(); err != nil {
			t.Errorf("not ready too soon: %v", err)
		}
		time.Sleep(10 * time.Minute)
		err := f.Ready()
		if err == nil || !strings.Contains(err.Error(), "connection refused") || !strings.Contains(err.Error(), "5 entries and 6") {
			t.Errorf("ready: %v, want how far behind, and why", err)
		}
		j.set(nil, 0)
		time.Sleep(2 * follow.Every)
		if err := f.Ready(); err != nil {
			t.Errorf("not ready again: %v", err)
		}
		synctest.Wait()
		if got := strings.Count(log.String(), "\n"); got != 2 {
			t.Errorf("%d lines in the log, want one when it went and one when it came:\n%s", got, log)
		}
	})
}

func TestAJournalThatCannotBeDecodedIsToldAtOnce(t *testing.T) {
	for _, stuck := range []error{catalog.ErrDamaged, catalog.ErrNewer, catalog.ErrDiverged} {
		synctest.Test(t, func(t *testing.T) {
			j := &journal{}
			f, log := start(t, j)
			time.Sleep(time.Minute)
			j.set(stuck, 0)
			time.Sleep(2 * follow.Every)
			synctest.Wait()
			if err := f.Ready(); !errors.Is(err, stuck) {
				t.Errorf("ready: %v, want %v", err, stuck)
			}
			if !strings.Contains(log.String(), `"level":"ERROR"`) {
				t.Errorf("the log has no error:\n%s", log)
			}
		})
	}
}
