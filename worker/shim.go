package worker

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

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
	err := runShim(ctx, dir, args)
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
	cmd.Process.Kill()
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
	return fmt.Errorf("the shim ended (%w): %s", err, proc.LastLine(logPath))
}
