package holder

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"quarry/worker/sandbox"
)

// openPTY makes a pseudo terminal: the master, which does not block, and the end
// that the guest gets.
func openPTY(w sandbox.Window) (master, guest *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("open a terminal: %w", err)
	}
	master = os.NewFile(uintptr(fd), "terminal")
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("unlock a terminal: %w", err), master.Close())
	}
	peer, err := ptyPeer(fd)
	if err != nil {
		return nil, nil, errors.Join(fmt.Errorf("open the other end of a terminal: %w", err), master.Close())
	}
	guest = os.NewFile(uintptr(peer), "terminal")
	if err := resize(master, w); err != nil {
		return nil, nil, errors.Join(err, master.Close(), guest.Close())
	}
	return master, guest, nil
}

// ptyPeer opens the other end, whatever stands at /dev/pts here. It must not become
// this process's controlling terminal: what is typed would end the holder.
func ptyPeer(fd int) (int, error) {
	const flags = unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC
	peer, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.TIOCGPTPEER, flags)
	if errno != 0 {
		return -1, errno
	}
	return int(peer), nil
}

// maxWindow is what a terminal's size can be.
const maxWindow = 1<<16 - 1

// CheckWindow refuses a size that no terminal has. 0 is one that is not known.
func CheckWindow(w sandbox.Window) error {
	if w.Rows < 0 || w.Cols < 0 || w.Rows > maxWindow || w.Cols > maxWindow {
		return fmt.Errorf("%w: a window of %d rows and %d columns: want 0 to %d", sandbox.ErrInvalid, w.Rows, w.Cols, maxWindow)
	}
	return nil
}

func resize(master *os.File, w sandbox.Window) error {
	if err := CheckWindow(w); err != nil {
		return err
	}
	return control(master, func(fd int) error {
		return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(w.Rows), Col: uint16(w.Cols)})
	})
}

func control(f *os.File, fn func(fd int) error) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = fn(int(fd)) }); err != nil {
		return err
	}
	return failed
}

// typed returns the signals that a terminal in its present mode makes of what is
// typed. The host's terminal has nobody to send them to: the guest's processes are
// not the host's.
func typed(master *os.File, b []byte) (signals []int) {
	var t *unix.Termios
	err := control(master, func(fd int) (err error) {
		t, err = unix.IoctlGetTermios(fd, unix.TCGETS)
		return err
	})
	if err != nil || t.Lflag&unix.ISIG == 0 {
		return nil
	}
	for _, c := range b {
		switch {
		case c == 0: // turns a character off
		case c == t.Cc[unix.VINTR]:
			signals = append(signals, int(unix.SIGINT))
		case c == t.Cc[unix.VQUIT]:
			signals = append(signals, int(unix.SIGQUIT))
		case c == t.Cc[unix.VSUSP]:
			signals = append(signals, int(unix.SIGTSTP))
		}
	}
	return signals
}
