package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"quarry/worker/holder"
	"quarry/worker/sandbox"
)

// watchAgain is how often the end of an exec is asked for that could not be asked for.
const watchAgain = 500 * time.Millisecond

// Exec implements sandbox.Node.
func (n *Node) Exec(ctx context.Context, id string, e sandbox.ExecSpec) (sandbox.ExecState, error) {
	b, err := n.running(ctx, id)
	if err != nil {
		return sandbox.ExecState{}, err
	}
	if err := checkExec(e); err != nil {
		return sandbox.ExecState{}, err
	}
	done, release := b.use(), func() {}
	if !b.knows(e.ID) { // who asks for the state of one wakes nobody
		// Until it has begun: one of an agent may be paused then.
		if release, err = b.stir(ctx); err != nil {
			done()
			return sandbox.ExecState{}, b.explain(ctx, err)
		}
	}
	p, err := b.process(ctx, e)
	if err != nil {
		release()
		done()
		return sandbox.ExecState{}, err
	}
	return b.begin(ctx, e, p, release, done)
}

// execPatience bounds the holder's answer to a command: it may start a session before,
// and bounds each of the two.
const execPatience = 2*holder.StartTimeout + 30*time.Second

// begin has the holder begin a command, which goes on when ctx ends: whoever waits for
// the answer, it is known by its id, and what it is judged by is counted from now on.
// It calls release once the command has begun, and done once it has ended.
func (b *box) begin(ctx context.Context, e sandbox.ExecSpec, p holder.Process, release, done func()) (sandbox.ExecState, error) {
	undo := b.begins(e.ID)
	var st sandbox.ExecState
	var err error
	answered := make(chan struct{})
	b.n.work.Go(func() { // ends with the node's life, or the holder's answer
		defer close(answered)
		defer release()
		ctx, cancel := context.WithTimeout(b.n.life, execPatience)
		defer cancel()
		if st, err = b.h.Exec(ctx, e, p); err != nil {
			undo()
			done()
			return
		}
		b.watch(st, done)
	})
	if err := wait(ctx, answered); err != nil {
		return sandbox.ExecState{}, err
	}
	if err != nil {
		return st, b.explain(ctx, err)
	}
	return b.judge(ctx, st), nil
}

// knows reports whether an exec was begun.
func (b *box) knows(exec string) bool {
	b.judging.Lock()
	defer b.judging.Unlock()
	return b.watched[exec]
}

// process says as whom and where a command runs.
func (b *box) process(ctx context.Context, e sandbox.ExecSpec) (holder.Process, error) {
	base := b.base
	p := holder.Process{
		Argv: e.Argv, Env: base.Env, WorkDir: base.Cwd, UID: base.User.UID, GID: base.User.GID, Groups: base.User.AdditionalGids,
		Capabilities: bits(base.Capabilities), NoNewPrivs: base.NoNewPrivileges,
	}
	switch {
	case e.Session != "":
		p.Argv = nil // the holder's own
	case e.Shell != "":
		p.Argv = []string{"/bin/sh", "-c", e.Shell}
	}
	if e.PTY != nil {
		p.Env = withEnv([]string{"TERM=xterm"}, p.Env)
	}
	if e.User != "" {
		a, err := b.account(ctx, e.User)
		if err != nil {
			return holder.Process{}, err
		}
		p.UID, p.GID, p.Groups = a.UID, a.GID, a.Groups
		p.Capabilities = bits(capabilitiesOf(a.UID))
		p.Env = withEnv(p.Env, []string{"HOME=" + a.Home})
	}
	p.Env = withEnv(p.Env, e.Env)
	if e.WorkDir != "" {
		p.WorkDir = e.WorkDir
		if !path.IsAbs(p.WorkDir) {
			p.WorkDir = path.Join(base.Cwd, p.WorkDir)
		}
	}
	return p, nil
}

