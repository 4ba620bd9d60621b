package session_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"quarry/worker/sentry"
	"quarry/worker/sentry/sentrytest"
	"quarry/worker/session"
)

// rig is a sandbox with bash, and a session in it.
type rig struct {
	testing.TB
	g *sentry.Client
	s *session.Session
	// began is closed at the first output of the command that runs, if not nil.
	began chan struct{}
}

func as() sentry.Exec {
	return sentry.Exec{Env: []string{"PATH=/bin", "HOME=/root"}, WorkDir: "/"}
}

func newRig(t testing.TB) *rig {
	t.Helper()
	root := sentrytest.Root(t)
	sentrytest.AddBash(t, root)
	box := sentrytest.StartIn(t, root)
	g := sentry.New(box.Socket, box.ID)
	t.Cleanup(g.Close)
	r := &rig{TB: t, g: g}
	r.again()
	return r
}

// again starts a session.
func (r *rig) again() {
	r.Helper()
	s, err := session.Start(context.Background(), r.g, as())
	if err != nil {
		r.Fatal(err)
	}
	r.s = s
}

// run runs a command and returns what it wrote, both streams.
func (r *rig) run(text string) (session.Result, string, string) {
	r.Helper()
	var b [2]bytes.Buffer
	var w [2]*os.File
	done := make(chan struct{}, 2)
	var once sync.Once
	for i := range b {
		from, to, err := os.Pipe()
		if err != nil {
			r.Fatal(err)
		}
		w[i] = to
		go func() {
			defer from.Close()
			_, _ = io.Copy(io.MultiWriter(&b[i], &seen{&once, r.began}), from)
			done <- struct{}{}
		}()
	}
	res, err := r.s.Run(context.Background(), text, w[0], w[1])
	w[0].Close()
	w[1].Close()
	<-done
	<-done
	if err != nil {
		r.Fatalf("%q: %v", text, err)
	}
	return res, b[0].String(), b[1].String()
}

// seen closes a channel when something is written.
type seen struct {
	once  *sync.Once
	began chan struct{}
}

func (s *seen) Write(p []byte) (int, error) {
	if s.began != nil {
		s.once.Do(func() { close(s.began) })
	}
	return len(p), nil
}

// want runs a command and compares.
func (r *rig) want(text string, code int, out, errs string) {
	r.Helper()
	res, gotOut, gotErr := r.run(text)
	if res.Code != code || res.Over || gotOut != out || gotErr != errs {
		r.Errorf("%q: %+v, stdout %q, stderr %q; want %d, %q, %q", text, res, gotOut, gotErr, code, out, errs)
	}
}

func TestWhatACommandChangesStays(t *testing.T) {
	r := newRig(t)
	r.want("cd /tmp; export A=1; f() { echo f$1; }; declare -A m; m[a]=b; alias ll='echo aliased'", 0, "", "")
	r.want("pwd; echo $A; f 2; echo ${m[a]}", 0, "/tmp\n1\nf2\nb\n", "")
	r.want("ll", 0, "aliased\n", "")
	r.want("false", 1, "", "")
	r.want("echo $?", 0, "1\n", "")
	r.want("echo $?", 0, "0\n", "")
	r.want("(exit 7)", 7, "", "")
	r.want("set -o pipefail; false | true", 1, "", "")
	r.want("shopt -s extglob", 0, "", "")
	r.want("cd /; ls -d !(b*) | head -1", 0, "dev\n", "")
	r.want("-n", 127, "", "bash: -n: command not found\n")
	r.want("", 0, "", "")
	r.want("# nothing", 0, "", "")
}

