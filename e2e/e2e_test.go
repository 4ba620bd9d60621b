// Package e2e_test runs stories over the built programs, as a person or a
// trainer uses them. One script is one story.
package e2e_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"quarry/internal/need"
	"quarry/internal/proc"
	"quarry/internal/storm"
	"quarry/store/chunk"
)

func TestMain(m *testing.M) {
	storm.Main()
	os.Exit(runTests(m))
}

func runTests(m *testing.M) int {
	bin := os.Getenv("QUARRY_BIN")
	if bin == "" {
		dir, err := os.MkdirTemp("", "quarry-bin")
		if err != nil {
			panic(err)
		}
		defer os.RemoveAll(dir)
		for _, prog := range []string{"quarry", "quarry-shim", "quarry-guest"} {
			cmd := exec.Command("go", "build", "-o", filepath.Join(dir, prog), "quarry/cmd/"+prog)
			if out, err := cmd.CombinedOutput(); err != nil {
				panic(fmt.Sprintf("build %s: %v: %s", prog, err, out))
			}
		}
		os.Setenv("QUARRY_BIN", dir)
		bin = dir
	}
	os.Setenv("PATH", bin+string(os.PathListSeparator)+os.Getenv("PATH"))
	return m.Run()
}

func TestStories(t *testing.T) {
	need.Root(t)
	for _, tool := range []string{"runsc", "umoci", "skopeo", "busybox", "tar", "pgrep", "nbdinfo", "nbdcopy", "nbdsh", "fio", "qemu-img", "script", "versitygw", "crane", "regctl"} {
		need.Tool(t, tool)
	}
	images := os.Getenv("QUARRY_IMAGES")
	if _, err := os.Stat(filepath.Join(images, "debian", "index.json")); images == "" || err != nil {
		need.Missing(t, "the Debian image (make images makes it)")
	}
	odd := erofsImages(t)
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		RequireUniqueNames:  true,
		Setup: func(e *testscript.Env) error {
			for name, value := range odd {
				e.Setenv(name, value)
			}
			return setup(e)
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"tinyimage": tinyImage,
			"flip":      flip,
			"killpid":   killPID,
			"waitfor":   waitFor,
			"jsonnum":   jsonNum,
			"nothing":   nothingLeft,

			"status":       status,
			"until":        untilSo,
			"stalled":      stalled,
			"metrics":      metrics,
			"registry":     startRegistry,
			"serve":        serve,
			"slowserve":    slowServe,
			"s3server":     s3Server,
			"servenosign":  serveNoSign,
			"servetokens":  serveTokens,
			"stall":        stall,
			"stopowner":    stopOwner,
			"killkeeper":   killKeeper,
			"killreader":   killReader,
			"logged":       logged,
			"waitexit":     waitExit,
			"breaklayer":   breakLayer,
			"comparetrees": compareTrees,
			"inodeplaces":  inodePlaces,
			"fsckerofs":    fsckErofs,
			"node":         startNode,
			"serving":      serving,
		},
	})
}

// setup gives each story short paths for data and worker folders, because a
// socket's path is limited, and ends what the story has left.
func setup(e *testscript.Env) error {
	base, err := os.MkdirTemp("", "q")
	if err != nil {
		return err
	}
	e.Defer(func() { cleanUp(base) })
	e.Setenv("B", base)
	e.Setenv("QUARRY_DATA", filepath.Join(base, "d"))
	e.Setenv("QUARRY_WORKER", filepath.Join(base, "w"))
	e.Setenv("QUARRY_IMAGES", os.Getenv("QUARRY_IMAGES"))
	e.Setenv("HOME", base)
	e.Setenv("FULLPATH", e.Getenv("PATH"))
	// A PATH with everything but runsc.
	e.Setenv("NORUNSC", filepath.Join(base, "bin"))
	if err := os.MkdirAll(e.Getenv("NORUNSC"), 0o755); err != nil {
		return err
	}
	for _, name := range []string{"quarry", "quarry-shim", "quarry-guest"} {
		if err := os.Symlink(filepath.Join(os.Getenv("QUARRY_BIN"), name), filepath.Join(e.Getenv("NORUNSC"), name)); err != nil {
			return err
		}
	}
	e.Values[storyKey{}] = &story{env: e}
	return nil
}

