package e2e_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"quarry/store/bucket/s3/s3test"
	"quarry/store/chunk"
)

// story is what one running script has started.
type story struct {
	env    *testscript.Env
	server *exec.Cmd
	proxy  *stallProxy
	s3     *s3test.Server // nil: the story has none
}

type storyKey struct{}

func storyOf(ts *testscript.TestScript) *story { return ts.Value(storyKey{}).(*story) }

// status runs a command and compares its exit code: status CODE PROGRAM ARG….
func status(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: status CODE PROGRAM ARG…")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	err = ts.Exec(args[1], args[2:]...)
	got := 0
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		got = exit.ExitCode()
	} else if err != nil {
		ts.Fatalf("%v", err)
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

// serve runs quarry serve on a data folder and sets URL: serve DATA [FLAG…]. serve
// stop ends it and wants exit code 0.
func serve(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 {
		ts.Fatalf("usage: serve DATA [FLAG…]|stop")
	}
	if s := storyOf(ts); args[0] == "stop" {
		ts.Check(s.server.Process.Signal(syscall.SIGTERM))
		ts.Check(s.server.Wait())
		s.server = nil
		return
	}
	startServer(ts, args[0], append([]string{"--no-auth"}, args[1:]...)...)
}

// serveNoSign is serve without a signing key: servenosign DATA.
func serveNoSign(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: servenosign DATA")
	}
	startServer(ts, args[0], "--no-auth", "--no-sign")
}

// serveTokens is serve for those who have a token: servetokens DATA [FLAG…].
func serveTokens(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 1 {
		ts.Fatalf("usage: servetokens DATA [FLAG…]")
	}
	startServer(ts, args[0], args[1:]...)
}

func startServer(ts *testscript.TestScript, data string, flags ...string) {
	s := storyOf(ts)
	args := append([]string{"serve", "--data", ts.MkAbs(data), "--listen", "127.0.0.1:0"}, flags...)
	cmd := exec.Command(filepath.Join(os.Getenv("QUARRY_BIN"), "quarry"), args...)
	if s.s3 != nil {
		cmd.Env = append(os.Environ(), s3test.Env()...)
	}
	var log bytes.Buffer
	cmd.Stderr = &log
	out, err := cmd.StdoutPipe()
	ts.Check(err)
	ts.Check(cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "listening on ")
	if err != nil || !ok {
		cmd.Process.Kill()
		cmd.Wait()
		ts.Fatalf("quarry serve: %q, %v: %s", line, err, log.String())
	}
	s.server = cmd
	ts.Defer(func() {
		if s.server == cmd {
			cmd.Process.Kill()
			cmd.Wait()
		}
	})
	ts.Setenv("URL", url)
}

// slowServe is serve, with a proxy before it that can be told to stall, whose
// address becomes SLOWURL.
func slowServe(ts *testscript.TestScript, neg bool, args []string) {
	serve(ts, neg, args)
	s := storyOf(ts)
	p, err := newStallProxy(strings.TrimPrefix(ts.Getenv("URL"), "http://"))
	ts.Check(err)
	s.proxy = p
	ts.Defer(p.close)
	ts.Setenv("SLOWURL", "http://"+p.l.Addr().String())
}

// stall makes the proxy hold back all answers from now on, or let them go:
// stall on|off.
func stall(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: stall on|off")
	}
	storyOf(ts).proxy.set(args[0] == "on")
}

// stallProxy forwards connections and can hold back what the server says.
type stallProxy struct {
	l      net.Listener
	target string
	wg     sync.WaitGroup

	mu     sync.Mutex // guards the fields below
	open   chan struct{}
	conns  map[net.Conn]bool
	closed bool
}

func newStallProxy(target string) (*stallProxy, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	p := &stallProxy{l: l, target: target, open: make(chan struct{}), conns: map[net.Conn]bool{}}
	close(p.open)
	p.wg.Go(p.accept)
	return p, nil
}

func (p *stallProxy) set(stalled bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if stalled {
		p.open = make(chan struct{})
	} else {
		close(p.open)
	}
}

func (p *stallProxy) gate() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open
}

func (p *stallProxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conns[c] = true
	return !p.closed
}

func (p *stallProxy) accept() {
	for {
		down, err := p.l.Accept()
		if err != nil {
			return
		}
		up, err := net.Dial("tcp", p.target)
		if err != nil || !p.keep(down) || !p.keep(up) {
			down.Close()
			continue
		}
		p.wg.Go(func() { io.Copy(up, down); up.Close() })
		p.wg.Go(func() { p.answer(down, up) })
	}
}

