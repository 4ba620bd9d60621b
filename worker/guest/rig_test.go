package guest_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"quarry/internal/need"
	"quarry/worker/guest"
)

// helper is the helper program, built once.
var helper string

func TestMain(m *testing.M) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "quarry-guest")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		helper = filepath.Join(dir, guest.Program)
		cmd := exec.Command("go", "build", "-o", helper, "quarry/cmd/quarry-guest")
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "%v\n%s", err, out)
			return 1
		}
		return m.Run()
	}())
}

// cell is a folder of this machine as a guest: the helper runs in it by chroot.
type cell struct {
	root string
	cat  func(ctx context.Context, path string, out *os.File) error
	// stand is called before the helper starts, to change what it finds.
	stand func()
}

// Run is guest.Runner's.
func (c *cell) Run(ctx context.Context, argv []string, stdin, stdout, stderr *os.File) (int, error) {
	if c.stand != nil {
		c.stand()
	}
	cmd := exec.CommandContext(ctx, "/"+guest.Program)
	cmd.Args, cmd.Env = argv, []string{}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdout, stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: c.root}
	cmd.Dir = "/"
	err := cmd.Run()
	var e *exec.ExitError
	if errors.As(err, &e) {
		return e.ExitCode(), nil
	}
	return 0, err
}

// Cat is guest.Runner's.
func (c *cell) Cat(ctx context.Context, path string, out *os.File) error {
	return c.cat(ctx, path, out)
}

// newCell makes a guest, and returns the folder that is its /w.
func newCell(t *testing.T, limits guest.Limits) (*guest.Files, *cell, string) {
	t.Helper()
	need.Root(t)
	c := &cell{root: t.TempDir()}
	b, err := os.ReadFile(helper)
	if err != nil {
		t.Fatal(err)
	}
	// A new inode each time: a file that was just written can be busy for others.
	if err := os.WriteFile(filepath.Join(c.root, guest.Program), b, 0o700); err != nil {
		t.Fatal(err)
	}
	w := filepath.Join(c.root, "w")
	if err := os.Mkdir(w, 0o755); err != nil {
		t.Fatal(err)
	}
	return guest.New(guest.Config{Runner: c, WorkDir: "/w", Limits: limits}), c, w
}