func TestOutputIsTheCommandsOwn(t *testing.T) {
	r := newRig(t)
	r.want("echo out; echo err >&2", 0, "out\n", "err\n")
	r.want(`printf 'a\0b\377\n'`, 0, "a\x00b\xff\n", "")
	r.want("cat; read x; echo \"$x\"", 0, "\n", "")
	r.want("exec >/tmp/log; echo hidden", 0, "", "")
	r.want("echo seen; cat /tmp/log", 0, "seen\nhidden\n", "")
	r.want("exec </etc/none", 1, "", "bash: /etc/none: No such file or directory\n")
	r.want("echo still", 0, "still\n", "")
	r.want("PS1='(venv) '; PS2='> '; set +H", 0, "", "")
	r.want("echo 'two\nlines'; cat <<X\n$A it's\nX", 0, "two\nlines\n it's\n", "")
	// More than pipes hold, to the last byte.
	res, out, _ := r.run("yes 0123456789abcdef | head -c 5000000; exit_status=3; (exit 3)")
	if res.Code != 3 || len(out) != 5000000 {
		t.Errorf("%+v, %d bytes", res, len(out))
	}
	for i := range 50 {
		r.want(fmt.Sprintf("echo %d; echo %d >&2; (exit %d)", i, i+1, i%3), i%3, fmt.Sprintln(i), fmt.Sprintln(i+1))
	}
	// None of the session's own descriptors is the command's.
	r.want("ls /proc/self/fd", 0, "0\n1\n2\n3\n", "")
}

func TestABackgroundJobGoesOnAndSpeaksLater(t *testing.T) {
	r := newRig(t)
	res, out, errs := r.run("sleep 1000 & sh -c 'while [ ! -e /tmp/go ]; do sleep 0.01; done; echo spoke; touch /tmp/spoke' & echo started")
	if res.Code != 0 || out != "started\n" || !strings.Contains(errs, "[1] ") {
		t.Errorf("%+v, %q, %q", res, out, errs)
	}
	// Another exec makes it speak while no command runs.
	pid, err := r.g.Execute(context.Background(), sentry.Exec{Argv: []string{"sh", "-c", "touch /tmp/go; while [ ! -e /tmp/spoke ]; do sleep 0.01; done"}, Env: as().Env, Files: nulls(t)})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.g.WaitPID(context.Background(), pid); err != nil {
		t.Fatal(err)
	}
	r.want("echo mine", 0, "spoke\nmine\n", "")
	r.want("kill %1; wait %1; echo $?", 0, "143\n", "")
	r.want("sh -c 'kill -9 $$'; echo $?", 0, "137\n", "")
}

func nulls(t testing.TB) map[int]*os.File {
	t.Helper()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { null.Close() })
	return map[int]*os.File{0: null, 1: null, 2: null}
}

func TestWhatEndsAScriptDoesNotEndASession(t *testing.T) {
	r := newRig(t)
	r.want("echo ${x:?bad}; echo after", 1, "", "bash: x: bad\n")
	r.want("exec /none; echo after", 0, "after\n", "bash: /none: No such file or directory\n")
	r.want("break; return 2; echo $?", 0, "2\n", "bash: break: only meaningful in a `for', `while', or `until' loop\nbash: return: can only `return' from a function or sourced script\n")
	r.want("set -u; echo $undefined", 1, "", "bash: undefined: unbound variable\n")
	r.want("set +u; kill -INT $$; echo after", 130, "", "")
	r.want("kill -TERM $$; echo after", 0, "after\n", "")
	r.want("trap 'echo trapped' INT; kill -INT $$; trap - INT; echo after", 0, "trapped\nafter\n", "")
	if res, _, errs := r.run("eval 'echo \"'"); res.Over || res.Code == 0 || !strings.Contains(errs, "unexpected EOF") {
		t.Errorf("%+v, %q", res, errs)
	}
	r.want("echo alive", 0, "alive\n", "")
}

