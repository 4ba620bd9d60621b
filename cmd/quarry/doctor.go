package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"quarry/nbd/attach"
	"quarry/worker/node"
)

// runscModule is the version of runsc that quarry is tested with.
const runscModule = "gvisor.dev/gvisor/runsc@v0.0.0-20260701204157-69c2d17aea96"

// runscVersion is the version in runscModule, as a runsc that Go built says it is.
func runscVersion() string {
	_, version, _ := strings.Cut(runscModule, "@")
	return version
}

func newDoctor() *cobra.Command {
	return &cobra.Command{
		Use:   "doctor",
		Short: "say what this machine has and lacks for running sandboxes",
		Long: `doctor looks for what quarry mount, quarry run and quarry worker need and prints a line for each thing,
with the fix for what is missing. It exits 1 when something is missing.`,
		Args: exactArgs(0),
		RunE: func(c *cobra.Command, _ []string) error { return runDoctor(c.Context(), c.OutOrStdout()) },
	}
}

func runDoctor(ctx context.Context, stdout io.Writer) error {
	missing := 0
	for _, p := range []struct {
		what, fix string
		look      func(context.Context) (string, error)
	}{
		{"root rights", "run as root", lookRoot},
		{"kernel", "boot Linux 5.16 or newer: older ones do not know EROFS images of several devices", lookKernel},
		{"kernel EROFS", "modprobe erofs", lookFilesystem("erofs")},
		{"FUSE", "modprobe fuse", lookFile("/dev/fuse")},
		{"loop devices", "modprobe loop", lookFile("/dev/loop-control")},
		{"quarry-shim", "install it beside quarry", lookShim},
		{"quarry-guest", "install it beside quarry-shim", lookGuest},
		{"runsc", "CGO_ENABLED=0 go install " + runscModule + ", and put it on the PATH", lookRunsc},
	} {
		found, err := p.look(ctx)
		if err != nil {
			missing++
			fmt.Fprintf(stdout, "missing  %-14s %v; fix: %s\n", p.what, err, p.fix)
			continue
		}
		fmt.Fprintf(stdout, "ok       %-14s %s\n", p.what, found)
	}
	fmt.Fprintf(stdout, "         %-14s %s\n", "kernel NBD", kernelNBD())
	fmt.Fprintf(stdout, "         %-14s %s/%s, %d processors\n", "machine", runtime.GOOS, runtime.GOARCH, runtime.NumCPU())
	if missing > 0 {
		return fmt.Errorf("%d things are missing", missing)
	}
	return nil
}

// kernelNBD says what the probe found and what follows from it; without NBD
// nothing is missing, because FUSE does as well.
func kernelNBD() string {
	if err := attach.ProbeNBD(); err != nil {
		return fmt.Sprintf("not used: %v; images are attached through FUSE", err)
	}
	return "answers; images are attached through it, with --attach fuse through FUSE"
}

func lookRoot(context.Context) (string, error) {
	if uid := os.Geteuid(); uid != 0 {
		return "", fmt.Errorf("uid is %d", uid)
	}
	return "uid 0", nil
}

func lookKernel(context.Context) (string, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "", err
	}
	release := unix.ByteSliceToString(u.Release[:])
	var major, minor int
	if n, _ := fmt.Sscanf(release, "%d.%d", &major, &minor); n != 2 {
		return "", fmt.Errorf("release %q has no version", release)
	}
	if major < 5 || major == 5 && minor < 16 {
		return "", fmt.Errorf("kernel %s is too old", release)
	}
	return "Linux " + release, nil
}

func lookFile(path string) func(context.Context) (string, error) {
	return func(context.Context) (string, error) {
		_, err := os.Stat(path)
		return path, err
	}
}

func lookFilesystem(name string) func(context.Context) (string, error) {
	return func(context.Context) (string, error) {
		raw, err := os.ReadFile("/proc/filesystems")
		if err != nil {
			return "", err
		}
		for line := range strings.Lines(string(raw)) {
			if f := strings.Fields(line); len(f) > 0 && f[len(f)-1] == name {
				return "in /proc/filesystems", nil
			}
		}
		return "", fmt.Errorf("%s is not in /proc/filesystems", name)
	}
}

func lookShim(context.Context) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	return findShim(self)
}

func lookRunsc(ctx context.Context) (string, error) {
	path, err := exec.LookPath("runsc")
	if err != nil {
		return "", err
	}
	version, err := node.RunscVersion(ctx, path)
	if err != nil {
		return "", err
	}
	if version != runscVersion() {
		return "", fmt.Errorf("%s is of version %s, and quarry is tested with another (quarry worker --any-runsc takes it)", path, version)
	}
	return path + ", version " + version, nil
}

func lookGuest(context.Context) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	shim, err := findShim(self)
	if err != nil {
		return "", err
	}
	if path := besides(shim, "quarry-guest"); path != "" {
		return path, nil
	}
	return "", fmt.Errorf("it is not in %s: quarry worker serves no file calls", filepath.Dir(shim))
}
