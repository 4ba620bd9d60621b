package e2e_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"quarry/worker/sandbox"
)

// realCommands are what tasks run, with outputs that say the same every time and on
// every kernel.
var realCommands = []string{
	"python3 -c 'import sys; print(sys.version); print(sorted(sys.modules)[:5])'",
	"python3 -c 'import numpy as n; a = n.arange(12.).reshape(3, 4); print(a @ a.T, n.linalg.norm(a))'",
	"python3 -c 'import json, hashlib, zlib; b = bytes(range(256)) * 999; print(hashlib.sha256(b).hexdigest(), zlib.crc32(b), len(zlib.compress(b)))'",
	"python3 -c 'import os; print(os.getcwd(), os.getuid(), oct(os.umask(0)), os.path.realpath(\"/proc/self/exe\"))'",
	"python3 -c 'import subprocess; print(subprocess.run([\"false\"]).returncode, subprocess.run(\"exit 3\", shell=True).returncode)'",
	"python3 -c 'import multiprocessing as m; print(m.get_context(\"fork\").Pool(3).map(abs, [-1, -2, -3]))'",
	"python3 -c 'import sqlite3; c = sqlite3.connect(\"/tmp/x.db\"); c.execute(\"create table t(a)\"); c.execute(\"insert into t values (42)\"); c.commit(); print(c.execute(\"select * from t\").fetchall())'",
	"python3 -c 'import sys; sys.exit(\"bad\")'",
	"python3 -c 'raise SystemExit(42)'",
	"python3 -c 'import signal, os; os.kill(os.getpid(), signal.SIGKILL)'",
	"python3 -c 'import tempfile, shutil, os; d = tempfile.mkdtemp(); os.symlink(\"a\", d + \"/b\"); os.mkfifo(d + \"/c\"); print(sorted(os.listdir(d))); shutil.rmtree(d); print(os.path.exists(d))'",
	"python3 -m pytest --version",
	"cd /tmp && git init -q r && cd r && git config user.email a@b && git config user.name n && echo x > f && git add f && GIT_AUTHOR_DATE=@1 GIT_COMMITTER_DATE=@1 git commit -qm m && git log --format=%H && git status --short",
	"cd /tmp && printf 'c\\nb\\na\\n' | sort | tr a-z A-Z | paste -sd, -",
	"seq 1 100000 | awk '{ s += $1 } END { print s }'",
	"seq 1 20000 | xargs -n 100 echo | md5sum",
	"find /usr/lib/python3 -name '*.py' | sort | head -200 | xargs cat | sha256sum",
	"find /etc -xdev -printf '%y %m %U %G %s %p\\n' | grep -v 'resolv.conf\\|hostname\\|hosts\\|/etc$' | sort | sha256sum",
	"tar -C / -cf - --sort=name etc/ssl usr/share/python3 2>/dev/null | tar -tf - | md5sum",
	"head -c 10000000 /dev/zero | gzip -n | sha256sum",
	"echo $0 $- ; set -- a b; echo $# \"$@\"; (exit 9); echo $?",
	"ls -la --time-style=+%s.%N /usr/bin/python3* /bin /usr/lib/os-release",
	"bash -c 'a=(1 2 3); echo ${a[@]} ${#a[@]}; shopt -s extglob; echo ${a[0]/1/x}; trap \"echo bye\" EXIT'",
	"sed -n '/ID/p' /etc/os-release; stat -c '%a %s %Y %n' /etc/passwd /usr/bin/env",
	"perl -e 'print join(\",\", map { $_ * 2 } 1 .. 5), \"\\n\"; print \"ok\\n\" if \"abc\" =~ /b./'",
	"ulimit -c 0; sh -c 'kill -SEGV $$'; echo $?",
	"no-such-command; echo $?",
}

func TestCommandsSayTheSameAsInAChroot(t *testing.T) {
	r := newWorkerRig(t, "cold")
	root := r.path("root")
	for _, dir := range []string{"image", "upper", "work", "root"} {
		check(t, os.MkdirAll(r.path(dir), 0o755))
	}
	r.quarry("mount", "--data", r.path("d"), "--worker-dir", r.path("w2"), "t/task", r.path("image"))
	t.Cleanup(func() { r.quarry("umount", "--worker-dir", r.path("w2"), r.path("image")) })
	inHost(t, "mount", "-t", "overlay", "overlay", "-o", "lowerdir="+r.path("image")+",upperdir="+r.path("upper")+",workdir="+r.path("work"), root)
	t.Cleanup(func() { inHost(t, "umount", root) })
	for _, fs := range []string{"proc", "tmpfs"} {
		at := root + map[string]string{"proc": "/proc", "tmpfs": "/tmp"}[fs]
		inHost(t, "mount", "-t", fs, fs, at)
		t.Cleanup(func() { inHost(t, "umount", at) })
	}
	inHost(t, "mount", "--bind", "/dev", root+"/dev")
	t.Cleanup(func() { inHost(t, "umount", root+"/dev") })
	c := r.client()
	sb, err := c.Create(t.Context(), sandbox.Spec{Image: "t/task", MemoryMB: 1024}, "")
	check(t, err)
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8", "PYTHONDONTWRITEBYTECODE=1", "PYTHONHASHSEED=0"}
	for _, command := range realCommands {
		var want bytes.Buffer
		cmd := exec.Command("chroot", root, "/usr/bin/env", "-i", "-C", "/")
		cmd.Args = append(append(cmd.Args, env...), "/bin/sh", "-c", "{ "+command+"\n} 2>&1")
		cmd.Stdout, cmd.Stderr = &want, &want
		if err := cmd.Run(); err != nil && !errors.As(err, new(*exec.ExitError)) {
			t.Fatal(err)
		}
		wantCode := cmd.ProcessState.ExitCode()
		code, got, err := run(t.Context(), c, sb.ID, sandbox.ExecSpec{Shell: "{ " + command + "\n} 2>&1", Env: env, WorkDir: "/"})
		if err != nil || code != wantCode || got != want.String() {
			t.Errorf("%s\nin the sandbox: %d %v\n%s\nin the chroot: %d\n%s", command, code, err, got, wantCode, want.String())
		}
	}
}

func inHost(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", strings.Join(args, " "), err, out)
	}
}
