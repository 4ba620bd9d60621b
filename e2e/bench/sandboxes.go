package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"quarry/api/sandboxes"
	"quarry/api/sandboxes/client"
	"quarry/e2e/lab"
	"quarry/worker/sandbox"
)

const (
	// createRounds is how often a create is timed, and as often runsc's own.
	createRounds = 40
	// execRounds is how often an exec is.
	execRounds = 300
	// burstCreates come within one second.
	burstCreates = 128
	// maxCreateMillis is what a create with its first exec may take beyond runsc's own
	// create and start, and maxExecMillis what an exec may take.
	maxCreateMillis = 50
	maxExecMillis   = 10
	// pauseRounds is how often a sandbox is paused and resumed, and maxPauseMillis what
	// either may take.
	pauseRounds    = 200
	maxPauseMillis = 5
)

// measureSandboxes times what trainers wait for: creates and execs.
func measureSandboxes(ctx context.Context, b *bench) (err error) {
	im := b.images[0]
	data, dir := b.lab.Path("sandboxes"), b.lab.Path("sw")
	if _, err := b.lab.Convert(ctx, data, "oci:"+im.dir, imageName(im)); err != nil {
		return err
	}
	w, err := b.lab.Worker(ctx, dir, data, "--cgroup", "/quarry-bench")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	c, err := client.New(client.Config{URL: w.URL})
	if err != nil {
		return err
	}
	s := &sandboxBench{bench: b, client: c, worker: w, dir: dir, spec: sandbox.Spec{Image: imageName(im), MemoryMB: 64, DiskMB: 64, PIDs: 64}}
	for _, measure := range []func(context.Context) error{s.creates, s.execs, s.pauses, s.burst} {
		if err := measure(ctx); err != nil {
			return err
		}
	}
	return nil
}

// sandboxBench is what the measures of sandboxes share.
type sandboxBench struct {
	*bench
	client *client.Client
	worker *lab.Worker
	dir    string
	spec   sandbox.Spec
	count  int
}

// creates compares a create and its first exec with runsc's create and start of the
// same bundle, in turns. A first sandbox keeps the image mounted.
func (s *sandboxBench) creates(ctx context.Context) (err error) {
	begun := time.Now()
	first, err := s.client.Create(ctx, s.spec, "")
	if err != nil {
		return err
	}
	s.figure("create of an image that is known and not mounted", time.Since(begun).Round(time.Millisecond).String())
	defer func() { err = errors.Join(err, s.remove(ctx, first.ID)) }()
	var ours, runscs []time.Duration
	steps := map[string][]int64{}
	for range createRounds {
		took, err := s.runsc(ctx, first.ID)
		if err != nil {
			return err
		}
		runscs = append(runscs, took)
		begun := time.Now()
		sb, err := s.client.Create(ctx, s.spec, "")
		if err == nil {
			err = s.exec(ctx, sb.ID)
		}
		if err != nil {
			return err
		}
		ours = append(ours, time.Since(begun))
		for name, us := range sb.Timings {
			steps[name] = append(steps[name], us)
		}
		if err := s.remove(ctx, sb.ID); err != nil {
			return err
		}
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(steps)) {
		us := steps[name]
		slices.Sort(us)
		parts = append(parts, fmt.Sprintf("%s %.1f/%.1f", name, float64(us[len(us)/2])/1000, float64(us[len(us)*95/100])/1000))
	}
	s.figure("create: its steps in ms, p50/p95", strings.Join(parts, ", "))
	for _, q := range []int{50, 95} {
		own := quantile(runscs, q)
		s.atMost(fmt.Sprintf("create and first exec beyond runsc's create+start (%s), p%d", own.Round(time.Millisecond), q),
			float64((quantile(ours, q)-own).Microseconds())/1000, maxCreateMillis, "ms")
	}
	return nil
}

func (s *sandboxBench) remove(ctx context.Context, id string) error {
	_, err := s.client.Delete(ctx, id)
	return err
}

