package e2e_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"quarry/internal/need"
)

// containerUser is the user that the Dockerfile names.
const containerUser = 65532

// TestTheContainerIsAStoreNode assembles the last stage of the Dockerfile from
// the programs that were built here, as no registry is within reach for the
// first, and starts a store node in it.
func TestTheContainerIsAStoreNode(t *testing.T) {
	need.Root(t)
	b := builder{t: t, root: t.TempDir()}
	context := b.context()
	b.run("bud", "--isolation", "chroot", "-t", "quarry:test", context)
	container := b.run("from", "quarry:test")
	data := need.ShortDir(t)
	if err := os.Chown(data, containerUser, containerUser); err != nil {
		t.Fatal(err)
	}
	inside := func(args ...string) []string {
		return append([]string{"run", "--isolation", "chroot", "-v", data + ":/var/lib/quarry", container, "--"}, args...)
	}
	if token := b.run(inside("quarry", "token", "create", "--data", "/var/lib/quarry", "--scope", "pull")...); !strings.HasPrefix(token, "qry_") {
		t.Fatalf("token create printed %q", token)
	}
	cmd := b.command(inside("quarry", "serve", "--listen", "127.0.0.1:0")...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	stdout := bufio.NewReader(pipe)
	line, err := stdout.ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if !ok {
		cmd.Process.Kill()
		t.Fatalf("the server did not come up: %v, %v\n%s", err, cmd.Wait(), stderr.Bytes())
	}
	raw, err := os.ReadFile(filepath.Join(data, "lock"))
	var holder struct {
		PID int `json:"pid"`
	}
	if err != nil || json.Unmarshal(raw, &holder) != nil {
		t.Fatalf("who holds the data folder: %v, %q", err, raw)
	}
	pid := holder.PID
	answer, err := http.Get(url + "/healthz")
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Errorf("/healthz: %v, %v", answer, err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if want := fmt.Sprintf("\nUid:\t%d\t", containerUser); err != nil || !strings.Contains(string(status), want) {
		t.Errorf("want a process with %q, got %v\n%s", want, err, status)
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	rest, _ := io.ReadAll(stdout) // Wait says what went wrong
	if err := cmd.Wait(); err != nil || string(rest) != "stopped\n" {
		t.Errorf("after SIGTERM: %v, stdout %q\n%s", err, rest, stderr.Bytes())
	}
}

// builder runs buildah with a storage of its own.
type builder struct {
	t    *testing.T
	root string
}

func (b builder) command(args ...string) *exec.Cmd {
	own := []string{"--root", filepath.Join(b.root, "storage"), "--runroot", filepath.Join(b.root, "run"), "--storage-driver", "vfs"}
	return exec.CommandContext(b.t.Context(), need.Tool(b.t, "buildah"), append(own, args...)...)
}

// run returns the last line on stdout.
func (b builder) run(args ...string) string {
	b.t.Helper()
	cmd := b.command(args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		b.t.Fatalf("buildah %s: %v\n%s%s", args[0], err, out, stderr.Bytes())
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[len(lines)-1]
}

// context makes a folder with what the first stage leaves in /out, and the last
// stage as it stands.
func (b builder) context() string {
	b.t.Helper()
	dir := b.t.TempDir()
	dockerfile, err := os.ReadFile("../Dockerfile")
	if err != nil {
		b.t.Fatal(err)
	}
	_, last, ok := strings.Cut(string(dockerfile), "\nFROM scratch\n")
	if !ok {
		b.t.Fatal("the Dockerfile has no stage FROM scratch")
	}
	last = strings.NewReplacer("--from=build ", "", " /out/", " out/").Replace(last)
	if err := os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte("FROM scratch\n"+last), 0o644); err != nil {
		b.t.Fatal(err)
	}
	bin := filepath.Join(dir, "out", "usr", "local", "bin")
	data := filepath.Join(dir, "out", "var", "lib", "quarry")
	for _, p := range []string{bin, data, filepath.Join(dir, "out", "tmp")} {
		if err := os.MkdirAll(p, 0o755); err != nil {
			b.t.Fatal(err)
		}
	}
	for _, name := range []string{"quarry", "quarry-shim"} {
		if out, err := exec.Command("cp", filepath.Join(os.Getenv("QUARRY_BIN"), name), bin).CombinedOutput(); err != nil {
			b.t.Fatalf("cp %s: %v: %s", name, err, out)
		}
	}
	return dir
}
