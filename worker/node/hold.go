package node

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"quarry/internal/proc"
	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

// bundle writes the sandbox's OCI bundle.
func (b *box) bundle(ctx context.Context, im *folder.Image) (*specs.Spec, error) {
	b.mu.Lock()
	asked, mt, link := b.j.Asked, b.mount, b.link
	b.mu.Unlock()
	spec, err := b.n.c.Worker.SandboxSpec(ctx, im, mt, worker.Command{
		Entrypoint: asked.Entrypoint, Env: asked.Env, WorkDir: asked.WorkDir, User: asked.User,
	})
	if err != nil {
		return nil, specError(err)
	}
	spec.Hostname = asked.Hostname
	for i := range spec.Process.Rlimits {
		if l := &spec.Process.Rlimits[i]; l.Type == "RLIMIT_NPROC" {
			l.Hard, l.Soft = uint64(asked.PIDs), uint64(asked.PIDs)
		}
	}
	if b.group != nil {
		spec.Linux.CgroupsPath = b.group.Path()
	}
	if link != nil {
		for i := range spec.Linux.Namespaces {
			if ns := &spec.Linux.Namespaces[i]; ns.Type == specs.NetworkNamespace {
				ns.Path = link.NetnsPath
			}
		}
	}
	gifts, err := b.ownFiles(ctx, spec, mt.Root())
	if err != nil {
		return nil, err
	}
	mounts, more, err := b.bindOr(ctx, mt.Root(), asked.Shares)
	if err != nil {
		return nil, err
	}
	spec.Mounts = append(spec.Mounts, mounts...)
	if gifts = append(gifts, more...); len(gifts) > 0 && len(asked.Entrypoint) > 0 {
		if i := slices.IndexFunc(gifts, func(g gift) bool { return g.text == "" }); i >= 0 {
			return nil, invalid("the image has no %s, and a sandbox with a first process of its own is given only what the image has a place for", gifts[i].target)
		}
	}
	b.mu.Lock()
	b.gifts = gifts
	b.mu.Unlock()
	raw, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	return spec, os.WriteFile(filepath.Join(b.dir, "config.json"), raw, 0o600)
}

// ownFiles gives the guest its hosts file and its name server. What of it has to be
// given once the guest runs is returned.
func (b *box) ownFiles(ctx context.Context, spec *specs.Spec, root string) (gifts []gift, err error) {
	files := map[string][]byte{}
	if p, err := find(ctx, root, hostsFile, true); err != nil {
		return nil, err
	} else if p.bare() {
		files[hostsFile] = []byte(hosts(spec.Hostname))
	}
	path := filepath.Join(b.dir, "resolv.conf")
	if b.link != nil && len(b.link.ResolvConf()) > 0 {
		conf := b.link.ResolvConf()
		if err := os.WriteFile(path, conf, 0o644); err != nil {
			return nil, err
		}
		p, err := find(ctx, root, resolvConf, false)
		switch {
		case err != nil:
			return nil, err
		case p.isA(syscall.S_IFREG):
			spec.Mounts = append(spec.Mounts, specs.Mount{Destination: resolvConf, Type: "bind", Source: path, Options: []string{"bind", "ro", "nosuid", "nodev"}})
		case errors.Is(p.err, fs.ErrNotExist):
			files[resolvConf] = conf
		default:
			gifts = append(gifts, gift{host: path, target: resolvConf})
		}
	}
	begun, err := b.beginUpper(ctx, root, files)
	switch {
	case err != nil:
		return nil, err
	case begun:
		spec.Annotations = map[string]string{upperAnnotation: filepath.Join(b.dir, upperFile)}
		return gifts, nil
	}
	if _, ok := files[resolvConf]; ok {
		gifts = append(gifts, gift{host: path, target: resolvConf})
	}
	if text, ok := files[hostsFile]; ok && b.n.c.Guest != "" {
		gifts = append(gifts, gift{text: string(text), target: hostsFile})
	}
	return gifts, nil
}

// specError tells what the caller asked for and the image does not have from reads
// that failed.
func specError(err error) error {
	var errno syscall.Errno
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || errors.As(err, &errno) {
		return fmt.Errorf("%w: %w", sandbox.ErrRuntime, err)
	}
	return fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)
}

