package session

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"regexp"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"quarry/worker/sentry"
)

// plainCommand is a text that every shell understands: words and options.
var plainCommand = regexp.MustCompile(`^[A-Za-z0-9_./=:,@%+-][A-Za-z0-9_./=:,@%+ -]*$`)

// reserved are words that begin something which must end.
var reserved = map[string]bool{
	"if": true, "then": true, "else": true, "elif": true, "fi": true, "do": true, "done": true, "case": true, "esac": true,
	"for": true, "while": true, "until": true, "select": true, "function": true, "time": true, "coproc": true, "in": true,
}

// checkTimeout bounds a check, which takes some milliseconds.
const checkTimeout = 30 * time.Second

// maxComplaint is kept of what bash says of a text.
const maxComplaint = 4 << 10

// Check asks a bash of the guest whether it understands a text, and returns what it
// says if not: also of a here-document without its end, which bash itself would let
// pass. Nothing of the text runs. Options and aliases of a session are not known here.
func Check(ctx context.Context, g Guest, as sentry.Exec, text string) (complaint string, err error) {
	if first, _, _ := strings.Cut(text, " "); plainCommand.MatchString(text) && !reserved[first] {
		return "", nil
	}
	in, err := memory(text)
	if err != nil {
		return "", err
	}
	defer in.Close()
	said, w, err := os.Pipe()
	if err != nil {
		return "", err
	}
	defer said.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		w.Close()
		return "", err
	}
	defer null.Close()
	as.Argv = []string{"bash", "--norc", "--noprofile", "-O", "extglob", "-n"}
	env := []string{"LC_ALL=C"}
	for _, v := range as.Env {
		if strings.HasPrefix(v, "PATH=") {
			env = append(env, v)
		}
	}
	as.Env = env
	_ = unix.SetNonblock(int(w.Fd()), false)
	as.Files = map[int]*os.File{0: in, 1: null, 2: w}
	pid, err := g.Execute(ctx, as)
	w.Close()
	if err != nil {
		return "", notThere(err)
	}
	// Who asks may go away, and what is called bash in a guest need not be one.
	ctx, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	stop := context.AfterFunc(ctx, func() {
		_ = said.SetReadDeadline(time.Unix(1, 0))
		_ = g.Signal(context.WithoutCancel(ctx), sentry.ToGroup, pid, int(unix.SIGKILL))
	})
	defer stop()
	var b bytes.Buffer
	_, _ = io.Copy(&b, io.LimitReader(said, maxComplaint))
	_ = said.Close() // bash has SIGPIPE for more
	st, err := g.WaitPID(ctx, pid)
	if err != nil {
		return "", err
	}
	complaint = strings.ToValidUTF8(strings.TrimSpace(b.String()), "?")
	if st.Code != 0 || openDocument.MatchString(complaint) {
		if complaint == "" {
			complaint = "bash does not understand it"
		}
		return complaint, nil
	}
	return "", nil
}

// openDocument is bash's warning, in the language of LC_ALL=C.
var openDocument = regexp.MustCompile(`warning: here-document at line \d+ delimited by end-of-file`)

// memory makes a file of a text, which can be read and nothing else.
func memory(text string) (*os.File, error) {
	fd, err := unix.MemfdCreate("command", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "command")
	if _, err := f.WriteString(text + "\n"); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}