// checkExec holds a command against what one can be.
func checkExec(e sandbox.ExecSpec) error {
	if !holder.ValidExecID(e.ID) {
		return invalid("exec_id %q: want letters, digits, . _ and -, 1 to 128 of them, and no dot or hyphen first", e.ID)
	}
	kinds := 0
	for _, has := range []bool{len(e.Argv) > 0, e.Session == "" && e.Shell != "", e.Session != ""} {
		if has {
			kinds++
		}
	}
	if kinds != 1 || e.Session != "" && e.Shell == "" || len(e.Argv) > 0 && e.Argv[0] == "" {
		return invalid("exec %s: want one of argv, shell, and session with shell", e.ID)
	}
	for _, err := range []error{
		checkList("argv and shell", append(slices.Clone(e.Argv), e.Shell), maxArgs+1, 4*maxArgsBytes),
		checkList("env", e.Env, maxEnv, maxEnvBytes),
		checkList("cwd and user", []string{e.WorkDir, e.User}, 2, maxPath),
	} {
		if err != nil {
			return err
		}
	}
	for _, kv := range e.Env {
		if name, _, ok := strings.Cut(kv, "="); !ok || name == "" {
			return invalid("env %q: want NAME=VALUE", kv)
		}
	}
	if e.Role != "" && e.Role != sandbox.ExecAgent && e.Role != sandbox.ExecTool {
		return invalid("role %q: want %s or %s", e.Role, sandbox.ExecAgent, sandbox.ExecTool)
	}
	if e.PTY != nil {
		if err := holder.CheckWindow(*e.PTY); err != nil {
			return err
		}
	}
	if e.Timeout < 0 || e.KillGrace < 0 || e.MaxOutput < 0 || e.MaxOutput > holder.MaxOutput {
		return invalid("timeout_ms %d, kill_grace_ms %d, max_output_bytes %d: want 0 or more, and at most %d bytes", e.Timeout, e.KillGrace, e.MaxOutput, holder.MaxOutput)
	}
	return nil
}

// withEnv returns a list of K=V with those of another over it.
func withEnv(env, over []string) []string {
	out := slices.Clone(env)
	at := make(map[string]int, len(out))
	for i, kv := range out {
		name, _, _ := strings.Cut(kv, "=")
		at[name] = i
	}
	for _, kv := range over {
		name, _, _ := strings.Cut(kv, "=")
		if i, ok := at[name]; ok {
			out[i] = kv
			continue
		}
		at[name] = len(out)
		out = append(out, kv)
	}
	return out
}

// watch calls done when an exec has ended, and tells of its begin and end, once each.
func (b *box) watch(st sandbox.ExecState, done func()) {
	if !b.watches(st.ID) {
		done()
		return
	}
	b.tellExec("exec_started", st.ID)
	b.await(st, done)
}

// await calls done when an exec has ended, and tells of it.
func (b *box) await(st sandbox.ExecState, done func()) {
	idle := b.idles().use()
	b.n.work.Go(func() {
		defer done()
		defer idle()
		for !final(st) {
			next, err := b.h.WaitExec(b.n.life, st.ID, maxOffset, maxOffset)
			switch {
			case b.n.life.Err() != nil || errors.Is(err, sandbox.ErrExecUnknown):
				return // the next node tells of its end
			case err == nil:
				st = next
				continue
			}
			select {
			case <-b.dead:
				return
			case <-b.over:
				return
			case <-b.n.life.Done():
				return
			case <-time.After(watchAgain):
			}
		}
		b.judge(b.n.life, st)
		b.tellExec("exec_ended", st.ID)
	})
}

func final(st sandbox.ExecState) bool {
	return st.State == sandbox.ExecExited || st.State == sandbox.ExecUnknown
}

func (b *box) tellExec(kind, exec string) {
	b.n.events.add(sandbox.Event{At: b.n.now().UTC(), Sandbox: b.id, Type: kind, Exec: exec})
}

// maxOffset is more output than there can be.
const maxOffset = 1 << 62

// WaitExec implements sandbox.Node.
func (n *Node) WaitExec(ctx context.Context, id, exec string, out, errOut int64) (sandbox.ExecState, error) {
	b, err := n.running(ctx, id)
	if err != nil {
		return sandbox.ExecState{}, err
	}
	st, err := b.h.WaitExec(ctx, exec, out, errOut)
	if err == nil {
		st = b.judge(ctx, st)
		err = b.endedUnder(ctx, st)
	}
	return st, b.explain(ctx, err)
}

// deadPatience is how long after a command's status was lost, or its sandbox's memory was
// used up, the end of that may become known.
const deadPatience = explainPatience

// endedUnder is sandbox.ErrEnded for a command that was lost with its sandbox, or failed
// as that ran out of memory: how it ended, and who is to blame, is what its caller asks.
func (b *box) endedUnder(ctx context.Context, st sandbox.ExecState) error {
	if !endsWithAll(st, b.oomKills) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deadPatience)
	defer cancel()
	if wait(ctx, b.dead) != nil {
		return nil
	}
	return fmt.Errorf("%w: under exec %s", sandbox.ErrEnded, st.ID)
}

