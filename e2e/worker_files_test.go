package e2e_test

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"quarry/api/sandboxes"
	"quarry/api/sandboxes/client"
	"quarry/worker/sandbox"
)

// sandboxOf creates a sandbox of the rig's image and deletes it with the test.
func (r *workerRig) sandboxOf(ctx context.Context, c *client.Client) string {
	r.t.Helper()
	sb, err := c.Create(ctx, sandbox.Spec{Image: "t/task"}, "")
	check(r.t, err)
	return sb.ID
}

// What goes through the API into a sandbox comes out as it was: names, content, parts,
// tars, and what is no file is said to be none.
func TestFilesThroughTheAPI(t *testing.T) {
	r := newWorkerRig(t, "cold")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := r.client()
	id := r.sandboxOf(ctx, c)
	// Before any other command: the hosts file is there from the first instruction on.
	code, out, err := run(ctx, c, id, sandbox.ExecSpec{Shell: "cat /etc/hosts && echo more >> /etc/hosts && rm /etc/hosts && test -s /etc/passwd"})
	if err != nil || code != 0 || !strings.Contains(out, "localhost") || !strings.Contains(out, "sandbox") {
		t.Errorf("the hosts file: %d %q, %v", code, out, err)
	}
	big := make([]byte, 5<<20+1)
	_, _ = rand.Read(big)
	for name, b := range map[string][]byte{"/tmp/a b\n": []byte("x"), "/tmp/\xff\xfe": []byte("y"), "/root/empty": {}, "/root/big": big, "/tmp/-rf ": []byte("z")} {
		a, err := c.WriteFile(ctx, id, name, sandbox.WriteOptions{Size: int64(len(b))}, bytes.NewReader(b))
		if err != nil || a.Path != name || a.Size != int64(len(b)) {
			t.Errorf("%q: %+v, %v", name, a, err)
		}
		var got bytes.Buffer
		if i, err := c.ReadFile(ctx, id, name, sandbox.ReadOptions{Length: -1}, &got); err != nil || !bytes.Equal(got.Bytes(), b) || i.Path != name {
			t.Errorf("%q: %d bytes, %+v, %v", name, got.Len(), i, err)
		}
	}
	var part bytes.Buffer
	if _, err := c.ReadFile(ctx, id, "/root/big", sandbox.ReadOptions{Offset: 1 << 20, Length: 70001}, &part); err != nil || !bytes.Equal(part.Bytes(), big[1<<20:][:70001]) {
		t.Errorf("a part: %d bytes, %v", part.Len(), err)
	}
	part.Reset()
	if _, err := c.ReadFile(ctx, id, "/root/big", sandbox.ReadOptions{Offset: -7, Length: -1}, &part); err != nil || !bytes.Equal(part.Bytes(), big[len(big)-7:]) {
		t.Errorf("the end: %d bytes, %v", part.Len(), err)
	}
	list, err := c.ListFiles(ctx, id, "/tmp", 1)
	if err != nil || len(list) != 3 || list[2].Path != "/tmp/\xff\xfe" {
		t.Errorf("%+v, %v", list, err)
	}
	if _, _, err := run(ctx, c, id, sandbox.ExecSpec{Shell: "cd /tmp && mkfifo fifo && ln -s loop loop && ln -s /etc/hostname link && mknod null c 1 3 && mknod zero c 1 5 && mkdir -p t/d && echo 1 > t/d/f && ln t/d/f t/d/g && ln -s ../../x t/d/l"}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]error{"/tmp/fifo": sandbox.ErrFileType, "/tmp/loop": sandbox.ErrFilePath, "/tmp/null": sandbox.ErrFileType, "/tmp/zero": sandbox.ErrFileType, "/dev/zero": sandbox.ErrFileType, "/tmp": sandbox.ErrFileType, "/none": sandbox.ErrFileNotFound} {
		if _, err := c.ReadFile(ctx, id, name, sandbox.ReadOptions{Length: -1}, io.Discard); !errors.Is(err, want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.WriteFile(ctx, id, "/root/big", sandbox.WriteOptions{Size: 1, SHA256: strings.Repeat("0", 64)}, strings.NewReader("x")); !errors.Is(err, sandbox.ErrDigest) {
		t.Errorf("another digest: %v", err)
	}
	var down, again bytes.Buffer
	check(t, c.TarDown(ctx, id, sandbox.TarOptions{Path: "/tmp/t"}, &down))
	check(t, c.TarUp(ctx, id, "/root/t", bytes.NewReader(down.Bytes())))
	check(t, c.TarDown(ctx, id, sandbox.TarOptions{Path: "/root/t"}, &again))
	if !bytes.Equal(down.Bytes(), again.Bytes()) {
		t.Error("the same files are another tar")
	}
	// It fails behind the folder, whose bytes have been sent.
	if err := c.TarDown(ctx, id, sandbox.TarOptions{Path: "/tmp/t", MaxBytes: 1}, io.Discard); !errors.Is(err, sandbox.ErrTooLarge) {
		t.Errorf("a tar of more than was asked for: %v", err)
	}
	var bad bytes.Buffer
	tw := tar.NewWriter(&bad)
	check(t, tw.WriteHeader(&tar.Header{Name: "../out", Typeflag: tar.TypeReg, Mode: 0o644}))
	check(t, tw.Close())
	if err := c.TarUp(ctx, id, "/root/t", &bad); !errors.Is(err, sandbox.ErrFilePath) {
		t.Errorf("a tar that leads out: %v", err)
	}
	r.pausedFiles(ctx, c, id, big)
	_, err = c.Delete(ctx, id)
	check(t, err)
	r.nothingLeftOf()
}

// pausedFiles reads files of a sandbox that is paused, and stays so.
func (r *workerRig) pausedFiles(ctx context.Context, c *client.Client, id string, big []byte) {
	t := r.t
	t.Helper()
	r.pause(ctx, c, id)
	var got bytes.Buffer
	if i, err := c.ReadFile(ctx, id, "/root/big", sandbox.ReadOptions{Length: -1}, &got); err != nil || !bytes.Equal(got.Bytes(), big) || i.Size != int64(len(big)) {
		t.Errorf("paused: %d bytes, %+v, %v", got.Len(), i, err)
	}
	got.Reset()
	if _, err := c.ReadFile(ctx, id, "/root/big", sandbox.ReadOptions{Offset: -7, Length: -1}, &got); err != nil || !bytes.Equal(got.Bytes(), big[len(big)-7:]) {
		t.Errorf("paused, the end: %d bytes, %v", got.Len(), err)
	}
	for name, want := range map[string]error{"/tmp/fifo": sandbox.ErrFileStuck, "/tmp/zero": sandbox.ErrNotReady, "/dev/null": sandbox.ErrFileType, "/tmp/link": sandbox.ErrFilePath, "/tmp": sandbox.ErrFileType, "/none": sandbox.ErrFileNotFound} {
		if _, err := c.ReadFile(ctx, id, name, sandbox.ReadOptions{Length: -1}, io.Discard); !errors.Is(err, want) {
			t.Errorf("paused, %s: %v", name, err)
		}
	}
	// An empty file is one. So is a null device, of which no more comes, while nobody can be asked.
	for _, name := range []string{"/root/empty", "/tmp/null"} {
		got.Reset()
		if i, err := c.ReadFile(ctx, id, name, sandbox.ReadOptions{Length: -1}, &got); err != nil || got.Len() > 0 || i.Path != name || i.Size != 0 {
			t.Errorf("paused, %s: %d bytes, %+v, %v", name, got.Len(), i, err)
		}
	}
	if _, err := c.StatFile(ctx, id, "/tmp"); !errors.Is(err, sandbox.ErrNotReady) {
		t.Errorf("a stat wants tasks of the guest: %v", err)
	}
	if sb, err := c.Get(ctx, id); err != nil || sb.State != sandbox.StatePaused {
		t.Errorf("%s, %v", sb.State, err)
	}
	_, err := c.Resume(ctx, id)
	check(t, err)
	if _, err := c.StatFile(ctx, id, "/tmp"); err != nil {
		t.Error(err)
	}
}

// Private tests come after the agent has stopped, to be read by everybody and written
// by nobody, and go again.
func TestAShareComesLaterAndGoes(t *testing.T) {
	shared := t.TempDir()
	check(t, os.MkdirAll(filepath.Join(shared, "suite/sub"), 0o755))
	check(t, os.WriteFile(filepath.Join(shared, "suite/sub/check.sh"), []byte("echo passed\n"), 0o755))
	r := newWorkerRig(t, "cold", "--share", "tests="+shared)
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := r.client()
	id := r.sandboxOf(ctx, c)
	check(t, c.Give(ctx, id, sandbox.Share{Name: "tests/suite", Target: "/opt/tests"}))
	check(t, c.Give(ctx, id, sandbox.Share{Name: "tests/suite/sub/check.sh", Target: "/opt/check.sh"}))
	for text, want := range map[string]string{
		"sh /opt/tests/sub/check.sh; sh /opt/check.sh":                        "passed\npassed\n",
		"echo x > /opt/tests/new || echo refused":                             "refused\n",
		"echo x > /opt/check.sh || echo refused":                              "refused\n",
		"rm -rf /opt/tests/sub; ls /opt/tests/sub":                            "check.sh\n",
		"umount /opt/tests || mount -o remount,rw /opt/tests || echo refused": "refused\n",
	} {
		if _, out, err := run(ctx, c, id, sandbox.ExecSpec{Shell: "{ " + text + "; } 2>/dev/null"}); err != nil || out != want {
			t.Errorf("%s: %q, %v", text, out, err)
		}
	}
	check(t, c.Take(ctx, id, "/opt/tests"))
	check(t, c.Take(ctx, id, "/opt/check.sh"))
	if _, out, err := run(ctx, c, id, sandbox.ExecSpec{Shell: "ls -A /opt/tests; cat /opt/check.sh"}); err != nil || out != "" {
		t.Errorf("%q, %v", out, err)
	}
	for name, s := range map[string]sandbox.Share{
		"no such file": {Name: "tests/none", Target: "/opt/x"}, "a way out": {Name: "tests/../../etc", Target: "/opt/x"}, "no such share": {Name: "other", Target: "/opt/x"},
	} {
		if err := c.Give(ctx, id, s); !errors.Is(err, sandbox.ErrShare) && !errors.Is(err, sandbox.ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := c.Delete(ctx, id)
	check(t, err)
	r.nothingLeftOf()
}

// A session is one shell for many commands, and outlives the worker.
func TestASessionThroughTheAPI(t *testing.T) {
	r := newWorkerRig(t, "cold")
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	c := r.client()
	id := r.sandboxOf(ctx, c)
	say := func(text string, e sandbox.ExecSpec) sandboxes.ExecAnswer {
		t.Helper()
		e.ID, e.Session, e.Shell = strings.ToLower(rand.Text()), "main", text
		a, err := c.Exec(ctx, id, sandboxes.ExecRequest{ExecSpec: e})
		if err != nil || a.ExitCode == nil {
			t.Fatalf("%q: %+v, %v", text, a, err)
		}
		return a
	}
	if a := say("cd /tmp; export A=1; { sleep 1000 & } 2>/dev/null", sandbox.ExecSpec{}); *a.ExitCode != 0 {
		t.Errorf("%+v", a)
	}
	if a := say("echo '", sandbox.ExecSpec{}); a.Reason != sandbox.ExecReasonSyntax || !strings.Contains(a.Message, "unexpected EOF") {
		t.Errorf("%+v", a)
	}
	if a := say("cat <<X\nno end", sandbox.ExecSpec{}); a.Reason != sandbox.ExecReasonSyntax {
		t.Errorf("%+v", a)
	}
	a := say("echo a; sleep 1000; echo b", sandbox.ExecSpec{Timeout: 300})
	if len(a.Out) == 0 { // too little for an echo here
		a = say("echo a; sleep 1000; echo b", sandbox.ExecSpec{Timeout: 10_000})
	}
	if a.Reason != sandbox.ExecReasonTimeout || string(a.Out) != "a\n" {
		t.Errorf("%+v", a)
	}
	r.killWorker()
	r.startWorker()
	c = r.client()
	if a := say("pwd; echo $A; jobs -p | wc -l; (exit 3)", sandbox.ExecSpec{}); *a.ExitCode != 3 || string(a.Out) != "/tmp\n1\n1\n" {
		t.Errorf("%+v: %s", a, a.Out)
	}
	_, err := c.Delete(ctx, id)
	check(t, err)
	r.nothingLeftOf()
}