// cleanUp ends the shims, readers and servers below base and removes it.
func cleanUp(base string) {
	shims, _ := filepath.Glob(filepath.Join(base, "*", "mounts", "*", "shim.json"))
	for _, path := range shims {
		var s struct{ PID int }
		if raw, err := os.ReadFile(path); err == nil && json.Unmarshal(raw, &s) == nil {
			syscall.Kill(s.PID, syscall.SIGTERM)
		}
	}
	locks, _ := filepath.Glob(filepath.Join(base, "*", "lock"))
	for _, path := range locks {
		if pid := holderOf(path); pid > 0 {
			syscall.Kill(pid, syscall.SIGTERM)
		}
	}
	// What a failed story left mounted would keep loop devices and folders.
	for _, point := range mountsBelow(base) {
		syscall.Unmount(point, syscall.MNT_DETACH)
	}
	var err error
	for range 100 {
		if err = os.RemoveAll(base); err == nil {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	fmt.Fprintln(os.Stderr, "left behind:", err)
}

// mountsBelow lists the mount points below base, the latest first.
func mountsBelow(base string) []string {
	raw, _ := os.ReadFile("/proc/self/mountinfo")
	var points []string
	for line := range strings.Lines(string(raw)) {
		const pointField = 4
		if f := strings.Fields(line); len(f) > pointField && strings.HasPrefix(f[pointField], base+"/") {
			points = append(points, f[pointField])
		}
	}
	slices.Reverse(points)
	return points
}

// holderOf reads who holds a data folder's lock; 0 when nobody does.
func holderOf(lock string) int {
	raw, err := os.ReadFile(lock)
	var h struct{ PID int }
	if err != nil || json.Unmarshal(raw, &h) != nil {
		return 0
	}
	if l, err := proc.TryLock(lock); err == nil {
		l.Unlock()
		return 0
	}
	return h.PID
}

// stopOwner ends the server of a data folder: stopowner DATA.
func stopOwner(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: stopowner DATA")
	}
	lock := filepath.Join(ts.MkAbs(args[0]), "lock")
	if pid := holderOf(lock); pid > 0 {
		ts.Check(syscall.Kill(pid, syscall.SIGTERM))
	}
	for deadline := time.Now().Add(60 * time.Second); holderOf(lock) > 0; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			ts.Fatalf("the server of %s does not end", args[0])
		}
	}
}

// tinyImage makes an OCI layout with busybox: tinyimage LAYOUT [umoci config
// flags…]. The files of ./rootfs, when there, are in it.
func tinyImage(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 {
		ts.Fatalf("usage: tinyimage LAYOUT [FLAG…]")
	}
	busybox, err := exec.LookPath("busybox")
	ts.Check(err)
	root := ts.MkAbs("rootfs")
	for _, dir := range []string{"bin", "etc", "tmp", "work"} {
		ts.Check(os.MkdirAll(filepath.Join(root, dir), 0o755))
	}
	raw, err := os.ReadFile(busybox)
	ts.Check(err)
	ts.Check(os.WriteFile(filepath.Join(root, "bin/busybox"), raw, 0o755))
	for _, name := range []string{"sh", "cat", "ls", "id", "env", "echo", "sleep", "pwd", "kill", "md5sum", "true", "false", "touch", "head", "tty", "seq", "wc"} {
		os.Symlink("busybox", filepath.Join(root, "bin", name))
	}
	layout := ts.MkAbs(args[0])
	// Three files of six chunks that compress badly, the same every time.
	for i, name := range []string{"big", "other", "third"} {
		p := make([]byte, 6*chunk.DefaultSize-1000)
		rand.NewChaCha8([32]byte{byte(i)}).Read(p)
		ts.Check(os.WriteFile(filepath.Join(root, name), p, 0o644))
	}
	tarball := layout + ".tar"
	steps := [][]string{
		{"tar", "-C", root, "--numeric-owner", "--owner=0", "--group=0", "--sort=name", "-cf", tarball, "."},
		{"umoci", "init", "--layout", layout},
		{"umoci", "new", "--image", layout + ":latest"},
		{"umoci", "raw", "add-layer", "--image", layout + ":latest", tarball},
		append([]string{"umoci", "config", "--image", layout + ":latest"}, args[1:]...),
	}
	for _, s := range steps {
		out, err := exec.Command(s[0], s[1:]...).CombinedOutput()
		if err != nil {
			ts.Fatalf("%s: %v: %s", strings.Join(s, " "), err, out)
		}
	}
}

