package holder

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/strictjson"
)

const (
	// keepFD is where a holder finds the descriptor that it keeps, if there is one.
	keepFD = 3
	// abort is what Start writes when nobody wants the sandbox any more.
	abort = 'x'
)

// started is the line that a holder writes when its sandbox runs, or does not.
type started struct {
	Format  string `json:"format"`
	Code    string `json:"code"`
	Message string `json:"message"`
	Spawn   int64  `json:"spawn_us"`
	Runsc   int64  `json:"runsc_us"`
}

const startedFormat = "quarry-holder-started/1"

// Main is the holder's process: it reads its config from stdin, starts the sandbox,
// says so on stdout, and keeps it until it has ended and nobody asks any more.
// It returns what it could not even tell its starter.
func Main(stdin, stdout *os.File, log *slog.Logger) error {
	begun := time.Now()
	in := bufio.NewReaderSize(stdin, maxConfig)
	line, err := in.ReadSlice('\n')
	if err != nil {
		return fmt.Errorf("read the config: %w", err)
	}
	c, err := strictjson.Decode[config](line[:len(line)-1], maxConfig)
	if err == nil && c.Format != configFormat {
		err = fmt.Errorf("format %q", plain(c.Format))
	}
	if err != nil {
		return fmt.Errorf("config: %w", err)
	}
	b := newBox(c, log, keptFile())
	if b.journal, err = openJournal(c.Dir, cmp.Or(c.MaxKept, DefaultKept)/journalPart); err != nil {
		return say(stdout, refuse(err), started{})
	}
	if b.score, err = readBounded(oomScore); err != nil {
		return say(stdout, refuse(err), started{})
	}
	l, err := listen(c.Dir)
	if err != nil {
		return say(stdout, refuse(err), started{})
	}
	defer l.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() { // ends with the byte, or the other end of the pipe
		if one, err := in.ReadByte(); err == nil && one == abort {
			cancel()
			b.giveUp("nobody wanted it any more")
		}
	}()
	spawned := time.Now()
	if err := b.run(ctx, c); err != nil {
		return say(stdout, refuse(err), started{})
	}
	shield(log)
	b.record()
	s := &server{box: b, released: make(chan struct{}), conns: make(chan struct{}, maxConns)}
	go s.serve(l, log) // ends with the listener, at the end of this function
	// Who asked may be gone; the sandbox is not.
	_ = say(stdout, answer{}, started{Spawn: spawned.Sub(begun).Microseconds(), Runsc: time.Since(spawned).Microseconds()})
	s.stay()
	if b.keep != nil {
		b.keep.Close()
	}
	return os.Remove(socketPath(c.Dir))
}

// say writes the one line that Start waits for.
func say(stdout *os.File, a answer, st started) error {
	st.Format, st.Code, st.Message = startedFormat, a.Code, a.Message
	_, err := stdout.Write(append(marshal(st), '\n'))
	// Not closed: the next file that is opened would have the number of a stdout.
	null, failed := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
	if failed != nil {
		return errors.Join(err, failed)
	}
	defer null.Close()
	return errors.Join(err, unix.Dup3(int(null.Fd()), int(stdout.Fd()), unix.O_CLOEXEC))
}

// stay returns when the sandbox has ended and its end was fetched, or nobody will.
func (s *server) stay() {
	<-s.box.ended
	end := time.After(lingerTimeout)
	for {
		select {
		case <-s.released:
			return
		case <-end:
			return
		case <-time.After(folderPoll):
			if _, err := os.Stat(s.box.dir); err != nil {
				return
			}
		}
	}
}

// keptFile returns the inherited descriptor, or nil.
func keptFile() *os.File {
	if os.Getenv(keepVariable) == "" {
		return nil
	}
	unix.CloseOnExec(keepFD) // runsc is not to have it
	return os.NewFile(keepFD, "kept")
}

// keepVariable says to a holder that it has inherited a descriptor to keep.
const keepVariable = "QUARRY_HOLDER_KEEPS"

// shield asks the kernel to kill any other process first when memory is short. Only
// once runsc has started: the Sentry would inherit it.
func shield(log *slog.Logger) {
	if err := os.WriteFile(oomScore, []byte("-1000"), 0); err != nil {
		log.Warn("holder can be killed when memory is short", "err", err)
	}
}

const oomScore = "/proc/self/oom_score_adj"