// runsc is how the sandbox's runtime is called, up to its command.
func (b *box) runsc() []string {
	network := "none"
	if b.link != nil {
		network = "sandbox"
	}
	args := []string{
		b.n.c.Worker.Runsc, "--platform", "systrap", "--network", network, "--host-uds", "none", "--allow-suid", upperFlag,
		"--overlay2", "root:dir=" + filepath.Join(b.dir, "upper") + ",size=" + strconv.FormatInt(b.j.Asked.DiskMB, 10) + "m",
	}
	if b.link != nil {
		args = append(args, "--allow-connected-on-save") // its connections live on when it is hibernated
	}
	if b.group == nil {
		args = append(args, "--ignore-cgroups")
	}
	return args
}

// killStrays kills processes that name the sandbox's folder: a holder or a runsc that
// was on its way when its node was killed. The id is random and in no other's.
func (b *box) killStrays(ctx context.Context) error {
	if !b.strays && b.group != nil {
		return nil
	}
	for {
		pids, err := namedIn(b.dir + "/")
		if err != nil || len(pids) == 0 {
			return err
		}
		for _, pid := range pids {
			kill(pid, b.dir+"/")
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes %v of sandbox %s do not end", pids, b.id)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// namedIn lists the processes that have a text in their arguments.
func namedIn(text string) ([]int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var pids []int
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || pid == os.Getpid() {
			continue
		}
		if names(pid, text) {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// names reports whether a process has a text in its arguments. A zombie has none.
func names(pid int, text string) bool {
	args, err := readBounded(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
	return err == nil && strings.Contains(string(args), text)
}

func kill(pid int, text string) {
	p, err := proc.Open(pid)
	if err != nil {
		return
	}
	defer p.Close()
	if names(pid, text) { // looked at again: the number was its own since it was opened
		p.Signal(syscall.SIGKILL)
	}
}

// diskUsed is what the sandbox's upper layer takes of the disk.
func (b *box) diskUsed() int64 {
	pids, err := b.members()
	if err != nil {
		return 0
	}
	for _, pid := range pids {
		if n := diskUsedBy(pid, b.dir); n > 0 {
			return n
		}
	}
	return 0
}

// diskUsedBy finds the upper layer's file among those that a process has open: it has
// no name any more.
func diskUsedBy(pid int, dir string) int64 {
	fds := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(fds)
	if err != nil {
		return 0
	}
	for _, e := range entries {
		path := filepath.Join(fds, e.Name())
		to, err := os.Readlink(path)
		if err != nil || !strings.Contains(to, "runsc-filestore-") {
			continue
		}
		var st syscall.Stat_t
		if syscall.Stat(path, &st) == nil {
			const block = 512 // of st_blocks, whatever the file system has
			return st.Blocks * block
		}
	}
	return 0
}

// start starts the sandbox under a holder of its own.
func (b *box) start(ctx context.Context, im *folder.Image) error {
	made := b.step("bundle")
	spec, err := b.bundle(ctx, im)
	made()
	if err != nil {
		return err
	}
	b.mu.Lock()
	b.base = spec.Process
	b.mu.Unlock()
	// From here on something runs that the next node has to know of.
	if err := b.update(func(*journal) {}); err != nil {
		return err
	}
	ran := b.step("start")
	h, times, err := holder.Start(ctx, holder.Config{
		Shim: []string{b.n.c.Worker.ShimPath}, Dir: b.dir, ID: b.id, Runsc: b.runsc(), Entrypoint: len(b.j.Asked.Entrypoint) > 0, Keep: b.mount.Lock(), MaxKept: b.j.Asked.OutputMB << 20,
	})
	ran()
	if err != nil {
		b.strays = true
		return err
	}
	b.mu.Lock()
	b.h = h
	t := maps.Clone(b.j.Timings)
	t["holder"], t["runsc"] = times.Spawn.Microseconds(), times.Runsc.Microseconds()
	b.j.Timings = t
	b.mu.Unlock()
	b.follow(h)
	// The gofer has the shares in its own mount namespace.
	return errors.Join(unmountBelow(b.dir), b.giveAll(ctx))
}

// follow waits for the sandbox's end beside its owner, until the node is closed.
func (b *box) follow(h *holder.Client) {
	b.n.work.Go(func() {
		for {
			e, err := h.WaitEnded(b.n.life)
			switch {
			case err == nil:
				b.mu.Lock()
				b.how = &e
				b.mu.Unlock()
				close(b.dead)
				return
			case b.n.life.Err() != nil:
				return
			case errors.Is(err, holder.ErrLost):
				close(b.dead)
				return
			}
			b.n.log.WarnContext(b.n.life, "a holder cannot be asked", "sandbox", b.id, "err", err)
			select {
			case <-b.n.life.Done():
				return
			case <-time.After(time.Second):
			}
		}
	})
}

// connect finds the holder that an earlier node started.
func (b *box) connect(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, adoptPatience)
	defer cancel()
	h, err := holder.Connect(ctx, b.dir)
	if err != nil {
		return err
	}
	st, err := h.State(ctx)
	if err != nil {
		h.Close()
		return err
	}
	raw, err := readBounded(filepath.Join(b.dir, "config.json"))
	if err == nil {
		var spec specs.Spec
		if err = json.Unmarshal(raw, &spec); err == nil && spec.Process == nil {
			err = errors.New("the bundle has no process")
		}
		b.base = spec.Process
	}
	if err != nil {
		h.Close()
		return err
	}
	b.h = h
	if st.Hibernated {
		b.noteNap(nap{now: true, bytes: st.OnDisk})
	}
	b.paused = pausesOf(st, b.n.now())
	b.follow(h)
	return nil
}

// endByHolder has the holder end the sandbox, and notes how it ended.
func (b *box) endByHolder(ctx context.Context, f *facts) {
	b.mu.Lock()
	h, how := b.h, b.how
	b.mu.Unlock()
	if h == nil {
		if e, err := holder.ReadEnded(b.dir); err == nil {
			how = &e
		}
	} else if how == nil {
		e, err := h.End(ctx)
		if err == nil {
			how = &e
		} else if e, rerr := holder.ReadEnded(b.dir); rerr == nil {
			how = &e
		} else {
			b.n.log.WarnContext(ctx, "a holder does not end its sandbox", "sandbox", b.id, "err", err)
			b.strays = true
		}
	}
	if how == nil {
		f.exit.lost = true
		b.evidenceOfLost(f)
		return
	}
	f.evidence.Pauses, f.evidence.PausedFor, f.evidence.Execs = how.Pauses, how.PausedFor, how.Execs
	f.exit = exitOf(*how)
}

// evidenceOfLost is what is known without the holder.
func (b *box) evidenceOfLost(f *facts) {
	b.mu.Lock()
	f.evidence.Pauses, f.evidence.PausedFor = b.paused.count, b.paused.total(b.n.now()).Milliseconds()
	b.mu.Unlock()
	if list, err := holder.ReadExecs(b.dir); err == nil {
		f.evidence.Execs = int64(len(list))
	}
}

func exitOf(e holder.Ended) exit {
	x := exit{known: true, detail: e.Message, restore: e.NotRestored}
	if ws := syscall.WaitStatus(e.Gofer); e.Gofer >= 0 && ws.Signaled() && !e.Killed {
		x.gofer = int(ws.Signal())
	}
	ws := syscall.WaitStatus(e.Sentry)
	switch {
	case x.gofer != 0 && (e.Init == nil || e.Init.Signal == int(syscall.SIGKILL)):
		// The Sentry ends its guest when its gofer is gone.
	case e.Init != nil: // the guest's own word, before the Sentry was gone
		x.status = e.Init.Code
		x.gofer = 0
	case e.Sentry < 0:
		x.known = false
	case ws.Signaled():
		x.signal = int(ws.Signal())
	default:
		// It ended by itself without an answer of its first process: that is no exit.
		x.known = false
		x.detail = strings.TrimSpace(fmt.Sprintf("status %d %s", ws.ExitStatus(), e.Message))
	}
	return x
}

// endHolder lets the holder go, which keeps the image mounted as long as it lives.
func (b *box) endHolder(ctx context.Context) error {
	b.mu.Lock()
	h, files := b.h, b.files
	b.mu.Unlock()
	if files != nil {
		defer files.Close() // reads that never came back do now
	}
	if h == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, killPatience)
	defer cancel()
	if _, err := h.End(ctx); err != nil && !errors.Is(err, holder.ErrLost) {
		b.strays = true
	}
	if err := h.Release(ctx); err != nil && !errors.Is(err, holder.ErrLost) {
		b.strays = true
	}
	h.Close()
	return nil
}

// members lists the sandbox's processes.
func (b *box) members() ([]int, error) {
	if b.group != nil {
		return b.group.PIDs()
	}
	return namedIn(b.dir + "/")
}

// pauses is what a node knows of a sandbox's pauses without asking its holder.
type pauses struct {
	now    bool
	count  int64
	before time.Duration // of pauses that have ended, or until since
	since  time.Time
}

// pausesOf is what a holder says of them.
func pausesOf(st holder.State, now time.Time) pauses {
	return pauses{now: st.Paused, count: st.Pauses, before: time.Duration(st.PausedFor) * time.Millisecond, since: now}
}

func (p pauses) total(now time.Time) time.Duration {
	if !p.now {
		return p.before
	}
	return p.before + now.Sub(p.since)
}
