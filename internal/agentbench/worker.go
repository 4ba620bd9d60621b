package agentbench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"quarry/api/sandboxes/client"
	"quarry/worker/cgroup"
	"quarry/worker/network/apart"
)

// measured is a worker with a control group for its sandboxes, whose memory is limited,
// and another for itself.
type measured struct {
	*client.Client
	cmd         *exec.Cmd
	log         string
	boxes, self *cgroup.Group
	patience    time.Duration // with its end
}

// startWorker starts one on the node of a pair, for an arm.
func (r *run) startWorker(p *apart.Pair, arm Arm) (w *measured, err error) {
	w = &measured{patience: r.Patience, log: r.path(string(arm) + ".log"), boxes: r.tree.Group(string(arm)), self: r.tree.Group(string(arm) + "-worker")}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.stop())
		}
	}()
	if _, err := r.tree.Make(string(arm), cgroup.Limits{Memory: r.Memory, Shared: true}); err != nil {
		return w, err
	}
	if _, err := r.tree.Make(string(arm)+"-worker", cgroup.Limits{}); err != nil {
		return w, err
	}
	args := []string{
		"worker", "--worker-dir", r.path(string(arm)), "--data", r.path("data"), "--no-auth", "--listen", "127.0.0.1:0", "--cgroup", w.boxes.Path(),
		"--memory", fmt.Sprint(r.Memory), "--max-sandboxes", fmt.Sprint(r.Agents),
	}
	w.cmd = exec.Command(r.Quarry, append(args, armFlags(arm)...)...)
	w.cmd.Env = environment(os.Environ())
	// A person's ^C is for us, who end it in order.
	w.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	log, err := os.Create(w.log)
	if err != nil {
		return w, err
	}
	defer log.Close()
	w.cmd.Stderr = log
	out, err := w.cmd.StdoutPipe()
	if err == nil {
		err = p.Start(w.cmd)
	}
	if err != nil {
		return w, err
	}
	if err := w.self.Join(w.cmd.Process.Pid); err != nil {
		return w, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if !strings.HasPrefix(line, "listening on ") {
		return w, fmt.Errorf("quarry worker does not start: it says %q (%v): %s", line, err, w.said())
	}
	go io.Copy(io.Discard, out) // ends with the worker
	w.Client, err = client.New(client.Config{URL: "unix:" + filepath.Join(r.path(string(arm)), "worker.sock")})
	return w, err
}

// elsewhere are variables of the environment that name a store and who is trusted there.
// What is measured has its own.
var elsewhere = []string{"QUARRY_DATA", "QUARRY_STORE", "QUARRY_TRUST", "QUARRY_TOKEN", "QUARRY_TOKEN_FILE", "QUARRY_CA", "QUARRY_NODE", "QUARRY_WORKER"}

// environment is what the programs that are measured have of ours.
func environment(ours []string) []string {
	return slices.DeleteFunc(slices.Clone(ours), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains(elsewhere, name)
	})
}

func armFlags(a Arm) []string {
	paused := func(memory string) []string {
		return []string{"--model-endpoint", modelAddr.String(), "--paused-memory", memory}
	}
	switch a {
	case ArmPaused:
		return paused("keep")
	case ArmHibernate:
		return paused("hibernate")
	case ArmReclaim:
		return paused("reclaim")
	}
	return nil
}

// said is the end of the worker's log.
func (w *measured) said() string {
	raw, _ := os.ReadFile(w.log)
	return strings.TrimSpace(string(raw[max(0, len(raw)-2000):]))
}

// stop ends the worker, all that it has started, and the groups.
func (w *measured) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), w.patience)
	defer cancel()
	var errs []error
	if w.cmd != nil && w.cmd.Process != nil {
		w.cmd.Process.Signal(syscall.SIGTERM)
		stop := context.AfterFunc(ctx, func() { w.cmd.Process.Kill() })
		if err := w.cmd.Wait(); err != nil {
			errs = append(errs, fmt.Errorf("quarry worker ends with %w: %s", err, w.said()))
		}
		stop()
	}
	ctx, cancel = context.WithTimeout(context.Background(), w.patience)
	defer cancel()
	for _, g := range []*cgroup.Group{w.boxes, w.self} {
		errs = append(errs, g.Kill(ctx), g.Remove(ctx))
	}
	return errors.Join(errs...)
}

// clear ends the processes that work in the folder and removes it, but for swap that is
// still on.
func (r *run) clear() error {
	for n := range 200 { // 10 s
		pids := below(r.dir)
		if len(pids) == 0 {
			break
		}
		for _, pid := range pids {
			unix.Kill(pid, map[bool]unix.Signal{true: unix.SIGTERM, false: unix.SIGKILL}[n < 150])
		}
		time.Sleep(50 * time.Millisecond)
	}
	raw, err := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], r.dir+"/") {
			err = errors.Join(err, unix.Unmount(f[4], unix.MNT_DETACH))
		}
	}
	if r.swap == nil || !r.swap.isOn || r.swap.device != "" {
		return errors.Join(err, os.RemoveAll(r.dir))
	}
	entries, rerr := os.ReadDir(r.dir)
	err = errors.Join(err, rerr)
	for _, e := range entries {
		if path := r.path(e.Name()); path != r.swap.path {
			err = errors.Join(err, os.RemoveAll(path))
		}
	}
	return err
}

// below lists the processes that name the folder in their arguments.
func below(dir string) (pids []int) {
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range procs {
		var pid int
		raw, err := os.ReadFile(path)
		fmt.Sscanf(path, "/proc/%d/", &pid)
		if err == nil && pid != os.Getpid() && strings.Contains(string(raw), dir+"/") {
			pids = append(pids, pid)
		}
	}
	return pids
}
