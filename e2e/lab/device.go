package lab

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
	"syscall"
	"time"

	"quarry/rafs"
)

// Export is an image as an NBD server offers it.
type Export struct {
	Socket  string // unix
	Name    string
	Size    int64
	DataOff int64 // where the data begins
}

// ReaderExport returns the one image of a worker folder as its reader offers it.
func ReaderExport(worker string) (Export, error) {
	found, err := filepath.Glob(filepath.Join(worker, "images", "*", "bootstrap"))
	if err != nil || len(found) != 1 {
		return Export{}, fmt.Errorf("%d images in %s, want 1 (%w)", len(found), worker, err)
	}
	raw, err := os.ReadFile(found[0])
	if err != nil {
		return Export{}, err
	}
	im, err := rafs.Decode(raw)
	if err != nil {
		return Export{}, err
	}
	e := Export{Socket: filepath.Join(worker, "reader.sock"), Name: filepath.Base(filepath.Dir(found[0])), Size: im.DeviceSize()}
	if im.Blob != nil {
		e.DataOff = im.Blob.MappedOff
	}
	return e, nil
}

// Copy writes the whole export to a file.
func (e Export) Copy(ctx context.Context, file string) error {
	out, err := exec.CommandContext(ctx, "nbdcopy", "nbd+unix:///"+e.Name+"?socket="+e.Socket, file).CombinedOutput()
	if err != nil {
		return fmt.Errorf("nbdcopy: %w: %s", err, out)
	}
	return nil
}

// Process is a running program of a lab.
type Process struct{ cmd *exec.Cmd }

// PID is its number.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Stop ends it with SIGTERM and waits; an exit status is no error.
func (p *Process) Stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	if err := p.cmd.Wait(); err != nil && !errors.As(err, new(*exec.ExitError)) {
		return err
	}
	return nil
}

// Kill ends it at once and waits.
func (p *Process) Kill() {
	p.cmd.Process.Kill()
	p.cmd.Wait()
}

// Shim is a quarry-shim that has mounted an export.
type Shim struct {
	Process
	Dir string
}

// Root is where the image is mounted.
func (s *Shim) Root() string { return filepath.Join(s.Dir, "root") }

// Shim mounts an export with a shim of its own. flags are the shim's.
func (l *Lab) Shim(ctx context.Context, e Export, flags ...string) (*Shim, error) {
	dir, err := os.MkdirTemp(l.Dir, "shim")
	if err != nil {
		return nil, err
	}
	args := append([]string{
		"--socket", e.Socket, "--export", e.Name, "--size", strconv.FormatInt(e.Size, 10),
		"--data-offset", strconv.FormatInt(e.DataOff, 10), "--dir", dir, "--log", dir + ".log",
	}, flags...)
	cmd := exec.CommandContext(ctx, filepath.Join(l.bin, "quarry-shim"), args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if line != "ready\n" {
		cmd.Process.Kill()
		said, _ := os.ReadFile(dir + ".log")
		return nil, fmt.Errorf("quarry-shim is not ready (%w): %s", errors.Join(err, cmd.Wait()), said)
	}
	return &Shim{Process{cmd}, dir}, nil
}

// Nbdkit serves with nbdkit on a socket. args come after the socket's; exports of
// any name are served.
func (l *Lab) Nbdkit(ctx context.Context, socket string, args ...string) (*Process, error) {
	args = append([]string{"--foreground", "--exit-with-parent", "--readonly", "--unix", socket}, args...)
	cmd := exec.CommandContext(ctx, "nbdkit", args...)
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	var said strings.Builder
	cmd.Stderr = &said
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	for range 6000 { // a minute
		if _, err := os.Stat(socket); err == nil {
			return &Process{cmd}, nil
		}
		time.Sleep(10 * time.Millisecond)
	}
	cmd.Process.Kill()
	cmd.Wait()
	return nil, fmt.Errorf("nbdkit does not listen: %s", said.String())
}
