package reader

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"sync"

	"quarry/internal/proc"
)

// socket is a listener that knows whether others still find it by its path.
type socket struct {
	net.Listener
	path string
	made fs.FileInfo
	once sync.Once // for Close: whoever serves it closes it, and so does who made it
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
	return &socket{Listener: l, path: path, made: made}, nil
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

// Close ends the listening, and removes the socket while it is this one. Another call
// does nothing: the number of its inode may be a later socket's by then.
func (s *socket) Close() (err error) {
	s.once.Do(func() {
		if s.stands() == nil {
			os.Remove(s.path)
		}
		err = s.Listener.Close()
	})
	return err
}

func stands(l *proc.Lock) error {
	if !l.Stands() {
		return errors.New("the reader's lock was removed")
	}
	return nil
}