// endsWithAll reports whether a command ended because its sandbox ends, or may have. The
// kernel may kill the guest's process for want of memory before the Sentry, which then
// tells of a signal like any other; the kernel counts first.
func endsWithAll(st sandbox.ExecState, oomKills func() int64) bool {
	switch st.State {
	case sandbox.ExecUnknown:
		return st.Reason == sandbox.ExecReasonLost
	case sandbox.ExecExited:
		failed := st.Signal != 0 || st.ExitCode != nil && *st.ExitCode != 0
		return failed && oomKills() > 0
	}
	return false
}

// oomKills counts the sandbox's processes that were killed for want of memory, each of
// which ends it.
func (b *box) oomKills() int64 {
	if b.group == nil {
		return 0
	}
	f, err := b.group.Read()
	if err == nil {
		return f.OOMKills
	}
	var over *sandbox.EndedError // whose group is removed
	if _, err := b.n.box(b.id); errors.As(err, &over) {
		return over.End.Evidence.OOMKills
	}
	return 0
}

// Execs implements sandbox.Node.
func (n *Node) Execs(ctx context.Context, id string) ([]sandbox.ExecState, error) {
	b, err := n.running(ctx, id)
	if err != nil {
		return nil, err
	}
	list, err := b.h.Execs(ctx)
	for i := range list {
		list[i] = b.judge(ctx, list[i])
	}
	return list, b.explain(ctx, err)
}

// Output implements sandbox.Node.
func (n *Node) Output(ctx context.Context, id, exec, stream string, offset int64, w io.Writer) (int64, error) {
	if stream != "stdout" && stream != "stderr" || offset < 0 {
		return 0, invalid("output %q from %d: want stdout or stderr, from 0 on", stream, offset)
	}
	b, err := n.running(ctx, id)
	if err != nil {
		return 0, err
	}
	st, err := b.h.WaitExec(ctx, exec, -1, -1) // as it is now
	if err != nil {
		return 0, b.explain(ctx, err)
	}
	kept := st.Stdout.Kept
	if stream == "stderr" {
		kept = st.Stderr.Kept
	}
	if offset > kept {
		return 0, invalid("output from %d: %d bytes are kept: go on from there", offset, kept)
	}
	if offset == kept {
		return 0, nil
	}
	f, err := os.Open(holder.OutputPath(b.dir, exec, stream))
	if errors.Is(err, fs.ErrNotExist) { // forgotten just now, for the output of later execs
		if offset == 0 {
			return 0, nil // there is none any more, as the state says now
		}
		return 0, invalid("output from %d: it was forgotten just now", offset)
	}
	if err != nil {
		return 0, fmt.Errorf("%w: %w", sandbox.ErrRuntime, err)
	}
	defer f.Close()
	return io.Copy(w, io.NewSectionReader(f, offset, kept-offset))
}

// stdinChunk is how much of a stdin one call of the holder carries.
const stdinChunk = 256 << 10

// Stdin implements sandbox.Node.
func (n *Node) Stdin(ctx context.Context, id, exec string, offset int64, r io.Reader, end bool) (int64, error) {
	b, err := n.running(ctx, id)
	if err != nil {
		return 0, err
	}
	defer b.use()()
	buf := make([]byte, stdinChunk)
	for {
		k, readErr := io.ReadFull(r, buf)
		last := errors.Is(readErr, io.EOF) || errors.Is(readErr, io.ErrUnexpectedEOF)
		if readErr != nil && !last {
			return offset, readErr
		}
		next, err := b.h.Stdin(ctx, exec, offset, buf[:k], end && last)
		if err != nil {
			return max(offset, next), b.explain(ctx, err)
		}
		offset = next
		if last {
			return offset, nil
		}
	}
}

// Signal implements sandbox.Node.
func (n *Node) Signal(ctx context.Context, id, exec string, signal int) error {
	b, err := n.running(ctx, id)
	if err != nil {
		return err
	}
	release, err := b.rouse(ctx)
	if err != nil {
		return b.explain(ctx, err)
	}
	defer release()
	return b.explain(ctx, b.h.Signal(ctx, exec, signal))
}

// Resize implements sandbox.Node.
func (n *Node) Resize(ctx context.Context, id, exec string, w sandbox.Window) error {
	b, err := n.running(ctx, id)
	if err != nil {
		return err
	}
	return b.explain(ctx, b.h.Resize(ctx, exec, w))
}
