package nbd_test

import (
	"bytes"
	"encoding/json"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"quarry/internal/need"
	"quarry/nbd"
)

func uri(sock string) string { return "nbd+unix:///image?socket=" + sock }

func run(t *testing.T, name string, args ...string) []byte {
	t.Helper()
	cmd := exec.CommandContext(testContext(t), name, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s%s", name, args, err, out, stderr.Bytes())
	}
	return out
}

func TestNbdinfoSeesTheExportAsMade(t *testing.T) {
	tool := need.Tool(t, "nbdinfo")
	sock := serve(t, &memory{data: pattern(1 << 20)}, func(s *nbd.Server) {
		s.Names = func() []string { return []string{"image"} }
	})
	var got struct {
		Protocol   string
		Structured bool
		TLS        bool
		Exports    []map[string]any
	}
	if err := json.Unmarshal(run(t, tool, "--json", "--no-content", uri(sock)), &got); err != nil {
		t.Fatal(err)
	}
	if got.Protocol != "newstyle-fixed" || !got.Structured || got.TLS || len(got.Exports) != 1 {
		t.Fatalf("nbdinfo says %+v", got)
	}
	for key, want := range map[string]any{
		"export-name": "image", "export-size": float64(1 << 20), "is_read_only": true, "can_multi_conn": true, "can_df": true,
		"can_cache": true, "can_flush": false, "can_trim": false, "can_zero": false,
		"block_size_minimum": float64(1), "block_size_preferred": float64(4096), "block_size_maximum": float64(32 << 20),
	} {
		if got := got.Exports[0][key]; got != want {
			t.Errorf("nbdinfo says %s is %v, want %v", key, got, want)
		}
	}
	if out := run(t, tool, "--list", "--no-content", uri(sock)); !bytes.Contains(out, []byte(`export="image"`)) {
		t.Errorf("nbdinfo --list says\n%s", out)
	}
}

func TestNbdcopyAndQemuImgReadTheSameBytes(t *testing.T) {
	nbdcopy, qemuImg := need.Tool(t, "nbdcopy"), need.Tool(t, "qemu-img")
	data := pattern(9<<20 + 4096)
	sock := serve(t, &memory{data: data})
	dir := t.TempDir()
	plain, copied, converted := filepath.Join(dir, "plain"), filepath.Join(dir, "copied"), filepath.Join(dir, "converted")
	if err := os.WriteFile(plain, data, 0o600); err != nil {
		t.Fatal(err)
	}
	run(t, nbdcopy, uri(sock), copied)
	run(t, qemuImg, "convert", "-f", "raw", "-O", "raw", uri(sock), converted)
	run(t, qemuImg, "compare", "-f", "raw", "-F", "raw", uri(sock), plain)
	for _, path := range []string{copied, converted} {
		if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, data) {
			t.Errorf("%s: %v, or other bytes", filepath.Base(path), err)
		}
	}
	other := bytes.Clone(data)
	other[len(other)-1] ^= 1
	if err := os.WriteFile(plain, other, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := exec.CommandContext(testContext(t), qemuImg, "compare", "-f", "raw", "-F", "raw", uri(sock), plain).Run(); err == nil {
		t.Error("qemu-img compare finds no difference where there is one")
	}
}

func TestWritersAreRefused(t *testing.T) {
	nbdcopy := need.Tool(t, "nbdcopy")
	data := pattern(1 << 20)
	sock := serve(t, &memory{data: data})
	src := filepath.Join(t.TempDir(), "src")
	if err := os.WriteFile(src, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := exec.CommandContext(testContext(t), nbdcopy, src, uri(sock)).Run(); err == nil {
		t.Error("nbdcopy could write")
	}
	if !bytes.Equal(data, pattern(1<<20)) {
		t.Error("a write changed the device")
	}
}

// TestClientReadsFromNbdkit runs the client against a server of others.
func TestClientReadsFromNbdkit(t *testing.T) {
	nbdkit := need.Tool(t, "nbdkit")
	data := pattern(5 << 20)
	file := filepath.Join(t.TempDir(), "f")
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	patterned := make([]byte, 5<<20) // nbdkit-pattern-plugin: each 8 bytes are their offset
	for i := range len(patterned) / 8 {
		for j := range 8 {
			patterned[8*i+j] = byte(8 * i >> (8 * (7 - j)))
		}
	}
	for name, tc := range map[string]struct {
		args []string
		want []byte
	}{
		"file":    {[]string{"file", file}, data},
		"memory":  {[]string{"memory", "5M"}, make([]byte, 5<<20)},
		"pattern": {[]string{"pattern", "5M"}, patterned},
	} {
		t.Run(name, func(t *testing.T) {
			c := dial(t, startNbdkit(t, nbdkit, tc.args...))
			if c.Size() != 5<<20 {
				t.Errorf("size %d, want %d", c.Size(), 5<<20)
			}
			p := make([]byte, c.Size())
			if err := readAt(testContext(t), c, p, 0); err != nil || !bytes.Equal(p, tc.want) {
				t.Errorf("read: %v, or other bytes", err)
			}
		})
	}
}

func TestClientSeesNbdkitsErrors(t *testing.T) {
	nbdkit := need.Tool(t, "nbdkit")
	c := dial(t, startNbdkit(t, nbdkit, "--filter=error", "memory", "1M", "error-pread=EIO", "error-pread-rate=100%"))
	if err := readAt(testContext(t), c, make([]byte, 4096), 0); err == nil {
		t.Error("a failing read succeeded")
	}
}

func startNbdkit(t *testing.T, nbdkit string, args ...string) string {
	t.Helper()
	sock := filepath.Join(t.TempDir(), "s")
	cmd := exec.CommandContext(testContext(t), nbdkit, append([]string{"--foreground", "--exit-with-parent", "--readonly", "--unix", sock}, args...)...)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
	})
	for range 6000 {
		if c, err := net.Dial("unix", sock); err == nil {
			c.Close()
			return sock
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("nbdkit %v does not listen", args)
	return ""
}