// Whatever a command makes of its shell, the next one has its status and its output.
func TestOddShellsGoOn(t *testing.T) {
	r := newRig(t)
	for _, text := range []string{
		"trap : DEBUG; trap : ERR; trap : RETURN; set -o functrace; shopt -s extdebug", "trap - DEBUG ERR RETURN; shopt -u extdebug", "set -v", "set +v", "set -o posix", "set +o posix",
		"IFS=x; PS1='$(echo p >&2)> '; PS4='$?'; PROMPT_COMMAND='echo prompt; false'", "set -f; set -C; set -k; set -a; set -b", "set +f +C +k +a +b", "shopt -s failglob nullglob dotglob",
		"echo() { :; }; printf() { :; }; kill() { :; }; trap() { :; }", "alias builtin=false eval=false printf=false", "unset -f echo printf kill trap; unalias -a", "exec 59<&- 60>&- 61>&- 63>&-",
		"LC_ALL=xx; LANG=yy; unset PATH HOME", "PATH=/bin", "history -c; set -o history; set +o history", "readonly PS2=x; umask 777; umask 22", "mkdir -p /tmp/gone; cd /tmp/gone; rmdir /tmp/gone", "cd /",
		"set -m", "set +m", "ulimit -c 0", "exec 3</dev/null 4>/tmp/four", "coproc cat; exec 5>&${COPROC[1]}", "echo \"$(cat </dev/null)\" >/dev/null",
	} {
		if res, _, _ := r.run(text); res.Over {
			t.Fatalf("%q ended the session", text)
		}
		res, out, _ := r.run("command echo out; (exit 9)")
		if res.Code != 9 || res.Over || !strings.HasSuffix(out, "out\n") {
			t.Errorf("after %q: %+v, %q", text, res, out)
		}
	}
	// Tracing is the command's own.
	res, out, errs := r.run("PS4='+ '; set -x; command echo traced; set +x")
	if res.Code != 0 || !strings.Contains(errs, "echo traced") || !strings.Contains(out, "traced\n") {
		t.Errorf("%+v, %q, %q", res, out, errs)
	}
}

func TestASessionEndsAsBashDoes(t *testing.T) {
	r := newRig(t)
	for text, want := range map[string]session.Result{
		"echo bye; exit 3":            {Code: 3, Over: true},
		"set -e; echo bye; false":     {Code: 1, Over: true},
		"echo bye; kill -9 $$":        {Code: 137, Signal: 9, Over: true},
		"echo bye; exec true":         {Over: true},
		"trap 'echo bye' EXIT; exit":  {Over: true},
		"sleep 1000 & echo bye; exit": {Over: true},
	} {
		res, out, _ := r.run(text)
		if res != want || out != "bye\n" {
			t.Errorf("%q: %+v, %q", text, res, out)
		}
		<-r.s.Ended()
		if _, err := r.s.Run(context.Background(), "true", nil, nil); !errors.Is(err, session.ErrEnded) {
			t.Errorf("after %q: %v", text, err)
		}
		r.again()
	}
}

func TestACommandIsStopped(t *testing.T) {
	r := newRig(t)
	r.run("sleep 1000 &")
	for text, kept := range map[string]bool{
		"sleep 1000; echo after":                           true,
		"while :; do :; done":                              true,
		"while :; do sleep 1000; done":                     true,
		"sleep 1000 | cat; echo after":                     true,
		"(trap '' INT TERM; sleep 1000; sleep 1000)":       true,
		"x=$(sleep 1000); echo after":                      true,
		"f() { sleep 1000; echo f; }; f; f":                true,
		"bash -c 'sleep 1000; sleep 1000'; echo after":     true,
		"setsid sleep 1000 & wait $!":                      true,
		"trap '' INT; while :; do :; done":                 false,
		"trap 'sleep 1000' INT; sleep 1000":                true,
		"while :; do (trap '' INT; exec sleep 1000); done": false,
	} {
		for _, grace := range []time.Duration{0, 50 * time.Millisecond} {
			began := make(chan struct{})
			r.began = began
			go func() { // ends with the command
				<-began
				time.Sleep(20 * time.Millisecond) // and its processes
				if err := r.s.Stop(context.Background(), grace, nil); err != nil {
					t.Error(err)
				}
			}()
			res, out, _ := r.run("cd /tmp; echo began; " + text)
			r.began = nil
			if !strings.HasPrefix(out, "began\n") || strings.Contains(out, "after") || res.Code == 0 {
				t.Errorf("%q: %+v, %q", text, res, out)
			}
			if res.Over && kept {
				t.Errorf("%q ended the session", text)
			}
			if n := r.sleeping(); n != 1 {
				t.Errorf("%q: %d processes sleep, the job of before and no other should", text, n)
			}
			if res.Over {
				r.again()
			} else {
				r.want("trap - INT; set +e; pwd", 0, "/tmp\n", "")
			}
		}
	}
}