// answer copies from the server to the client while the gate is open.
func (p *stallProxy) answer(down, up net.Conn) {
	defer down.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := up.Read(buf)
		<-p.gate()
		if _, werr := down.Write(buf[:n]); werr != nil || err != nil {
			return
		}
	}
}

func (p *stallProxy) close() {
	p.l.Close()
	p.mu.Lock()
	p.closed = true
	for c := range p.conns {
		c.Close()
	}
	select {
	case <-p.open:
	default:
		close(p.open)
	}
	p.mu.Unlock()
	p.wg.Wait()
}

// logged waits until a file has a line that a regular expression matches: what a
// process does may be seen before it has said it. logged PATTERN FILE.
func logged(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: logged PATTERN FILE")
	}
	want, err := regexp.Compile(args[0])
	ts.Check(err)
	path := ts.MkAbs(args[1])
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		raw, err := os.ReadFile(path)
		if err == nil && want.Match(raw) {
			return
		}
		if time.Now().After(end) {
			ts.Fatalf("no %q in %s (%v):\n%s", want, path, err, raw)
		}
	}
}

// killReader kills the reader of a worker folder with -9: killreader DIR.
func killReader(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: killreader DIR")
	}
	killCommand(ts, "reader", ts.MkAbs(args[0]))
}

// killKeeper kills the keeper of a worker folder with -9: killkeeper DIR.
func killKeeper(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 1 {
		ts.Fatalf("usage: killkeeper DIR")
	}
	killCommand(ts, "keeper", ts.MkAbs(args[0]))
}

func killCommand(ts *testscript.TestScript, command, dir string) {
	procs, err := filepath.Glob("/proc/[0-9]*/cmdline")
	ts.Check(err)
	want := command + "\x00--worker-dir\x00" + dir + "\x00"
	for _, path := range procs {
		raw, err := os.ReadFile(path)
		if err != nil || !strings.Contains(string(raw), want) {
			continue
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		ts.Check(err)
		ts.Check(syscall.Kill(pid, syscall.SIGKILL))
		waitEnd(ts, pid)
		return
	}
	ts.Fatalf("no %s of %s runs", command, dir)
}

// waitExit waits until the process whose number a file holds has ended.
func waitExit(ts *testscript.TestScript, neg bool, args []string) {
	raw, err := os.ReadFile(ts.MkAbs(args[0]))
	ts.Check(err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(raw)))
	ts.Check(err)
	waitEnd(ts, pid)
}

// waitEnd waits until a process and all its threads have ended: until then the
// process holds its locks, also when it was killed.
func waitEnd(ts *testscript.TestScript, pid int) {
	dir := fmt.Sprintf("/proc/%d", pid)
	for deadline := time.Now().Add(60 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		stat, err := os.ReadFile(filepath.Join(dir, "stat"))
		threads, _ := os.ReadDir(filepath.Join(dir, "task"))
		if err != nil || bytes.Contains(stat, []byte(") Z ")) && len(threads) <= 1 {
			return
		}
	}
	ts.Fatalf("process %d still runs after a minute: it hangs", pid)
}

// breakLayer damages the layer of a one-layer layout: breaklayer LAYOUT flip|
// truncate, or makes a copy of img with a manifest that lies: breaklayer LAYOUT
// lie|mediatype.
func breakLayer(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: breaklayer LAYOUT flip|truncate|lie|mediatype")
	}
	dir := ts.MkAbs(args[0])
	if args[1] == "lie" || args[1] == "mediatype" {
		ts.Check(os.CopyFS(dir, os.DirFS(ts.MkAbs("img"))))
	}
	l := layout{ts: ts, dir: dir}
	index := l.read("index.json")
	manifest := l.blob(index["manifests"].([]any)[0])
	layer := manifest["layers"].([]any)[0].(map[string]any)
	path := l.path(layer["digest"].(string))
	switch args[1] {
	case "flip":
		raw, err := os.ReadFile(path)
		ts.Check(err)
		raw[len(raw)/2] ^= 1
		ts.Check(os.WriteFile(path, raw, 0o644))
	case "truncate":
		ts.Check(os.Truncate(path, 1000))
	case "lie":
		// Another plain tar under the diffID that the store has seen.
		body := bytes.Repeat([]byte{0}, 10240)
		layer["digest"], layer["size"] = l.write(body), len(body)
		layer["mediaType"] = "application/vnd.oci.image.layer.v1.tar"
		l.publish(index, manifest)
	case "mediatype":
		layer["mediaType"] = "application/x-nonsense"
		l.publish(index, manifest)
	}
}

