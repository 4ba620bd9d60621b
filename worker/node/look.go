package node

import (
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"fmt"
	"io"
	"os/exec"
	"path"
	"strings"
	"time"

	"quarry/worker/cgroup"
	"quarry/worker/sandbox"
)

// look finds out what this machine has. What it lacks is said in Status; a node that
// cannot make sandboxes still keeps those that it has.
func (n *Node) look(ctx context.Context) {
	lacks := func(format string, args ...any) string {
		text := fmt.Sprintf(format, args...)
		n.cannot = append(n.cannot, text)
		n.log.WarnContext(ctx, "this machine lacks something for sandboxes", "what", text)
		return text
	}
	// Two workers of one machine do not meet.
	sum := sha256.Sum256([]byte(n.c.Dir.Path()))
	tree, err := cgroup.Open(cgroup.Config{Parent: path.Join(n.c.CgroupParent, hex.EncodeToString(sum[:6]))})
	if err != nil {
		lacks("no limits of memory, processors and processes, and guests see the whole machine: %v", err)
	} else {
		n.tree = tree
	}
	n.runsc, err = RunscVersion(ctx, n.c.Worker.Runsc)
	switch {
	case err != nil:
		n.noCreate = fmt.Errorf("%w: %s", sandbox.ErrUnsupported, lacks("no sandboxes: runsc: %v", err))
	case n.c.RunscVersion != "" && n.runsc != n.c.RunscVersion:
		n.noCreate = fmt.Errorf("%w: %s", sandbox.ErrUnsupported,
			lacks("no sandboxes: runsc at %s is of version %s, and this quarry is tested with %s", n.c.Worker.Runsc, n.runsc, n.c.RunscVersion))
	}
	if n.c.Network == nil {
		lacks("no network for sandboxes")
	}
	if n.c.Guest == "" {
		lacks("no file calls: the quarry-guest program is not there")
	}
}

// versionPatience bounds runsc --version, and maxVersion what it prints.
const (
	versionPatience = 20 * time.Second
	maxVersion      = 4 << 10
)

// RunscVersion tells which runsc a program is: by the module that it was built from,
// or, of one that was not built by Go's tools, by what it says.
func RunscVersion(ctx context.Context, path string) (string, error) {
	if path == "" {
		return "", fmt.Errorf("it is not on the PATH")
	}
	if info, err := buildinfo.ReadFile(path); err == nil && strings.HasPrefix(info.Main.Version, "v") {
		return info.Main.Version, nil
	}
	ctx, cancel := context.WithTimeout(ctx, versionPatience)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, "--version")
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", err
	}
	if err := cmd.Start(); err != nil {
		return "", err
	}
	text, readErr := io.ReadAll(io.LimitReader(out, maxVersion))
	if err := cmd.Wait(); err != nil || readErr != nil {
		return "", fmt.Errorf("%s --version: %w", path, err)
	}
	// "runsc version release-20260701.0\nspec: 1.2.1\n"
	first, _, _ := strings.Cut(string(text), "\n")
	version, ok := strings.CutPrefix(first, "runsc version ")
	if !ok {
		return "", fmt.Errorf("%s --version says %q", path, first)
	}
	return version, nil
}
