package guest_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"quarry/worker/guest"
	"quarry/worker/sandbox"
	"quarry/worker/sentry"
	"quarry/worker/sentry/sentrytest"
)

// fileCaps are those of docker that are about files: CHOWN, DAC_OVERRIDE, FOWNER,
// FSETID, KILL, MKNOD.
const fileCaps = 1<<0 | 1<<1 | 1<<3 | 1<<4 | 1<<5 | 1<<6 | 1<<7 | 1<<27

// vm is a guest under runsc.
type vm struct {
	*sentry.Client
	program *os.File
}

func (v *vm) run(ctx context.Context, caps uint64, argv []string, files ...*os.File) (int, error) {
	fds := map[int]*os.File{}
	for i, f := range files {
		fds[i] = f
	}
	pid, err := v.Execute(ctx, sentry.Exec{
		Argv: argv, Program: v.program, Files: fds,
		Capabilities: sentry.Capabilities{Permitted: caps, Effective: caps, Bounding: caps},
	})
	if err != nil {
		return -1, err
	}
	st, err := v.WaitPID(ctx, pid)
	if ctx.Err() != nil {
		_ = v.Signal(context.WithoutCancel(ctx), sentry.ToProcess, pid, 9)
	}
	return st.Code, err
}

func (v *vm) Run(ctx context.Context, argv []string, stdin, stdout, stderr *os.File) (int, error) {
	return v.run(ctx, fileCaps, argv, stdin, stdout, stderr)
}

func (v *vm) RunAdmin(ctx context.Context, argv []string, stdin, stdout, stderr *os.File) (int, error) {
	return v.run(ctx, fileCaps|1<<21, argv, stdin, stdout, stderr)
}

func (v *vm) Mount(ctx context.Context, image *os.File, target string) error {
	return v.Client.Mount(ctx, target, image)
}

// sh runs a command of busybox in the guest, as root without CAP_SYS_ADMIN.
func (v *vm) sh(t testing.TB, script string) (string, int) {
	t.Helper()
	r, w, err := os.Pipe()
	must2(t, err)
	defer r.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	must2(t, err)
	defer null.Close()
	pid, err := v.Execute(context.Background(), sentry.Exec{
		Argv: []string{"/bin/sh", "-c", script}, Env: []string{"PATH=/bin"}, Files: map[int]*os.File{0: null, 1: w, 2: w},
		Capabilities: sentry.Capabilities{Permitted: fileCaps, Effective: fileCaps, Bounding: fileCaps},
	})
	w.Close()
	must2(t, err)
	b, err := io.ReadAll(r)
	must2(t, err)
	st, err := v.WaitPID(context.Background(), pid)
	must2(t, err)
	return string(b), st.Code
}

