package lab

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
)

// Worker is a quarry worker on loopback, which asks for no token.
type Worker struct {
	URL string
	cmd *exec.Cmd
	log string
}

// Worker starts a worker on a folder, with the images of a data folder.
func (l *Lab) Worker(ctx context.Context, dir, data string, flags ...string) (*Worker, error) {
	w := &Worker{log: dir + ".log"}
	log, err := os.Create(w.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	args := []string{"worker", "--worker-dir", dir, "--data", data, "--no-auth", "--listen", "127.0.0.1:0"}
	w.cmd = l.Command(ctx, append(args, flags...)...)
	w.cmd.Stderr = log
	out, err := w.cmd.StdoutPipe()
	if err == nil {
		err = w.cmd.Start()
	}
	if err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if err != nil || !ok {
		said, _ := os.ReadFile(w.log)
		return nil, errors.Join(fmt.Errorf("quarry worker says %q: %s", line, said), err, w.Stop())
	}
	w.URL = url
	return w, nil
}

// PID is the worker's process.
func (w *Worker) PID() int { return w.cmd.Process.Pid }

// Stop ends the worker; its sandboxes stay.
func (w *Worker) Stop() error {
	if err := w.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return w.cmd.Wait()
}
