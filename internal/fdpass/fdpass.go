// Package fdpass sends open files over unix sockets with the bytes of a message, and
// takes them. The Sentry's control socket and a holder's both do that.
package fdpass

import (
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// Write writes b, and files with its first byte. They stay the caller's.
func Write(c *net.UnixConn, b []byte, files []*os.File) error {
	var oob []byte
	if len(files) > 0 {
		fds := make([]int, 0, len(files))
		for _, f := range files {
			raw, err := f.SyscallConn() // not Fd, which would make the file's reads and writes block
			if err != nil {
				return err
			}
			// The number stays valid: the caller keeps the file open during the call.
			if err := raw.Control(func(fd uintptr) { fds = append(fds, int(fd)) }); err != nil {
				return err
			}
		}
		oob = unix.UnixRights(fds...)
	}
	n, _, err := c.WriteMsgUnix(b, oob, nil)
	for err == nil && n < len(b) {
		var more int
		more, err = c.Write(b[n:])
		n += more
	}
	return err
}

// Read reads what is there into b, and at most so many files that come with it, which are
// the caller's to close, also beside an error. all is false when more files came.
// Errors: io.EOF.
func Read(c *net.UnixConn, b []byte, most int) (n int, files []*os.File, all bool, err error) {
	oob := make([]byte, unix.CmsgSpace(4*most))
	n, oobn, flags, _, err := c.ReadMsgUnix(b, oob)
	if err != nil {
		return 0, nil, false, err
	}
	files, err = taken(oob[:oobn])
	return n, files, flags&unix.MSG_CTRUNC == 0, err
}

// taken takes the descriptors of a control message.
func taken(oob []byte) (files []*os.File, err error) {
	if len(oob) == 0 {
		return nil, nil
	}
	msgs, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, err
	}
	for i := range msgs {
		fds, err := unix.ParseUnixRights(&msgs[i])
		if err != nil {
			return files, err
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			files = append(files, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return files, nil
}

// Close closes files.
func Close(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}