// flip changes one byte of the one file that the pattern names: flip GLOB
// OFFSET. A negative offset counts from the end.
func flip(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: flip GLOB OFFSET")
	}
	files, err := filepath.Glob(ts.MkAbs(args[0]))
	ts.Check(err)
	if len(files) != 1 {
		ts.Fatalf("%s names %d files, want 1", args[0], len(files))
	}
	off, err := strconv.Atoi(args[1])
	ts.Check(err)
	raw, err := os.ReadFile(files[0])
	ts.Check(err)
	if off < 0 {
		off += len(raw)
	}
	raw[off] ^= 0x10
	// Content is immutable and may be cached by inode: change it in place.
	f, err := os.OpenFile(files[0], os.O_WRONLY, 0)
	ts.Check(err)
	defer f.Close()
	_, err = f.WriteAt(raw[off:off+1], int64(off))
	ts.Check(err)
}

// killPID kills a process that a JSON file, or one with a number, names: killpid
// SIGNAL GLOB. With signal 9 it waits for the end.
func killPID(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: killpid SIGNAL FILE")
	}
	sig, err := strconv.Atoi(args[0])
	ts.Check(err)
	files, err := filepath.Glob(ts.MkAbs(args[1]))
	ts.Check(err)
	if len(files) != 1 {
		ts.Fatalf("%s names %d files, want 1", args[1], len(files))
	}
	raw, err := os.ReadFile(files[0])
	ts.Check(err)
	var doc struct{ PID int }
	if json.Unmarshal(raw, &doc) != nil {
		doc.PID, err = strconv.Atoi(strings.TrimSpace(string(raw)))
		ts.Check(err)
	}
	ts.Check(syscall.Kill(doc.PID, syscall.Signal(sig)))
	if syscall.Signal(sig) == syscall.SIGKILL {
		waitEnd(ts, doc.PID)
	}
}

// waitFor waits until a file holds a text: waitfor FILE TEXT; with !, until the
// file is gone.
func waitFor(ts *testscript.TestScript, neg bool, args []string) {
	deadline := time.Now().Add(60 * time.Second)
	for time.Now().Before(deadline) {
		raw, err := os.ReadFile(ts.MkAbs(args[0]))
		if neg && os.IsNotExist(err) || !neg && err == nil && bytes.Contains(raw, []byte(args[1])) {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	ts.Fatalf("%s: not within a minute", strings.Join(args, " "))
}

// jsonNum compares a number in a JSON file: jsonnum FILE KEY OP NUMBER, with OP
// one of eq, gt, lt.
func jsonNum(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 4 {
		ts.Fatalf("usage: jsonnum FILE KEY OP NUMBER")
	}
	raw, err := os.ReadFile(ts.MkAbs(args[0]))
	ts.Check(err)
	var doc map[string]any
	ts.Check(json.Unmarshal(raw, &doc))
	got, ok := doc[args[1]].(float64)
	want, err := strconv.ParseFloat(args[3], 64)
	ts.Check(err)
	holds := map[string]bool{"eq": got == want, "gt": got > want, "lt": got < want}
	if !ok || !holds[args[2]] {
		ts.Fatalf("%s: %s is %v, want it %s %s: %s", args[0], args[1], doc[args[1]], args[2], args[3], raw)
	}
}

// nothingLeft fails when a mount, a loop device, a shim or a sandbox of the
// story is left: nothing DIR.
func nothingLeft(ts *testscript.TestScript, neg bool, args []string) {
	base := ts.MkAbs(args[0])
	if left := stays(func() []string { return leftovers(base) }); len(left) > 0 {
		ts.Fatalf("left below %s: %s", base, strings.Join(left, "; "))
	}
}

func leftovers(base string) []string {
	var left []string
	for _, point := range mountsBelow(base) {
		left = append(left, "mount: "+point)
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, path := range loops {
		if raw, err := os.ReadFile(path); err == nil && strings.HasPrefix(string(raw), base+"/") {
			left = append(left, "loop device: "+path)
		}
	}
	for _, pattern := range []string{"w*/mounts/*/shim.json", "w*/sandboxes/*"} {
		files, _ := filepath.Glob(filepath.Join(base, pattern))
		left = append(left, files...)
	}
	procs, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range procs {
		raw, err := os.ReadFile(path)
		if err == nil && bytes.Contains(raw, []byte("quarry-shim\x00")) && bytes.Contains(raw, []byte(base+"/")) {
			left = append(left, "process: "+strings.ReplaceAll(string(raw), "\x00", " "))
		}
	}
	return left
}