func (s *sandboxBench) exec(ctx context.Context, id string) error {
	s.count++
	a, err := s.client.Exec(ctx, id, sandboxes.ExecRequest{ExecSpec: sandbox.ExecSpec{ID: fmt.Sprintf("b%d", s.count), Argv: []string{"/bin/true"}}})
	if err == nil && (a.ExitCode == nil || *a.ExitCode != 0) {
		err = fmt.Errorf("exec of true: %+v", a.ExecState)
	}
	return err
}

// runsc creates and starts a sandbox of the bundle of a live one, and ends it.
func (s *sandboxBench) runsc(ctx context.Context, like string) (took time.Duration, err error) {
	s.count++
	id := fmt.Sprintf("floor%d", s.count)
	dir := s.lab.Path(id)
	for _, sub := range []string{"", "root", "upper"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o700); err != nil {
			return 0, err
		}
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	raw, err := os.ReadFile(filepath.Join(s.dir, "node", like, "config.json"))
	if err != nil {
		return 0, err
	}
	var spec map[string]any
	numbers := json.NewDecoder(bytes.NewReader(raw))
	numbers.UseNumber() // limits are as large as an integer can be
	if err := numbers.Decode(&spec); err != nil {
		return 0, err
	}
	spec["process"].(map[string]any)["args"] = []string{"/bin/sleep", "1000"}
	delete(spec, "annotations") // what our own sandboxes are given
	linux := spec["linux"].(map[string]any)
	if path, ok := linux["cgroupsPath"].(string); ok {
		linux["cgroupsPath"] = filepath.Join(filepath.Dir(path), id)
	}
	if raw, err = json.Marshal(spec); err != nil {
		return 0, err
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), raw, 0o600); err != nil {
		return 0, err
	}
	runsc := func(args ...string) error {
		global := []string{"--root", filepath.Join(dir, "root"), "--log", filepath.Join(dir, "log"), "--platform", "systrap", "--network", "none", "--host-uds", "none",
			"--overlay2", "root:dir=" + filepath.Join(dir, "upper") + ",size=64m"}
		cmd := exec.CommandContext(ctx, "runsc", append(global, args...)...)
		if args[0] == "create" { // what it starts keeps the streams
			err := cmd.Run()
			if raw, _ := os.ReadFile(filepath.Join(dir, "log")); err != nil {
				err = fmt.Errorf("runsc create: %w: %s", err, raw)
			}
			return err
		}
		out, err := cmd.CombinedOutput()
		if err != nil {
			err = fmt.Errorf("runsc %s: %w: %s", args[0], err, out)
		}
		return err
	}
	begun := time.Now()
	if err := errors.Join(runsc("create", "--bundle", dir, id), runsc("start", id)); err != nil {
		return 0, err
	}
	took = time.Since(begun)
	return took, runsc("delete", "--force", id)
}

// execs times an exec of a program that does nothing, and says what a sandbox costs
// that does nothing.
func (s *sandboxBench) execs(ctx context.Context) (err error) {
	sb, err := s.client.Create(ctx, s.spec, "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.remove(ctx, sb.ID)) }()
	var times []time.Duration
	for range execRounds {
		begun := time.Now()
		if err := s.exec(ctx, sb.ID); err != nil {
			return err
		}
		times = append(times, time.Since(begun))
	}
	s.figure("exec of /bin/true over HTTP, p95 and p99", fmt.Sprint(quantile(times, 95), " ", quantile(times, 99)))
	s.atMost("exec of /bin/true over HTTP, p50", float64(quantile(times, 50).Microseconds())/1000, maxExecMillis, "ms")
	return s.idle(sb.ID)
}

// pauses times a pause and a resume over HTTP, in which the calls of the Sentry's control
// socket are.
func (s *sandboxBench) pauses(ctx context.Context) (err error) {
	sb, err := s.client.Create(ctx, s.spec, "")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.remove(ctx, sb.ID)) }()
	var pauses, resumes []time.Duration
	for range pauseRounds {
		begun := time.Now()
		_, err := s.client.Pause(ctx, sb.ID)
		paused := time.Now()
		if err == nil {
			_, err = s.client.Resume(ctx, sb.ID)
		}
		if err != nil {
			return err
		}
		pauses, resumes = append(pauses, paused.Sub(begun)), append(resumes, time.Since(paused))
	}
	s.figure("pause and resume over HTTP, p95", fmt.Sprint(quantile(pauses, 95), ", ", quantile(resumes, 95)))
	s.atMost("pause over HTTP, p50", float64(quantile(pauses, 50).Microseconds())/1000, maxPauseMillis, "ms")
	s.atMost("resume over HTTP, p50", float64(quantile(resumes, 50).Microseconds())/1000, maxPauseMillis, "ms")
	return nil
}

