package wait

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"quarry/internal/need"
	"quarry/worker/sentry"
	"quarry/worker/sentry/sentrytest"
)

// runsc is a sandbox whose network is a guest's.
type runsc struct {
	*guest
	c    *sentry.Client
	pid  int
	wake func() // is called before it is resumed

	mu         sync.Mutex
	pauseTook  []time.Duration
	resumeTook []time.Duration
}

func (l *lab) runsc(t testing.TB) *runsc {
	t.Helper()
	need.Tool(t, "runsc")
	g, dir := l.guest(t), need.ShortDir(t)
	sentrytest.Bundle(t, dir, sentrytest.Root(t), "sleep", "1000000")
	var spec specs.Spec
	config := filepath.Join(dir, "config.json")
	b, err := os.ReadFile(config)
	if err == nil {
		err = json.Unmarshal(b, &spec)
	}
	if err != nil {
		t.Fatal(err)
	}
	for i, n := range spec.Linux.Namespaces {
		if n.Type == specs.NetworkNamespace {
			spec.Linux.Namespaces[i].Path = g.ns
		}
	}
	if b, err = json.Marshal(spec); err == nil {
		err = os.WriteFile(config, b, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	argv := sentrytest.Runsc(t, dir)
	for i, a := range argv {
		if a == "none" && argv[i-1] == "--network" {
			argv[i] = "sandbox"
		}
	}
	state, pidFile, log := filepath.Join(dir, "runsc"), filepath.Join(dir, "pid"), filepath.Join(dir, "runsc.log")
	argv = append(argv, "--root", state, "--log", log, "run", "--detach", "--pid-file", pidFile, "--bundle", dir, "test")
	t.Cleanup(func() { sentrytest.End(t, dir) })
	if err := exec.Command(argv[0], argv[1:]...).Run(); err != nil {
		said, _ := os.ReadFile(log)
		t.Fatalf("runsc: %v: %s", err, said)
	}
	raw, err := os.ReadFile(pidFile)
	if err != nil {
		t.Fatal(err)
	}
	r := &runsc{guest: g, c: sentry.New(filepath.Join(state, "runsc-test.sock"), "test")}
	t.Cleanup(r.c.Close)
	if r.pid, err = strconv.Atoi(strings.TrimSpace(string(raw))); err != nil {
		t.Fatal(err)
	}
	return r
}

// cpu is what all threads of the Sentry have used.
func (r *runsc) cpu() (time.Duration, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", r.pid))
	if err != nil || len(threads) == 0 {
		return 0, fmt.Errorf("no threads of %d: %v", r.pid, err)
	}
	var sum time.Duration
	for _, name := range threads {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // it has ended
		}
		ns, _, _ := strings.Cut(string(b), " ")
		n, err := strconv.ParseInt(ns, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(n)
	}
	return sum, nil
}

func (r *runsc) sandbox() Sandbox {
	s := r.guest.sandbox()
	note, done := s.Resume, s.Pause
	s.CPU = r.cpu
	timed := func(to *[]time.Duration, call func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		start := time.Now()
		err := call(ctx)
		r.mu.Lock()
		*to = append(*to, time.Since(start))
		r.mu.Unlock()
		return err
	}
	s.Pause = func(ctx context.Context) error {
		if err := timed(&r.pauseTook, r.c.Pause); err != nil {
			return err
		}
		return done(ctx)
	}
	s.Resume = func(ctx context.Context, w Wake) error {
		if r.wake != nil {
			r.wake()
		}
		if err := timed(&r.resumeTook, r.c.Resume); err != nil {
			return err
		}
		return note(ctx, w)
	}
	return s
}

// command runs a shell command in the sandbox and returns its output.
func (r *runsc) command(line string) string {
	r.t.Helper()
	read, write, err := os.Pipe()
	if err != nil {
		r.t.Fatal(err)
	}
	defer read.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	defer cancel()
	_, err = r.c.Execute(ctx, sentry.Exec{Argv: []string{"sh", "-c", line}, Env: []string{"PATH=/bin"}, Files: map[int]*os.File{1: write, 2: write}})
	write.Close()
	if err != nil {
		r.t.Fatal(err)
	}
	out, err := io.ReadAll(read)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(out)
}

// told is what a model of one answer says of it.
type told struct {
	began   time.Time // it began to send
	handed  time.Duration
	whole   time.Duration // until the guest had all
	last    *unix.TCPInfo // then
	stalled time.Duration // with a window of none, or too small

	mu  sync.Mutex
	raw syscall.RawConn // once it answers
}

// look asks the kernel of the connection that is answered.
func (a *told) look() (info *unix.TCPInfo, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.raw == nil {
		return nil, errors.New("nothing is answered yet")
	}
	if failed := a.raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }); failed != nil {
		return nil, failed
	}
	return info, err
}

