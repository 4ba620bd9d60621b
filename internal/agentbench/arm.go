package agentbench

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/worker/network/apart"
	"quarry/worker/sandbox"
)

// modelAddr is where the model is, of a range that is for examples alone.
var modelAddr = netip.MustParseAddrPort("203.0.113.10:8000")

const (
	// creates is how many sandboxes are made at once.
	creates = 2
	// sentryMemory is what a sandbox may have beside what its agent holds.
	sentryMemory = 192 << 20
	// Of Config.Patience, which is for one agent that has its answer, a restore may take
	// twice as much, as may the end of all sandboxes, and all agents four times: to begin,
	// beside a second each, and to check their memory at the end, beside a second for each
	// checkedInASecond of it.
	toWake           = 2
	toEnd            = 2
	toBegin          = 4
	toFinish         = 4
	checkedInASecond = 32 << 20
	lookEvery        = 500 * time.Millisecond
	sampleEvery      = 200 * time.Millisecond
)

// trial is the measurement of one arm.
type trial struct {
	*run
	arm Arm
	w   *measured
	m   *model

	mu    sync.Mutex
	index map[string]int // agents by sandbox
	gone  map[string]bool
}

// measure measures an arm, from a worker's start to its end.
func (r *run) measure(ctx context.Context, arm Arm) (res Result, err error) {
	pair, err := apart.New(r.dir, modelAddr.Addr())
	if err != nil {
		return res, err
	}
	defer func() { err = errors.Join(err, pair.Close()) }()
	life, end := context.WithCancel(ctx)
	t := &trial{run: r, arm: arm, m: newModel(life, r.Config), index: map[string]int{}, gone: map[string]bool{}}
	if t.w, err = r.startWorker(pair, arm); err != nil {
		end()
		return res, err
	}
	defer func() { err = errors.Join(err, t.w.stop()) }()
	l, err := pair.Listen(modelAddr)
	if err != nil {
		end()
		return res, err
	}
	s := &http.Server{Handler: t.m, ReadHeaderTimeout: time.Minute}
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }() // ends with Close
	defer func() {
		end()
		s.Close()
		<-served
		t.m.all.Wait()
	}()
	if arm == ArmHibernate {
		t.m.wake = t.wake
	}
	return t.story(ctx)
}

// story is what happens: agents begin, they are measured, they check everything, they
// are ended.
func (t *trial) story(ctx context.Context) (res Result, err error) {
	defer func() { err = errors.Join(err, t.endAll()) }()
	begun := time.Now()
	looking, stop := context.WithCancel(ctx)
	var looks sync.WaitGroup
	looks.Go(func() { t.look(looking) })
	defer func() { stop(); looks.Wait() }()
	if err := t.createAll(ctx); err != nil {
		return res, fmt.Errorf("%w; the worker said: %s", err, t.w.said())
	}
	patience := toBegin*t.Patience + time.Duration(t.Agents)*time.Second + t.scaled(maxWait)
	if !t.until(ctx, patience, func(a *agent) bool { return a.step >= 1 }) && ctx.Err() == nil {
		t.m.fail("did not begin", "some agents have not taken their first step in %v", patience)
	}
	t.say("%s: all agents have begun after %v", t.arm, time.Since(begun).Round(time.Second))
	from := time.Now()
	s, err := t.sample(ctx, t.Duration)
	if err != nil {
		return res, err
	}
	to := time.Now()
	close(t.m.finish)
	patience = toFinish*t.Patience + time.Duration(int64(t.Agents)*t.AgentMemory/checkedInASecond)*time.Second
	if !t.until(ctx, patience, func(a *agent) bool { return a.checked }) && ctx.Err() == nil {
		t.m.fail("not checked", "some agents have not checked all their memory in %v", patience)
	}
	if ctx.Err() != nil {
		return res, context.Cause(ctx)
	}
	res = t.result(ctx, s, from, to)
	t.say("%s: measured after %v", t.arm, time.Since(begun).Round(time.Second))
	return res, nil
}