// idle prints what the processes of a sandbox hold.
func (s *sandboxBench) idle(id string) error {
	own, theirs := processCost{}, processCost{}
	pids, err := lab.Below(filepath.Join(s.dir, "node", id))
	if err != nil {
		return err
	}
	for _, pid := range pids {
		raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil {
			continue // it has just ended
		}
		into := &theirs
		if strings.Contains(string(raw), "holder") {
			into = &own
		}
		into.add(pid)
	}
	s.figure("idle sandbox, runsc's own", theirs.String())
	s.figure("idle sandbox, beyond runsc's own", own.String())
	return nil
}

// processCost is what processes hold.
type processCost struct {
	processes, threads, files int
	pss                       int64 // KiB
}

func (p *processCost) add(pid int) {
	p.processes++
	if list, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid)); err == nil {
		p.threads += len(list)
	}
	if list, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid)); err == nil {
		p.files += len(list)
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		return
	}
	for line := range strings.Lines(string(raw)) {
		var kib int64
		if n, _ := fmt.Sscanf(line, "Pss: %d kB", &kib); n == 1 {
			p.pss += kib
		}
	}
}

func (p processCost) String() string {
	return fmt.Sprintf("%.1f MiB, %d processes, %d threads, %d open files", float64(p.pss)/1024, p.processes, p.threads, p.files)
}

// burst asks for many sandboxes within one second: each is ready or refused by type.
func (s *sandboxBench) burst(ctx context.Context) error {
	var mu sync.Mutex
	var ready []string
	var slowest time.Duration
	refused, wrong := 0, []error{}
	var all sync.WaitGroup
	begun := time.Now()
	for i := range burstCreates {
		all.Go(func() { // ends with the create
			time.Sleep(time.Duration(i) * time.Second / burstCreates)
			sb, err := s.client.Create(ctx, s.spec, "")
			mu.Lock()
			defer mu.Unlock()
			var e *sandboxes.Error
			switch {
			case err == nil:
				ready = append(ready, sb.ID)
				slowest = time.Since(begun)
			case errors.As(err, &e) && e.Retryable && e.RetryAfter > 0 && (errors.Is(err, sandbox.ErrCapacity) || errors.Is(err, sandbox.ErrRate)):
				refused++
			default:
				wrong = append(wrong, err)
			}
		})
	}
	all.Wait()
	s.figure(fmt.Sprintf("%d creates in one second", burstCreates), fmt.Sprintf("%d ready, the last after %s; %d refused by type", len(ready), slowest.Round(time.Millisecond), refused))
	s.judge(fmt.Sprintf("%d creates in one second: neither ready nor refused by type", burstCreates), len(wrong) == 0, fmt.Sprint(len(wrong), " ", errors.Join(wrong...)))
	for _, id := range ready {
		if err := s.remove(ctx, id); err != nil {
			return err
		}
	}
	left, err := filepath.Glob(filepath.Join(s.dir, "node", "*", "config.json"))
	if err != nil {
		return err
	}
	pids, err := lab.Below(filepath.Join(s.dir, "node"))
	if err != nil {
		return err
	}
	groups, err := filepath.Glob("/sys/fs/cgroup/*/quarry-bench/*/*/cgroup.procs")
	if err != nil {
		return err
	}
	s.judge("the same, left behind: folders, processes, control groups", len(left)+len(pids)+len(groups) == 0, fmt.Sprintf("%d, %d, %d", len(left), len(pids), len(groups)))
	return nil
}