// model answers one request with a body, once it may, and tells when the guest has all
// of it.
func (a *told) model(l *net.TCPListener, may func(), body []byte) error {
	c, err := l.AcceptTCP()
	if err != nil {
		return err
	}
	defer c.Close()
	lines := bufio.NewReader(c)
	for line := ""; line != "\r\n"; {
		if line, err = lines.ReadString('\n'); err != nil {
			return err
		}
	}
	may()
	a.mu.Lock()
	a.raw, err = c.SyscallConn()
	a.mu.Unlock()
	if err != nil {
		return err
	}
	a.began = time.Now()
	if _, err := fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n", len(body)); err != nil {
		return err
	}
	if _, err := c.Write(body); err != nil {
		return err
	}
	a.handed = time.Since(a.began)
	for {
		info, err := a.look()
		if err != nil {
			return err
		}
		if info.Unacked == 0 && info.Notsent_bytes == 0 {
			a.last = info
			break
		}
		time.Sleep(time.Millisecond)
	}
	a.whole = time.Since(a.began)
	a.stalled = time.Duration(a.last.Rwnd_limited) * time.Microsecond
	return c.CloseWrite()
}

// TestAnAnswerToASandboxThatIsPaused gives a real sandbox answers that come while it
// is paused, wakes it at once or 2 s late, and wants them whole and without a
// repeated byte: the Sentry's stack takes them until its buffer is full.
func TestAnAnswerToASandboxThatIsPaused(t *testing.T) {
	l := newLab(t)
	for _, size := range []int{1 << 20, 4 << 20, 16 << 20} {
		for _, late := range []time.Duration{0, 2 * time.Second} {
			t.Run(fmt.Sprint(size>>20, " MiB, woken after ", late), func(t *testing.T) {
				// What is repeated is what got lost (patientRTO). On a busy machine a Sentry may
				// be too late to take a packet from its queue, paused or not: one of a few
				// answers has to come without that, and each has to be whole.
				var repeated []uint64
				for range 3 {
					n := answerPaused(t, l, size, late)
					if n == 0 {
						return
					}
					repeated = append(repeated, n)
				}
				t.Errorf("%d bytes were repeated of the answers", repeated)
			})
		}
	}
}

// answerPaused gives a sandbox one answer, and returns how much of it got lost and
// should not have been.
func answerPaused(t *testing.T, l *lab, size int, late time.Duration) uint64 {
	t.Helper()
	listener, at := l.raw(t)
	defer listener.Close()
	r := l.runsc(t)
	var told told
	var first *unix.TCPInfo // before it runs
	r.wake = func() {
		if late == 0 || first != nil {
			return
		}
		time.Sleep(late)
		for end := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
			var err error
			if first, err = told.look(); err != nil || first.Bytes_acked >= 1<<18 || time.Now().After(end) {
				return
			}
		}
	}
	w, err := New(Config{Name: "quarry-wait-test", Endpoints: []netip.AddrPort{at}})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if _, err := w.Watch(r.sandbox()); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, size)
	for i := range body {
		body[i] = byte(i * i >> 7)
	}
	answered := make(chan error, 1)
	go func() { // ends with the sandbox
		answered <- told.model(listener, func() { time.Sleep(2 * time.Second); r.comes(r.isPaused) }, body)
	}()
	got := r.command(fmt.Sprintf("wget -q -O - http://%s/ | sha256sum", at))
	if want := fmt.Sprintf("%x", sha256.Sum256(body)); !strings.HasPrefix(got, want) {
		t.Errorf("got %q, want %s", got, want)
	}
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	woken := r.woken(1)
	if woken.Why != Answer {
		t.Errorf("resumed for %s", woken.Why)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	t.Logf("runs %s after the answer was sent (pause %s, resume %s); all was handed over after %s, acknowledged after %s, without a window for %s; repeated %d bytes",
		woken.at.Sub(told.began), r.pauseTook, r.resumeTook, told.handed, told.whole, told.stalled, told.last.Bytes_retrans)
	if late == 0 {
		return told.last.Bytes_retrans
	}
	if first == nil || first.Bytes_acked < 1<<18 {
		t.Fatalf("while it was paused not enough was taken: %+v", first)
	}
	t.Logf("while it was paused it took %d bytes, and %d were repeated", first.Bytes_acked, first.Bytes_retrans)
	return told.last.Bytes_retrans
}
