package reader

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"

	"quarry/internal/proc"
)

// socket is a listener that knows whether others still find it by its path.
type socket struct {
	net.Listener
	path string
	made fs.FileInfo
}

// listenUnix listens on a socket whose former owner is known to be gone.
func listenUnix(path string) (*socket, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false) // it may be another's by then
	made, err := os.Stat(path)
	if err != nil {
		l.Close()
		return nil, err
	}
	return &socket{l, path, made}, nil
}

// stands says why others do not find the socket, if so.
func (s *socket) stands() error {
	named, err := os.Stat(s.path)
	if err != nil {
		return err
	}
	if !os.SameFile(s.made, named) {
		return fmt.Errorf("%s is another's", s.path)
	}
	return nil
}

// Close ends the listening, and removes the socket while it is this one.
func (s *socket) Close() error {
	if s.stands() == nil {
		os.Remove(s.path)
	}
	return s.Listener.Close()
}

func stands(l *proc.Lock) error {
	if !l.Stands() {
		return errors.New("the reader's lock was removed")
	}
	return nil
}