// sleeping counts processes called sleep that live, without the sandbox's first.
func (r *rig) sleeping() int {
	r.Helper()
	s := r.s
	defer func() { r.s = s }()
	r.again()
	defer r.s.Close()
	_, out, errs := r.run(`for f in /proc/[0-9]*/status; do n= s=; while read k v _; do case $k in Name:) n=$v;; State:) s=$v;; esac; done <$f; [ "$n" = sleep ] && [ "$s" != Z ] && echo; done 2>/dev/null`)
	if errs != "" {
		r.Error(errs)
	}
	return len(out) - 1
}

func TestASyntaxErrorAnswersAtOnce(t *testing.T) {
	r := newRig(t)
	for text, want := range map[string]string{
		"echo hi":                     "",
		"ls -la /tmp":                 "",
		"if true; then echo x; fi":    "",
		"cat <<X\nabc\nX":             "",
		"ls !(a)":                     "",
		"echo 'it''s'":                "",
		"echo '":                      "unexpected EOF",
		"echo \"abc":                  "unexpected EOF",
		"cat <<X\nabc":                "here-document",
		"if true; then":               "syntax error",
		"if":                          "syntax error",
		"done":                        "syntax error",
		"echo $(":                     "",
		"f() {":                       "syntax error",
		"touch /tmp/ran; )":           "syntax error",
		"touch /tmp/ran\necho $((1+)": "",
	} {
		got, err := session.Check(context.Background(), r.g, as(), text)
		if err != nil {
			t.Fatal(err)
		}
		if want == "" && text != "echo $(" && text != "touch /tmp/ran\necho $((1+)" {
			if got != "" {
				t.Errorf("%q: %q", text, got)
			}
		} else if !strings.Contains(got, want) || got == "" {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	r.want("[ -e /tmp/ran ]", 1, "", "")
	big := "echo '" + strings.Repeat("a", 300_000)
	if got, err := session.Check(context.Background(), r.g, as(), big); err != nil || got == "" {
		t.Errorf("a big one: %q, %v", got, err)
	}
	r.want(big+"' | wc -c", 0, "300001\n", "")
}

func TestWithoutBashThereIsNoSession(t *testing.T) {
	box := sentrytest.Start(t)
	g := sentry.New(box.Socket, box.ID)
	defer g.Close()
	if _, err := session.Start(context.Background(), g, as()); !errors.Is(err, session.ErrNoBash) {
		t.Error(err)
	}
	if _, err := session.Check(context.Background(), g, as(), "echo '"); !errors.Is(err, session.ErrNoBash) {
		t.Error(err)
	}
}

// What a guest writes to the status descriptor says nothing without the nonce, and
// the command's descriptors do not lead there.
func TestAStatusIsNotForged(t *testing.T) {
	r := newRig(t)
	r.run(`echo "00000000000000000000000000000000 0" > /proc/$$/fd/63; head -c 100000 /dev/zero > /proc/$$/fd/63`)
	r.want("false", 1, "", "")
	r.want("history", 0, "", "")
	r.want("echo ok", 0, "ok\n", "")
}

func BenchmarkCommand(b *testing.B) {
	r := newRig(b)
	for name, text := range map[string]string{"builtin": ":", "program": "/bin/true"} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				r.run(text)
			}
		})
	}
	b.Run("check", func(b *testing.B) {
		for b.Loop() {
			if _, err := session.Check(context.Background(), r.g, as(), "echo 'a'"); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// A session that cannot tell any more how a command ended is ended, and no caller waits
// for ever. One that is only slow to is not.
func TestABashThatDoesNotTellIsEnded(t *testing.T) {
	r := newRig(t)
	r.want("sleep 3; echo slow", 0, "slow\n", "")
	for _, text := range []string{"builtin() { :; }", "enable -n builtin", "printf() { :; }; unset -f printf; enable -n printf"} {
		res, out, _ := r.run("echo said; " + text)
		if !res.Over || !res.Mute || res.Signal != 9 || out != "said\n" {
			t.Errorf("%q: %+v, %q", text, res, out)
		}
		r.again()
	}
	res, _, _ := r.run("kill -9 $$")
	if !res.Over || res.Mute {
		t.Errorf("one that ended by itself: %+v", res)
	}
}
