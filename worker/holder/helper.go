package holder

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"quarry/internal/fdpass"
	"quarry/worker/sandbox"
	"quarry/worker/sentry"
)

// helperPatience is how long a helper may go on when its caller is gone.
const helperPatience = 3 * time.Second

// helper runs a program of the host in the guest until it ends, or kills it when
// its caller is gone. files are its streams and, last, the program.
func (b *box) helper(ctx context.Context, r request, files []*os.File) (*sentry.Status, error) {
	if r.Process == nil || len(r.Process.Argv) == 0 || len(files) == 0 || len(r.Streams) != len(files)-1 {
		return nil, fmt.Errorf("%w: a helper needs a program and its streams", sandbox.ErrInvalid)
	}
	streams := map[int]*os.File{}
	for i, fd := range r.Streams {
		if fd < 0 || fd > 2 || streams[fd] != nil {
			return nil, fmt.Errorf("%w: stream %d of a helper", sandbox.ErrInvalid, fd)
		}
		streams[fd] = files[i]
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	for fd := range 3 {
		if streams[fd] == nil {
			streams[fd] = null
		}
	}
	pid, err := b.startHelper(ctx, *r.Process, streams, files[len(files)-1])
	fdpass.Close(files) // the guest has its own; who waits for the end of one sees it
	if err != nil {
		return nil, err
	}
	defer func() {
		b.mu.Lock()
		b.helpers--
		delete(b.helping, pid)
		b.mu.Unlock()
	}()
	waited := make(chan error, 1)
	var status sentry.Status
	b.tasks.Go(func() { // ends with the helper or the Sentry
		var err error
		status, err = b.sentry.WaitPID(context.Background(), pid)
		waited <- err
	})
	select {
	case err = <-waited:
	case <-ctx.Done():
		// Its streams have mostly ended as well: what it had begun it takes away.
		select {
		case <-waited:
			return nil, context.Cause(ctx)
		case <-time.After(helperPatience):
		}
		killing, cancel := context.WithTimeout(context.Background(), killTimeout)
		defer cancel()
		if err := b.killFamily(killing, newFamily(pid)); err != nil {
			b.log.Warn("helper may be left", "pid", pid, "err", err)
			return nil, context.Cause(ctx)
		}
		err = <-waited
	}
	if err != nil {
		return nil, b.sentryError(err)
	}
	return &status, nil
}

// startHelper starts it and counts it; while one runs the guest is not paused.
func (b *box) startHelper(ctx context.Context, p Process, streams map[int]*os.File, program *os.File) (int, error) {
	if err := b.gate.enter(ctx); err != nil {
		return 0, err
	}
	defer b.gate.leave()
	b.mu.Lock()
	over, isPaused := b.over, b.isPaused
	b.starting++
	b.mu.Unlock()
	pid := 0
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.starting--
		if pid > 0 {
			b.helpers++
			b.helping[pid] = true
		}
	}()
	switch {
	case over:
		return 0, sandbox.ErrEnded
	case isPaused:
		return 0, ErrPaused
	}
	// Not the caller's ctx: a helper that was started is known, and can be killed.
	starting, cancel := context.WithTimeout(context.Background(), StartTimeout)
	defer cancel()
	started, err := b.sentry.Execute(starting, sentry.Exec{
		Argv: p.Argv, Env: p.Env, WorkDir: p.WorkDir, UID: p.UID, GID: p.GID, Groups: p.Groups, Capabilities: p.Capabilities,
		NoNewPrivs: p.NoNewPrivs, Files: streams, Program: program,
	})
	if err != nil {
		return 0, b.sentryError(err)
	}
	pid = started
	return started, nil
}

// cat writes a file of the guest to out.
func (b *box) cat(ctx context.Context, path string, out *os.File) error {
	if err := sentry.CheckText([]string{path}); err != nil {
		return fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)
	}
	err := b.sentry.Cat(ctx, path, out)
	if errors.Is(err, sentry.ErrNoFile) {
		return fmt.Errorf("%w: %w", sandbox.ErrFileNotFound, err)
	}
	return err
}

// sentryError says in the words of package sandbox what an error of the Sentry is.
func (b *box) sentryError(err error) error {
	switch {
	case errors.Is(err, sentry.ErrGone):
		return fmt.Errorf("%w: %w", sandbox.ErrEnded, err)
	case errors.Is(err, sentry.ErrProcesses):
		return fmt.Errorf("%w: %w", sandbox.ErrNoProcess, err)
	}
	return err
}
