package e2e_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"quarry/api/sandboxes/client"
	"quarry/worker/sandbox"
)

const (
	// randomSeed makes the calls of TestRandomCallsWithFaults; how they fall together
	// is the machine's.
	randomSeed = 7
	// randomTime is how long they are made, and randomFaults how many faults there are
	// meanwhile.
	randomTime   = 40 * time.Second
	randomFaults = 8
	randomUsers  = 5
	// randomSandboxes are there at most, so that what is judged in the end is as much on
	// every machine, and judgesAtOnce is how many of them are judged at a time.
	randomSandboxes = 32
	judgesAtOnce    = 8
	// keyLabel has the key of the create, by which a list tells whose a sandbox is.
	keyLabel = "key"
)

// randomSpec is what they make.
func randomSpec(key string) sandbox.Spec {
	return sandbox.Spec{Image: "t/task", MemoryMB: 128, DiskMB: 64, Labels: map[string]string{keyLabel: key}}
}

var randomFlags = []string{"--max-sandboxes", strconv.Itoa(randomSandboxes)}

// callStorm is what the users of a random test share.
type callStorm struct {
	r     *workerRig
	files map[string][sha256.Size]byte // of the image

	mu      sync.Mutex
	made    map[string]string // sandbox to the key of its create
	unknown map[string]bool   // keys of creates that were not answered with a sandbox
	execs   map[string]string // exec to its sandbox
	wrong   []string
	calls   map[string]int
	asks    *client.Client // of the worker at asked
	asked   string
}

func (s *callStorm) note(call string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[call]++
}

func (s *callStorm) accuse(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.wrong) < 20 {
		s.wrong = append(s.wrong, fmt.Sprintf(format, args...))
	}
}

// client asks the worker that serves now. There is one for all of its calls: connections
// that nobody uses any more count, for two minutes, among those that a worker has at once.
func (s *callStorm) client() *client.Client {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.asked == s.r.url {
		return s.asks
	}
	c, err := client.New(client.Config{URL: s.r.url, Token: s.r.token})
	if err != nil {
		panic(err)
	}
	s.asks, s.asked = c, s.r.url
	return c
}

// TestRandomCallsWithFaults makes calls of all kinds while the worker, Sentries and
// holders are killed. Whatever happens, every sandbox is there or has a record, no exec
// has run twice, and every file that was read is the image's or an error.
func TestRandomCallsWithFaults(t *testing.T) {
	r := newWorkerRig(t, "debian", randomFlags...)
	s := &callStorm{r: r, made: map[string]string{}, unknown: map[string]bool{}, execs: map[string]string{}, calls: map[string]int{}, files: map[string][sha256.Size]byte{}}
	r.quarry("mount", "--data", r.path("d"), "--worker-dir", r.path("w2"), "t/task", mkdir(t, r.path("image")))
	for _, name := range []string{"/etc/passwd", "/usr/bin/env", "/bin/bash", "/usr/lib/os-release"} {
		real, err := filepath.EvalSymlinks(r.path("image") + name)
		check(t, err)
		raw, err := os.ReadFile(real)
		check(t, err)
		s.files[name] = sha256.Sum256(raw)
	}
	r.quarry("umount", "--worker-dir", r.path("w2"), r.path("image"))

	ctx, cancel := context.WithTimeout(t.Context(), randomTime)
	defer cancel()
	var g errgroup.Group
	for user := range randomUsers {
		g.Go(func() error { s.use(ctx, rand.New(rand.NewPCG(randomSeed, uint64(user)))); return nil })
	}
	dice := rand.New(rand.NewPCG(randomSeed, 99))
	for n := range randomFaults {
		select {
		case <-ctx.Done():
		case <-time.After(randomTime / (randomFaults + 1)):
		}
		s.fault(n, dice)
	}
	check(t, g.Wait())
	s.judge(t.Context())
	for _, w := range s.wrong {
		t.Error(w)
	}
	t.Logf("calls: %v", s.calls)
	r.nothingLeftOf()
}

func mkdir(t *testing.T, dir string) string {
	t.Helper()
	check(t, os.MkdirAll(dir, 0o755))
	return dir
}

// newWorker kills the worker and starts another. When that fails it ends the goroutine.
func (s *callStorm) newWorker() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.r.killWorker()
	s.r.startWorker(randomFlags...)
}

// fault kills something of the worker.
func (s *callStorm) fault(n int, dice *rand.Rand) {
	switch n % 4 {
	case 0, 2:
		s.newWorker()
		s.note("worker killed")
	case 1:
		s.killOne("runsc-sandbox", dice)
	case 3:
		s.killOne("holder", dice)
	}
}

