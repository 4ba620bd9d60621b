package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"quarry/nbd/attach"
	"quarry/store/image"
	"quarry/worker"
	"quarry/worker/folder"
)

// workerFlags are the flags of the commands that use images on this machine.
type workerFlags struct {
	target    target
	dir       string
	platform  string
	readAhead int
	reader    readerFlags
	attach    string
	noTrace   bool
	wait      time.Duration
}

func (w *workerFlags) flags(c *cobra.Command) {
	w.target.flags(c)
	w.dirFlag(c)
	w.reader.flags(c)
	c.Flags().DurationVar(&w.wait, "wait", 2*time.Minute, "how long to wait for an image that the store is still converting; 0 is not at all")
	c.Flags().StringVar(&w.platform, "platform", "", "OS/ARCH[/VARIANT] of the image; default is this machine's")
}

func (w *workerFlags) mountFlags(c *cobra.Command) {
	w.flags(c)
	c.Flags().IntVar(&w.readAhead, "read-ahead", attach.DefaultReadAhead, fmt.Sprintf("read-ahead of the device in KiB, 0 to %d; 0 is none", attach.MaxReadAhead))
	c.Flags().BoolVar(&w.noTrace, "no-trace", false, "neither tell the store what is touched nor use what it knows of others, for what is graded")
	def := os.Getenv("QUARRY_ATTACH")
	if def == "" {
		def = string(attach.ModeAuto)
	}
	c.Flags().StringVar(&w.attach, "attach", def, "how an image becomes a device when it is not mounted yet: "+attach.Modes+" (env QUARRY_ATTACH)")
}

func defaultWorkerDir() string { return cmp.Or(os.Getenv("QUARRY_WORKER"), "/var/lib/quarry/worker") }

func (w *workerFlags) dirFlag(c *cobra.Command) {
	c.Flags().StringVar(&w.dir, "worker-dir", defaultWorkerDir(), "folder of this machine's images and mounts (env QUARRY_WORKER)")
}

func (w *workerFlags) wanted(name string) (ref image.Ref, p image.Platform, err error) {
	if ref, err = image.ParseRef(name); err != nil {
		return ref, p, fmt.Errorf("%w: %w", errUsage, err)
	}
	if w.platform == "" {
		return ref, image.HostPlatform(), nil
	}
	p, err = platformFlag(w.platform)
	return ref, p, err
}

// worker opens this machine's worker and sweeps what killed commands left in it.
func (w *workerFlags) worker(ctx context.Context, stderr io.Writer) (*worker.Worker, error) {
	if err := w.reader.check(); err != nil {
		return nil, err
	}
	if w.readAhead < 0 || w.readAhead > attach.MaxReadAhead {
		return nil, fmt.Errorf("%w: --read-ahead %d: want 0 to %d KiB", errUsage, w.readAhead, attach.MaxReadAhead)
	}
	d, err := folder.Open(w.dir)
	if err != nil {
		return nil, err
	}
	mode := attach.ModeAuto
	if w.attach != "" { // else the command mounts nothing
		if mode, err = attach.ParseMode(w.attach); err != nil {
			return nil, fmt.Errorf("%w: %w", errUsage, err)
		}
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	shim, err := findShim(self)
	if err != nil {
		return nil, err
	}
	runsc, err := exec.LookPath("runsc")
	if err != nil {
		runsc = "" // only run needs it, and says so
	}
	wk := &worker.Worker{
		Dir: d, ReaderCommand: background(self, "reader", d, w.reader), KeeperCommand: background(self, "keeper", d, w.reader),
		ShimPath: shim, Runsc: runsc, ReadAheadKiB: w.readAhead, Attach: mode, NoTrace: w.noTrace, Log: warnings(stderr),
	}
	if err := wk.Sweep(ctx); err != nil {
		wk.Log.WarnContext(ctx, "leftovers of a killed process stay", "err", err)
	}
	return wk, nil
}

// background is the command line of a background process of the folder.
func background(self, name string, d folder.Dir, f readerFlags) []string {
	return append([]string{self, name, "--worker-dir", d.Path()}, f.args()...)
}

// findShim looks beside this program, then on the PATH.
func findShim(self string) (string, error) {
	beside := filepath.Join(filepath.Dir(self), "quarry-shim")
	if _, err := os.Stat(beside); err == nil {
		return beside, nil
	}
	path, err := exec.LookPath("quarry-shim")
	if err != nil {
		return "", fmt.Errorf("quarry-shim is neither beside %s nor on the PATH: install both programs together", self)
	}
	return filepath.Abs(path)
}

// warnings is the log of a command that a person runs: warnings and errors, as
// text.
func warnings(w io.Writer) *slog.Logger {
	return slog.New(slog.NewTextHandler(w, &slog.HandlerOptions{Level: slog.LevelWarn}))
}
