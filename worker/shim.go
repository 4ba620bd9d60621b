package worker

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"quarry/internal/proc"
	"quarry/nbd/attach"
	"quarry/worker/folder"
	"quarry/worker/timeline"
)

// start runs a shim in dir; the caller holds the image's lock.
func (w *Worker) start(ctx context.Context, im *folder.Image, dir string, noACL bool) error {
	// What is there is dead, or a shim whose starter died while it began.
	if err := attach.End(ctx, dir); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(dir, "refs"), 0o700); err != nil {
		return err
	}
	args := []string{w.ShimPath, "--socket", w.Dir.ReaderSocket(), "--export", im.ID.Hex(),
		"--size", strconv.FormatInt(im.RAFS.DeviceSize(), 10), "--dir", dir, "--log", filepath.Join(dir, "shim.log"),
		"--read-ahead", strconv.Itoa(w.ReadAheadKiB), "--attach", string(w.Attach.Used())}
	if noACL {
		args = append(args, "--no-acl")
	}
	if b := im.RAFS.Blob; b != nil {
		args = append(args, "--data-offset", strconv.FormatInt(b.MappedOff, 10))
	}
	ready := timeline.Begin(ctx, timeline.Shim)
	err := w.startAgain(ctx, dir, args)
	ready()
	if err != nil {
		return err
	}
	if st, err := attach.ReadState(dir); err == nil {
		for _, s := range st.Steps {
			timeline.Of(ctx).Add(shimStep[s.Name], s.Began, s.Ended)
		}
	}
	return nil
}

// shimStep names a shim's own steps in a run's timeline.
var shimStep = map[string]string{
	attach.StepLink: timeline.ShimLink, attach.StepAttach: timeline.ShimAttach, attach.StepMount: timeline.ShimMount,
}

// startAttempts is how often a shim is started for one mount.
const startAttempts = 3

// startAgain runs a shim, and another when something else was at fault: a reader that
// was away for longer than the shim waits for it, or whoever kills processes.
func (w *Worker) startAgain(ctx context.Context, dir string, args []string) error {
	for n := 1; ; n++ {
		err := runShim(ctx, dir, args)
		if err == nil || n == startAttempts || ctx.Err() != nil || !curable(err) {
			return err
		}
		w.log().DebugContext(ctx, "shim is started again", "dir", dir, "err", err)
		if err := w.EnsureReader(ctx); err != nil {
			return err
		}
	}
}

// curable reports whether another shim may do better than one that has ended.
func curable(err error) bool {
	var e *exec.ExitError
	return proc.Killed(err) || errors.As(err, &e) && e.ExitCode() == attach.ExitNoReader
}

// runShim starts a shim in dir and returns when it says that the mount is ready,
// or leaves nothing of it.
func runShim(ctx context.Context, dir string, args []string) error {
	logPath := filepath.Join(dir, "shim.log")
	out, in, err := os.Pipe()
	if err != nil {
		return err
	}
	defer out.Close()
	cmd, err := proc.Start(args, logPath, in)
	in.Close()
	if err != nil {
		return fmt.Errorf("start the shim: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { out.Close() })
	defer stop()
	line, err := bufio.NewReader(out).ReadString('\n')
	if line == "ready\n" {
		// The shim outlives this process; init reaps it, or this wait does.
		go cmd.Wait() // ends with the shim or with this process
		return nil
	}
	// One that has said why it ends is about to, and its exit status says what of: that
	// is waited for. One that says nothing more is killed, as is who stays after all.
	if err != nil {
		cmd.Process.Kill()
	}
	defer context.AfterFunc(ctx, func() { cmd.Process.Kill() })()
	// Swept before it is waited for: a thread of it may be in mount(2), waiting for
	// a read of its own device, which nothing else ends.
	sweepErr := attach.End(context.WithoutCancel(ctx), dir)
	if waitErr := cmd.Wait(); waitErr != nil {
		err = waitErr // says more than that its output ended
	}
	if ctx.Err() != nil {
		return fmt.Errorf("the shim is not ready: %w; see %s", ctx.Err(), logPath)
	}
	if sweepErr != nil { // on one line
		err = fmt.Errorf("%w; what it left cannot be swept: %w", err, sweepErr)
	}
	said := strings.TrimSpace(line)
	if said == "" { // killed, or a crash, which is in the log
		said = proc.LastLine(logPath)
	}
	return fmt.Errorf("the shim ended (%w): %s", err, said)
}