// until waits until something holds for all that live.
func (t *trial) until(ctx context.Context, d time.Duration, holds func(*agent) bool) bool {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	for !t.m.each(holds) {
		select {
		case <-ctx.Done():
			return false
		case <-time.After(10 * time.Millisecond):
		}
	}
	return true
}

func (t *trial) createAll(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(creates)
	for i := range t.Agents {
		g.Go(func() error {
			sb, err := t.w.Create(ctx, t.spec(i), "")
			if err != nil {
				return fmt.Errorf("create agent %d: %w", i, err)
			}
			t.mu.Lock()
			t.index[sb.ID] = i
			t.mu.Unlock()
			t.m.mu.Lock()
			t.m.agents[i].sandbox = sb.ID
			t.m.mu.Unlock()
			return nil
		})
	}
	return g.Wait()
}

// spec is of an agent's sandbox.
func (r *run) spec(i int) sandbox.Spec {
	return sandbox.Spec{
		// One may have no more than all have together.
		Image: imageName, Entrypoint: r.agentWords(i), MemoryMB: min(r.AgentMemory+sentryMemory, r.Memory) >> 20, DiskMB: 64, PIDs: 64,
		// What each of them is promised is its share of what is given.
		MemoryRequest: max(1, min(r.Memory/int64(r.Agents), r.AgentMemory)>>20),
		Network:       sandbox.Policy{Allow: []sandbox.Rule{{CIDR: netip.PrefixFrom(modelAddr.Addr(), 32).String()}}},
	}
}

func (r *run) agentWords(i int) []string {
	words := []string{agentPath, "agent", "model=" + modelAddr.String()}
	for _, w := range []struct {
		name  string
		value int64
	}{
		{"index", int64(i)}, {"mib", r.AgentMemory >> 20}, {"hot", int64(r.Hot)}, {"moving", int64(r.Moving)}, {"cold", int64(r.Cold)},
		{"work", r.scaled(work).Milliseconds()}, {"body", questionSize}, {"seed", int64(r.Seed%1000_000)*10_000 + int64(i)},
	} {
		words = append(words, fmt.Sprint(w.name, "=", w.value))
	}
	return words
}

// look notes sandboxes that have ended, until ctx ends.
func (t *trial) look(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(lookEvery):
		}
		t.lookOnce(ctx)
	}
}

func (t *trial) lookOnce(ctx context.Context) {
	t.mu.Lock()
	known := map[string]int{}
	for id, i := range t.index {
		if !t.gone[id] {
			known[id] = i
		}
	}
	t.mu.Unlock()
	live, err := t.w.List(ctx, sandbox.Filter{})
	if err != nil {
		return // the next look tells
	}
	for _, sb := range live {
		delete(known, sb.ID)
	}
	for id, i := range known {
		sb, err := t.w.Get(ctx, id)
		if err != nil || sb.End == nil {
			continue
		}
		t.mu.Lock()
		t.gone[id] = true
		t.mu.Unlock()
		t.m.mu.Lock()
		t.m.agents[i].ended = true
		t.m.mu.Unlock()
		t.m.fail("ended: "+sb.End.Reason, "agent %d: %s", i, sb.End.Message)
	}
}

// endAll ends all sandboxes, also when the run was interrupted.
func (t *trial) endAll() error {
	ctx, cancel := context.WithTimeout(context.Background(), toEnd*t.Patience)
	defer cancel()
	live, err := t.w.List(ctx, sandbox.Filter{})
	if err != nil {
		return err
	}
	var g errgroup.Group
	g.SetLimit(8)
	for _, sb := range live {
		g.Go(func() error {
			_, err := t.w.Delete(ctx, sb.ID)
			if errors.Is(err, sandbox.ErrEnded) || errors.Is(err, sandbox.ErrUnknown) {
				return nil
			}
			return err
		})
	}
	return g.Wait()
}