func must2(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func newVM(t testing.TB, l guest.Limits) (*guest.Files, *vm) {
	t.Helper()
	s := sentrytest.Start(t)
	program, err := os.Open(helper)
	must2(t, err)
	t.Cleanup(func() { program.Close() })
	v := &vm{sentry.New(s.Socket, s.ID), program}
	t.Cleanup(v.Close)
	f := guest.New(guest.Config{Runner: v, Mounter: v, WorkDir: "/tmp", Spool: t.TempDir(), Limits: l})
	t.Cleanup(f.Close)
	return f, v
}

// The same things as natively, where they could differ: another kernel's system calls.
func TestUnderRunscFilesAreExact(t *testing.T) {
	f, v := newVM(t, guest.Limits{})
	for _, at := range []string{"/tmp/", "/root/"} { // a tmpfs, and the overlay of the root
		for _, n := range []int{0, 1, 64<<10 - 1, 64 << 10, 64<<10 + 1, 3 << 20} {
			b := content(n)
			name := at + fmt.Sprint("f\n\xff ", n)
			if _, err := f.Write(context.Background(), name, sandbox.WriteOptions{Size: int64(n)}, guest.Owner{UID: 5, GID: 6}, bytes.NewReader(b)); err != nil {
				t.Fatal(err)
			}
			got, i, err := read(f, name, all)
			if err != nil || !bytes.Equal(got, b) || i.UID != 5 || i.GID != 6 || i.Mode != 0o644 {
				t.Errorf("%q: %d bytes, %+v, %v", name, len(got), i, err)
			}
		}
	}
	v.sh(t, "mknod /tmp/null c 1 3; mknod /tmp/zero c 1 5; ln -s /dev /tmp/dev; mkfifo /tmp/fifo; ln -s loop /tmp/loop; ln -s /proc/self/fd/0 /tmp/in; mkdir /tmp/closed; echo x > /tmp/closed/f; chmod 0 /tmp/closed/f /tmp/closed; truncate -s 1099511627776 /tmp/sparse")
	for name, want := range map[string]error{
		"fifo": sandbox.ErrFileType, "loop": sandbox.ErrFilePath, "/dev/zero": sandbox.ErrFileType, "in": sandbox.ErrFileType,
		"/proc/self/fd/0": sandbox.ErrFileType, "sparse": sandbox.ErrTooLarge, "/tmp": sandbox.ErrFileType, "none": sandbox.ErrFileNotFound,
		"/dev/full": sandbox.ErrFileType, strings.Repeat("x", 256): sandbox.ErrFilePath,
	} {
		limited := guest.New(guest.Config{Runner: v, WorkDir: "/tmp", Limits: guest.Limits{Bytes: 1 << 30}})
		if _, _, err := read(limited, name, all); !errors.Is(err, want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if b, _, err := read(f, "closed/f", all); err != nil || string(b) != "x\n" {
		t.Errorf("%q, %v", b, err)
	}
	if b, i, err := read(f, "/proc/meminfo", all); err != nil || len(b) == 0 || i.Size != int64(len(b)) {
		t.Errorf("%q, %v", b, err)
	}
	if err := f.Remove(context.Background(), "/tmp/closed"); err != nil {
		t.Error(err)
	}
	if _, err := f.Stat(context.Background(), "closed"); !errors.Is(err, sandbox.ErrFileNotFound) {
		t.Error(err)
	}
}

func TestUnderRunscATarComesUpTheSame(t *testing.T) {
	f, v := newVM(t, guest.Limits{})
	f2, _, w := newCell(t, guest.Limits{})
	plant(t, w)
	b, err := down(f2, sandbox.TarOptions{Path: "/w"})
	must2(t, err)
	for _, at := range []string{"/tmp/up", "/var/up"} {
		if err := f.TarUp(context.Background(), at, guest.Owner{}, bytes.NewReader(b)); err != nil {
			t.Fatal(at, err)
		}
		b2, err := down(f, sandbox.TarOptions{Path: at})
		if err != nil || !bytes.Equal(b, b2) {
			t.Errorf("%s: another tar: %v\n%q\n%q", at, err, names(t, b2), names(t, b))
		}
	}
	list, err := f.List(context.Background(), "/tmp/up", 2)
	if err != nil || len(list) != len(names(t, b)) {
		t.Errorf("%d files, %v", len(list), err)
	}
	if out, code := v.sh(t, "cmp /tmp/up/big /var/up/big && stat -c %h /tmp/up/first"); code != 0 || out != "2\n" {
		t.Errorf("%q, %d", out, code)
	}
}

// Folders in one another cost no more than others: a tar of 500 took more than 30 s, and was file_stuck.
func TestUnderRunscNestedFoldersGoInAndOutAndAreRemoved(t *testing.T) {
	f, v := newVM(t, guest.Limits{})
	roundTrip(t, f, "/tmp/deep", 500)
	if _, code := v.sh(t, "p=$(printf 'd/%.0s' $(seq 600)); cd /tmp && mkdir -p $p && cd $p && mkdir -p $p"); code != 0 {
		t.Fatal(code)
	}
	if err := f.Remove(context.Background(), "/tmp/d"); err != nil {
		t.Error(err)
	}
}

func TestUnderRunscAPausedGuestIsRead(t *testing.T) {
	f, v := newVM(t, guest.Limits{Paused: 200 * time.Millisecond, PausedBytes: 8 << 20, Stuck: 3})
	big := content(5 << 20)
	for name, b := range map[string][]byte{"small": []byte("hello\n"), "empty": nil, "big": big} {
		if _, err := f.Write(context.Background(), name, sandbox.WriteOptions{Size: -1}, guest.Owner{}, bytes.NewReader(b)); err != nil {
			t.Fatal(err)
		}
	}
	v.sh(t, "mknod /tmp/null c 1 3; mknod /tmp/zero c 1 5; ln -s /dev /tmp/dev; mkfifo /tmp/fifo; ln -s loop /tmp/loop; ln -s small /tmp/link; truncate -s 1099511627776 /tmp/sparse; mkdir /tmp/d")
	must2(t, v.Pause(context.Background()))
	for name, want := range map[string][]byte{"small": []byte("hello\n"), "big": big} {
		if b, i, err := readPaused(f, name, all); err != nil || !bytes.Equal(b, want) || i.Size != int64(len(want)) {
			t.Errorf("%s: %d bytes, %+v, %v", name, len(b), i, err)
		}
	}
	if b, _, err := readPaused(f, "big", sandbox.ReadOptions{Offset: 4 << 20, Length: 70000}); err != nil || !bytes.Equal(b, big[4<<20:][:70000]) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
	for name, want := range map[string]error{
		"fifo": sandbox.ErrFileStuck, "loop": sandbox.ErrFilePath, "link": sandbox.ErrFilePath, "sparse": guest.ErrUnclear, "empty": guest.ErrEmpty,
		"null": guest.ErrEmpty, "zero": guest.ErrUnclear, "dev/null": guest.ErrEmpty, "dev/zero": guest.ErrUnclear, "d": sandbox.ErrFileType,
		"none": sandbox.ErrFileNotFound, "small/x": sandbox.ErrFileType, "/dev/zero": sandbox.ErrFileType, "/proc/self/mem": sandbox.ErrFileType,
		"/proc/1/mem": sandbox.ErrFileStuck, strings.Repeat("x", 256): sandbox.ErrFilePath,
	} {
		if _, _, err := readPaused(f, name, all); !errors.Is(err, want) {
			t.Errorf("%s: %v", name, err)
		}
	}
	must2(t, v.Resume(context.Background()))
	// As often as one likes: with the next call of a guest that runs, the readers that
	// the fifo holds are let go.
	for range 3 {
		if _, err := f.Stat(context.Background(), "small"); err != nil {
			t.Error(err)
		}
		must2(t, v.Pause(context.Background()))
		for range 3 {
			if _, _, err := readPaused(f, "fifo", all); !errors.Is(err, sandbox.ErrFileStuck) {
				t.Error(err)
			}
		}
		if _, _, err := readPaused(f, "small", all); !errors.Is(err, sandbox.ErrFileStuck) {
			t.Errorf("a fourth: %v", err)
		}
		must2(t, v.Resume(context.Background()))
	}
	if _, err := f.Stat(context.Background(), "small"); err != nil {
		t.Error(err)
	}
	must2(t, v.Pause(context.Background()))
	b, _, err := readPaused(f, "small", all)
	for errors.Is(err, sandbox.ErrFileStuck) { // those that were let go are on their way
		time.Sleep(time.Millisecond)
		b, _, err = readPaused(f, "small", all)
	}
	if err != nil || string(b) != "hello\n" {
		t.Errorf("%q, %v", b, err)
	}
	must2(t, v.Resume(context.Background()))
}

func TestUnderRunscAFullDiskIsSaid(t *testing.T) {
	f, v := newVM(t, guest.Limits{})
	// The helper mounts nothing of its own here: CAP_SYS_ADMIN is only for the test.
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	must2(t, err)
	defer null.Close()
	pid, err := v.Execute(context.Background(), sentry.Exec{
		Argv: []string{"/bin/sh", "-c", "mkdir /tmp/small && mount -t tmpfs -o size=1m tmpfs /tmp/small && echo before > /tmp/small/f"}, Env: []string{"PATH=/bin"},
		Files:        map[int]*os.File{0: null, 1: null, 2: null},
		Capabilities: sentry.Capabilities{Permitted: fileCaps | 1<<21, Effective: fileCaps | 1<<21, Bounding: fileCaps | 1<<21},
	})
	must2(t, err)
	if st, err := v.WaitPID(context.Background(), pid); err != nil || st.Code != 0 {
		t.Fatal(st, err)
	}
	if _, err := f.Write(context.Background(), "small/f", sandbox.WriteOptions{Size: -1}, guest.Owner{}, bytes.NewReader(content(8<<20))); !errors.Is(err, sandbox.ErrDiskFull) {
		t.Error(err)
	}
	if out, _ := v.sh(t, "cat /tmp/small/f; ls -A /tmp/small"); out != "before\nf\n" {
		t.Errorf("%q", out)
	}
}

func TestUnderRunscAShareIsReadOnlyForEverybody(t *testing.T) {
	f, v := newVM(t, guest.Limits{})
	dir := t.TempDir()
	must(t, os.MkdirAll(filepath.Join(dir, "tests/deep"), 0o755), os.WriteFile(filepath.Join(dir, "tests/deep/test.sh"), []byte("echo passed\n"), 0o755), os.WriteFile(filepath.Join(dir, "tests/big"), content(3<<20+7), 0o644),
		os.Symlink("deep/test.sh", filepath.Join(dir, "tests/link")))
	for i := range 300 {
		must(t, os.WriteFile(filepath.Join(dir, "tests", fmt.Sprint("case-", i)), nil, 0o644))
	}
	must2(t, f.Give(context.Background(), filepath.Join(dir, "tests"), "/opt/tests"))
	must2(t, f.Give(context.Background(), filepath.Join(dir, "tests/deep/test.sh"), "/tmp/one.sh"))
	if got, _, err := read(f, "/opt/tests/big", all); err != nil || !bytes.Equal(got, content(3<<20+7)) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	b, err := down(f, sandbox.TarOptions{Path: "/opt/tests"})
	must2(t, err)
	if n := names(t, b); len(n) != 304 || !slices.Contains(n, "2 link") {
		t.Errorf("%d names", len(n))
	}
	if out, code := v.sh(t, "sh /opt/tests/link && /opt/tests/deep/test.sh && sh /tmp/one.sh"); code != 0 || out != strings.Repeat("passed\n", 3) {
		t.Errorf("%q, %d", out, code)
	}
	for _, try := range []string{
		"echo x > /opt/tests/new", "echo x >> /opt/tests/deep/test.sh", "rm -f /opt/tests/big", "chmod 777 /opt/tests", "mount -o remount,rw /opt/tests",
		"umount /opt/tests", "mv /opt/tests /opt/other", "touch /opt/tests/big", "echo x > /tmp/one.sh", "rm -f /tmp/one.sh", "mount -t tmpfs x /opt/tests",
		"unshare -Urm sh -c 'mount -o remount,rw /opt/tests && echo x > /opt/tests/new'",
	} {
		if out, code := v.sh(t, try); code == 0 {
			t.Errorf("%s: %q", try, out)
		}
	}
	if _, err := f.Write(context.Background(), "/opt/tests/new", sandbox.WriteOptions{Size: -1}, guest.Owner{}, strings.NewReader("x")); !errors.Is(err, sandbox.ErrFilePath) {
		t.Error(err)
	}
	if err := f.Take(context.Background(), "/tmp"); !errors.Is(err, sandbox.ErrFileType) {
		t.Errorf("what is no share is taken: %v", err)
	}
	must2(t, f.Take(context.Background(), "/opt/tests"))
	must2(t, f.Take(context.Background(), "/tmp/one.sh"))
	if out, code := v.sh(t, "ls -A /opt/tests; cat /tmp/one.sh"); code != 0 || out != "" {
		t.Errorf("%q, %d", out, code)
	}
	must2(t, f.Give(context.Background(), filepath.Join(dir, "tests/deep"), "/opt/a b\r\u00a0\\\n/c/"))
	if err := f.Give(context.Background(), filepath.Join(dir, "tests/deep"), "/opt/./a b\r\u00a0\\\n/c"); !errors.Is(err, sandbox.ErrFileExists) {
		t.Errorf("two at one place: %v", err)
	}
	must2(t, f.Take(context.Background(), "/opt/a b\r\u00a0\\\n/c"))
	if err := f.Take(context.Background(), "/opt/a b\r\u00a0\\\n/c"); !errors.Is(err, sandbox.ErrFileNotFound) {
		t.Errorf("taken twice: %v", err)
	}
	for _, target := range []string{"/", "/proc/x", "/dev", "rel", "/a\x00"} {
		if err := f.Give(context.Background(), dir, target); !errors.Is(err, sandbox.ErrFilePath) {
			t.Errorf("%q: %v", target, err)
		}
	}
	if err := f.Give(context.Background(), filepath.Join(dir, "none"), "/opt/x"); !errors.Is(err, sandbox.ErrShare) {
		t.Error(err)
	}
}

func BenchmarkUnderRunsc(b *testing.B) {
	f, v := newVM(b, guest.Limits{})
	ctx := context.Background()
	b.Run("stat", func(b *testing.B) {
		for b.Loop() {
			if _, err := f.Stat(ctx, "/tmp"); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("write-1MiB", func(b *testing.B) {
		c := content(1 << 20)
		b.SetBytes(1 << 20)
		for b.Loop() {
			if _, err := f.Write(ctx, "/tmp/x", sandbox.WriteOptions{Size: -1}, guest.Owner{}, bytes.NewReader(c)); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("read-1MiB", func(b *testing.B) {
		b.SetBytes(1 << 20)
		for b.Loop() {
			if _, _, err := read(f, "/tmp/x", all); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("read-paused-1MiB", func(b *testing.B) {
		b.SetBytes(1 << 20)
		for b.Loop() {
			if _, _, err := readPaused(f, "/tmp/x", all); err != nil {
				b.Fatal(err)
			}
		}
	})
	_ = v
}

// A guest makes links and moves folders, and no share lands anywhere but at its target.
func TestUnderRunscAShareFollowsNoLinkOfTheGuest(t *testing.T) {
	_, v := newVM(t, guest.Limits{})
	m := &mover{vm: v}
	f := guest.New(guest.Config{Runner: v, Mounter: m, WorkDir: "/tmp", Spool: t.TempDir()})
	t.Cleanup(f.Close)
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "secret"), []byte("private"), 0o644))
	v.sh(t, "mkdir -p /evil/dir /opt/real; ln -s /evil /opt/link; ln -s /evil/dir /opt/real/last; ln -s nothing /opt/real/dangling; ln -s .. /opt/real/up")
	for _, target := range []string{"/opt/link/dir", "/opt/link/new", "/opt/link/new/deep", "/opt/real/last", "/opt/real/dangling", "/opt/real/up/x", "/opt/link"} {
		if err := f.Give(context.Background(), dir, target); !errors.Is(err, sandbox.ErrFilePath) || !strings.Contains(err.Error(), "symlink") {
			t.Errorf("%s: %v", target, err)
		}
	}
	if out, _ := v.sh(t, "find /evil /opt -type f; ls -A /evil"); out != "dir\n" {
		t.Errorf("a share landed elsewhere: %q", out)
	}
	// One that moves folders while the share is mounted is found out.
	m.before = func() { v.sh(t, "mv /opt/real /opt/away; ln -s /evil /opt/real; mkdir /evil/tests") }
	if err := f.Give(context.Background(), dir, "/opt/real/tests"); !errors.Is(err, sandbox.ErrFilePath) || !strings.Contains(err.Error(), "moved") {
		t.Errorf("a share that was led away: %v", err)
	}
	m.before = nil
	// And Take takes what is at the target, not what a link leads to.
	if err := f.Take(context.Background(), "/opt/real/tests"); !errors.Is(err, sandbox.ErrFileNotFound) || !strings.Contains(err.Error(), `["/evil/tests"]`) {
		t.Errorf("a share is taken through a link: %v", err)
	}
	must2(t, f.Take(context.Background(), "/evil/tests"))
	// Before anything has run, links are the image's own.
	must2(t, f.GiveFirst(context.Background(), dir, "/opt/link/dir"))
	if out, _ := v.sh(t, "cat /evil/dir/secret"); out != "private" {
		t.Errorf("%q", out)
	}
}

// mover does something in the guest before a mount.
type mover struct {
	*vm
	before func()
}

func (m *mover) Mount(ctx context.Context, image *os.File, target string) error {
	if m.before != nil {
		m.before()
	}
	return m.vm.Mount(ctx, image, target)
}