// layout edits an OCI layout.
type layout struct {
	ts  *testscript.TestScript
	dir string
}

func (l layout) path(digest string) string {
	return filepath.Join(l.dir, "blobs", strings.Replace(digest, ":", "/", 1))
}

func (l layout) read(name string) map[string]any {
	raw, err := os.ReadFile(filepath.Join(l.dir, name))
	l.ts.Check(err)
	var doc map[string]any
	l.ts.Check(json.Unmarshal(raw, &doc))
	return doc
}

func (l layout) blob(descriptor any) map[string]any {
	digest := descriptor.(map[string]any)["digest"].(string)
	return l.read("blobs/" + strings.Replace(digest, ":", "/", 1))
}

func (l layout) write(body []byte) string {
	digest := chunk.Sum(body).String()
	l.ts.Check(os.WriteFile(l.path(digest), body, 0o644))
	return digest
}

// publish makes a changed manifest the layout's only image.
func (l layout) publish(index, manifest map[string]any) {
	raw, err := json.Marshal(manifest)
	l.ts.Check(err)
	d := index["manifests"].([]any)[0].(map[string]any)
	d["digest"], d["size"] = l.write(raw), len(raw)
	raw, err = json.Marshal(index)
	l.ts.Check(err)
	l.ts.Check(os.WriteFile(filepath.Join(l.dir, "index.json"), raw, 0o644))
}

// compareTrees fails unless two folders hold the same files: comparetrees A B.
// The mtime of the root is left out: umoci makes it up.
func compareTrees(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: comparetrees A B")
	}
	a, err := listTree(ts.MkAbs(args[0]))
	ts.Check(err)
	b, err := listTree(ts.MkAbs(args[1]))
	ts.Check(err)
	if len(a) < 100 {
		ts.Fatalf("%s has only %d entries", args[0], len(a))
	}
	var diffs []string
	for path, line := range a {
		if b[path] != line {
			diffs = append(diffs, fmt.Sprintf("%s: %s | %s", path, line, b[path]))
		}
	}
	for path := range b {
		if _, ok := a[path]; !ok {
			diffs = append(diffs, path+": only in "+args[1])
		}
	}
	if len(diffs) > 0 {
		ts.Fatalf("%d of %d entries differ: %s", len(diffs), len(a), strings.Join(diffs[:min(len(diffs), 10)], "\n"))
	}
}

// listTree describes every file below dir in one line: all metadata, content
// digest and the first path of its hard links.
func listTree(dir string) (map[string]string, error) {
	out := map[string]string{}
	first := map[[2]uint64]string{}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			return err
		}
		out[rel], err = describeFile(path, rel, st, first)
		return err
	})
	return out, err
}

func describeFile(path, rel string, st unix.Stat_t, first map[[2]uint64]string) (string, error) {
	line := fmt.Sprintf("mode=%o uid=%d gid=%d", st.Mode, st.Uid, st.Gid)
	if rel != "." {
		line += fmt.Sprintf(" mtime=%d.%09d", st.Mtim.Sec, st.Mtim.Nsec)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		raw, err := os.ReadFile(path)
		if err != nil {
			return "", err
		}
		line += fmt.Sprintf(" size=%d %s", st.Size, chunk.Sum(raw))
	case unix.S_IFLNK:
		target, err := os.Readlink(path)
		if err != nil {
			return "", err
		}
		line += " -> " + target
	case unix.S_IFCHR, unix.S_IFBLK:
		line += fmt.Sprintf(" rdev=%x", st.Rdev)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR && st.Nlink > 1 {
		key := [2]uint64{st.Dev, st.Ino}
		if first[key] == "" {
			first[key] = rel
		}
		line += fmt.Sprintf(" nlink=%d first=%s", st.Nlink, first[key])
	}
	names := make([]byte, 64<<10)
	n, err := unix.Llistxattr(path, names)
	if err != nil && !errors.Is(err, unix.ENOTSUP) {
		return "", err
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(names[:max(n, 0)]), "\x00"), "\x00") {
		if name == "" {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(path, name, value)
		if err != nil {
			return "", err
		}
		line += fmt.Sprintf(" %s=%x", name, value[:n])
	}
	return line, nil
}
