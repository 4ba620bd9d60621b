package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Recipe is how quarry runs one command: runsc's arguments and the bundle, as
// quarry run made them. It can be run again on any folder.
type Recipe struct {
	runsc string
	dir   string   // of the sandbox that it was taken from
	args  []string // runsc's
	spec  []byte   // config.json
	count int
}

// noteRunsc stands in for runsc: it keeps what it is called with, and calls it.
// $1 of "run" is far down its arguments.
const noteRunsc = `#!/bin/sh
previous=
for a; do
	if [ "$previous" = --bundle ]; then
		cp "$a/config.json" %[1]s/config.json
		printf '%%s\n' "$a" >%[1]s/dir
		printf '%%s\n' "$@" >%[1]s/args
	fi
	previous=$a
done
exec %[2]s "$@"
`

// Recipe runs a command once and returns how. flags go before the image.
func (l *Lab) Recipe(ctx context.Context, flags []string, image string, args ...string) (*Recipe, error) {
	real, err := exec.LookPath("runsc")
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(l.Dir, "recipe")
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "runsc"), fmt.Appendf(nil, noteRunsc, dir, real), 0o755); err != nil {
		return nil, err
	}
	cmd := l.Command(ctx, append(append(append([]string{"run"}, flags...), image), args...)...)
	cmd.Env = append(os.Environ(), "PATH="+dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("quarry run %s: %w: %s", strings.Join(args, " "), err, out)
	}
	r := &Recipe{runsc: real}
	var raw [3][]byte
	for i, name := range []string{"dir", "args", "config.json"} {
		if raw[i], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
			return nil, fmt.Errorf("quarry run did not call runsc with a bundle: %w", err)
		}
	}
	r.dir, r.spec = strings.TrimSpace(string(raw[0])), raw[2]
	r.args = strings.Split(strings.TrimSuffix(string(raw[1]), "\n"), "\n")
	if !slices.Contains(r.args, "--detach") {
		return nil, fmt.Errorf("runsc was called without --detach: %q", r.args)
	}
	return r, nil
}

// Run runs the command on a root folder instead of a mounted image and returns
// its output and how long that took, up to its end.
func (r *Recipe) Run(ctx context.Context, l *Lab, root string) (out string, took time.Duration, err error) {
	r.count++
	dir, err := os.MkdirTemp(l.Dir, "local")
	if err != nil {
		return "", 0, err
	}
	defer func() { err = errors.Join(err, l.EndBelow(dir), os.RemoveAll(dir)) }()
	for _, sub := range []string{"runsc", "upper"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o700); err != nil {
			return "", 0, err
		}
	}
	if err := r.writeBundle(dir, root); err != nil {
		return "", 0, err
	}
	// The Sentry outlives runsc run, and becomes a child of this process.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return "", 0, fmt.Errorf("become subreaper: %w", err)
	}
	// Servers started later that outlive their starter are not to be its children.
	defer func() { err = errors.Join(err, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)) }()
	args := make([]string, len(r.args))
	for i, a := range r.args {
		args[i] = strings.ReplaceAll(a, r.dir, dir)
	}
	var buf bytes.Buffer
	cmd := exec.CommandContext(ctx, r.runsc, args...)
	cmd.Stdout, cmd.Stderr = &buf, &buf // which Run copies until the sandbox has closed its end too
	started := time.Now()
	if err := cmd.Run(); err != nil {
		return "", 0, fmt.Errorf("runsc %s: %w: %s", strings.Join(args, " "), err, buf.String())
	}
	status, err := endOf(filepath.Join(dir, "pid"))
	took = time.Since(started)
	if err == nil && status != 0 {
		err = fmt.Errorf("the command on %s ended with %d: %s", root, status, buf.String())
	}
	return buf.String(), took, err
}

// writeBundle writes the spec with another root.
func (r *Recipe) writeBundle(dir, root string) error {
	var spec map[string]json.RawMessage
	if err := json.Unmarshal(r.spec, &spec); err != nil {
		return err
	}
	var rootField map[string]any
	if err := json.Unmarshal(spec["root"], &rootField); err != nil {
		return err
	}
	rootField["path"] = root
	var err error
	if spec["root"], err = json.Marshal(rootField); err != nil {
		return err
	}
	raw, err := json.Marshal(spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), raw, 0o600)
}

// endOf waits for the process that a file names and returns its exit status.
func endOf(pidFile string) (int, error) {
	raw, err := os.ReadFile(pidFile)
	if err != nil {
		return 0, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	if err != nil {
		return 0, fmt.Errorf("%s: %w", pidFile, err)
	}
	var ws syscall.WaitStatus
	for {
		_, err := syscall.Wait4(pid, &ws, 0, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return 0, fmt.Errorf("wait for the sandbox: %w", err)
		}
		return ws.ExitStatus(), nil
	}
}