// killOne kills a process of a sandbox whose arguments have a word.
func (s *callStorm) killOne(word string, dice *rand.Rand) {
	var pids []int
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range procs {
		raw, err := os.ReadFile(path)
		if err == nil && bytes.Contains(raw, []byte(word)) && bytes.Contains(raw, []byte(s.r.path("w", "node")+"/")) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
			pids = append(pids, pid)
		}
	}
	if len(pids) > 0 {
		_ = syscall.Kill(pids[dice.IntN(len(pids))], syscall.SIGKILL)
		s.note(word + " killed")
	}
}

// use makes one call after the other.
func (s *callStorm) use(ctx context.Context, dice *rand.Rand) {
	for n := 0; ctx.Err() == nil; n++ {
		c := s.client()
		id := s.one(dice)
		switch what := dice.IntN(20); {
		case id == "" || what < 3:
			s.create(ctx, c, dice)
		case what < 10:
			s.exec(ctx, c, id, dice)
		case what < 14:
			s.read(ctx, c, id, dice)
		case what < 15:
			s.pause(ctx, c, id, dice)
		case what < 17:
			_, _ = c.Resume(ctx, id)
			s.note("resume")
		case what < 18:
			_, _ = c.List(ctx, sandbox.Filter{})
			_, _ = c.Usage(ctx, id)
			s.note("list")
		case what < 19:
			s.write(ctx, c, id, dice)
		default:
			_, _ = c.Delete(ctx, id)
			s.note("delete")
		}
	}
}

// pause pauses a sandbox, or hibernates it.
func (s *callStorm) pause(ctx context.Context, c *client.Client, id string, dice *rand.Rand) {
	if dice.IntN(3) > 0 {
		_, _ = c.Pause(ctx, id)
		s.note("pause")
		return
	}
	ctx, cancel := sometimes(ctx, dice)
	defer cancel()
	if _, err := c.Hibernate(ctx, id); err == nil {
		s.note("hibernate")
	}
}

// one chooses a sandbox, "" when there is none.
func (s *callStorm) one(dice *rand.Rand) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := len(s.made)
	if n == 0 {
		return ""
	}
	n = dice.IntN(n)
	for id := range s.made {
		if n == 0 {
			return id
		}
		n--
	}
	return ""
}

// sometimes gives a call up after a while that the dice say.
func sometimes(ctx context.Context, dice *rand.Rand) (context.Context, context.CancelFunc) {
	limit := 20 * time.Second
	if dice.IntN(4) == 0 {
		limit = time.Duration(dice.IntN(400)) * time.Millisecond
	}
	return context.WithTimeout(ctx, limit)
}

func (s *callStorm) create(ctx context.Context, c *client.Client, dice *rand.Rand) {
	key := fmt.Sprintf("k%x", dice.Uint64())
	ctx, cancel := sometimes(ctx, dice)
	defer cancel()
	sb, err := c.Create(ctx, randomSpec(key), key)
	s.note("create")
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		s.unknown[key] = true
		return
	}
	s.made[sb.ID] = key
}

// exec runs a command that leaves its id in a file, and asks for it again.
func (s *callStorm) exec(ctx context.Context, c *client.Client, id string, dice *rand.Rand) {
	exec := fmt.Sprintf("e%x", dice.Uint64())
	s.mu.Lock()
	s.execs[exec] = id
	s.mu.Unlock()
	spec := sandbox.ExecSpec{ID: exec, Shell: "echo " + exec + " >> /tmp/runs; grep -c " + exec + " /tmp/runs"}
	for range 1 + dice.IntN(3) {
		tryCtx, cancel := sometimes(ctx, dice)
		code, out, err := run(tryCtx, s.client(), id, spec)
		cancel()
		s.note("exec")
		if err == nil && (code != 0 || out != "1\n") {
			s.accuse("exec %s in %s: %d %q", exec, id, code, out)
		}
	}
}

func (s *callStorm) read(ctx context.Context, c *client.Client, id string, dice *rand.Rand) {
	n := dice.IntN(len(s.files))
	for name, want := range s.files {
		if n--; n >= 0 {
			continue
		}
		readCtx, cancel := sometimes(ctx, dice)
		defer cancel()
		var got bytes.Buffer
		_, err := c.ReadFile(readCtx, id, name, sandbox.ReadOptions{Length: -1}, &got)
		s.note("read")
		if err == nil && sha256.Sum256(got.Bytes()) != want {
			s.accuse("%s in %s: %d bytes that are not the image's", name, id, got.Len())
		}
		return
	}
}

