package reader

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"

	"quarry/internal/proc"
	"quarry/worker/folder"
)

// findTimeout is for one connection to a socket of this machine.
const findTimeout = time.Second

// Find returns the process that serves the folder's images. Errors: none serves,
// or it is about to end.
func Find(ctx context.Context, d folder.Dir) (*proc.Process, error) {
	pid, err := listener(ctx, d.ReaderControl())
	if err != nil {
		return nil, err
	}
	p, err := proc.Open(pid)
	if err != nil {
		return nil, err
	}
	// The number may have been another's by the time it was opened.
	if again, err := listener(ctx, d.ReaderControl()); err != nil || again != pid {
		return nil, errors.Join(fmt.Errorf("reader %d is gone", pid), err, p.Close())
	}
	return p, nil
}

// listener asks the kernel which process listens on a socket.
func listener(ctx context.Context, path string) (pid int, err error) {
	d := net.Dialer{Timeout: findTimeout}
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	ctlErr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(ctlErr, err); err != nil {
		return 0, err
	}
	if cred.Pid == 0 {
		return 0, fmt.Errorf("who listens on %s is in another PID namespace", path)
	}
	return int(cred.Pid), nil
}