func (s *callStorm) write(ctx context.Context, c *client.Client, id string, dice *rand.Rand) {
	want := strings.Repeat("x", dice.IntN(100_000))
	ctx, cancel := sometimes(ctx, dice)
	defer cancel()
	name := fmt.Sprintf("/tmp/f%x", dice.Uint64())
	if _, err := c.WriteFile(ctx, id, name, sandbox.WriteOptions{Size: int64(len(want))}, strings.NewReader(want)); err != nil {
		return
	}
	s.note("write")
	var got bytes.Buffer
	if _, err := c.ReadFile(ctx, id, name, sandbox.ReadOptions{Length: -1}, &got); err == nil && got.String() != want {
		s.accuse("%s in %s: %d bytes, %d were written", name, id, got.Len(), len(want))
	}
}

// judge looks at what is left of everything.
func (s *callStorm) judge(ctx context.Context) {
	c := s.client()
	s.find(ctx, c)
	var live atomic.Int64
	atOnce(maps.Keys(s.made), func(id string) {
		sb, err := c.Get(ctx, id)
		switch {
		case err != nil:
			s.accuse("sandbox %s: %v", id, err)
		case sb.State == sandbox.StateEnded && (sb.End == nil || sb.End.Reason == "" || sb.End.Blame == ""):
			s.accuse("sandbox %s has ended without a record: %+v", id, sb.End)
		case sb.State != sandbox.StateEnded:
			live.Add(1)
			s.judgeLive(ctx, c, id)
		}
		if _, err := c.Delete(ctx, id); err != nil {
			s.accuse("delete %s: %v", id, err)
		}
	})
	s.calls["sandboxes"], s.calls["live at the end"], s.calls["creates that made nothing"] = len(s.made), int(live.Load()), len(s.unknown)
	// Keys that have made nothing are as good as new, now that there is room. A few say
	// so for all.
	few := slices.Sorted(maps.Keys(s.unknown))
	atOnce(slices.Values(few[:min(len(few), judgesAtOnce)]), func(key string) {
		sb, err := c.Create(ctx, randomSpec(key), key)
		if err == nil {
			_, err = c.Delete(ctx, sb.ID)
		}
		if err != nil {
			s.accuse("create %s, which had made nothing, again: %v", key, err)
		}
	})
}

// atOnce calls fn for some at a time.
func atOnce[T any](all iter.Seq[T], fn func(T)) {
	var g errgroup.Group
	g.SetLimit(judgesAtOnce)
	for one := range all {
		g.Go(func() error { fn(one); return nil })
	}
	_ = g.Wait() // of functions that have no errors
}

// find finds what was made by creates that were not answered, by its label; whatever
// else there is is nobody's. What is found has its key, too.
func (s *callStorm) find(ctx context.Context, c *client.Client) {
	found := map[string]sandbox.State{}
	for _, state := range []sandbox.State{"", sandbox.StateEnded} {
		list, err := c.List(ctx, sandbox.Filter{State: state})
		if err != nil {
			s.accuse("list: %v", err)
		}
		for _, sb := range list {
			switch key := sb.Labels[keyLabel]; {
			case s.made[sb.ID] == key:
			case s.unknown[key]:
				s.made[sb.ID] = key
				found[sb.ID] = sb.State
			default:
				s.accuse("sandbox %s is nobody's: its key is %q", sb.ID, key)
			}
		}
	}
	for id := range found {
		delete(s.unknown, s.made[id])
	}
	atOnce(maps.Keys(found), func(id string) {
		key := s.keyOf(id)
		sb, err := c.Create(ctx, randomSpec(key), key)
		switch {
		case err != nil && !errors.Is(err, sandbox.ErrEnded) && !errors.Is(err, sandbox.ErrRuntime) && !errors.Is(err, sandbox.ErrCapacity): // it failed
			s.accuse("create %s again: %v", key, err)
		case err == nil && sb.ID != id:
			if was, err := c.Get(ctx, id); err != nil || was.State != sandbox.StateEnded { // else that create had failed
				s.accuse("key %s has made %s and %s: %v", key, id, sb.ID, err)
			}
			s.mu.Lock()
			s.made[sb.ID] = key
			s.mu.Unlock()
		}
	})
}

func (s *callStorm) keyOf(id string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.made[id]
}

// judgeLive looks at which execs ran in a sandbox.
func (s *callStorm) judgeLive(ctx context.Context, c *client.Client, id string) {
	if _, err := c.Resume(ctx, id); err != nil {
		s.accuse("resume %s: %v", id, err)
	}
	_, out, err := run(ctx, c, id, sandbox.ExecSpec{Shell: "sort /tmp/runs 2>/dev/null | uniq -d"})
	if err != nil || out != "" {
		s.accuse("sandbox %s: %v, execs that ran twice: %q", id, err, out)
	}
}
