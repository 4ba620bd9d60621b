package lab

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"
)

// Peer is a running server that quarry is compared with.
type Peer struct {
	Addr string
	cmd  *exec.Cmd
}

// startPeer starts a program of make setup on a free loopback port. configure says how
// it is told what to do: the text of its configuration file conf, with a folder of its
// own and where it listens.
func (l *Lab) startPeer(ctx context.Context, program string, configure func(dir, conf, addr string) (text string, args []string)) (*Peer, error) {
	path, err := exec.LookPath(program)
	if err != nil {
		return nil, fmt.Errorf("%w: make setup installs it", err)
	}
	dir, err := os.MkdirTemp(l.Dir, program)
	if err != nil {
		return nil, err
	}
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	conf := filepath.Join(dir, "conf")
	text, args := configure(dir, conf, addr)
	if err := os.WriteFile(conf, []byte(text), 0o600); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	p := &Peer{Addr: addr, cmd: exec.CommandContext(ctx, path, args...)}
	p.cmd.Stdout, p.cmd.Stderr = log, log
	p.cmd.Cancel = func() error { return p.cmd.Process.Signal(syscall.SIGTERM) }
	p.cmd.WaitDelay = 10 * time.Second
	if err := p.cmd.Start(); err != nil {
		return nil, err
	}
	for range 1200 { // a minute
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			return p, conn.Close()
		}
		time.Sleep(50 * time.Millisecond)
	}
	return nil, errors.Join(fmt.Errorf("%s does not listen on %s, see %s", program, addr, dir), p.Stop())
}

// Stop ends the server. Some take the signal and exit with 0, others die of it.
func (p *Peer) Stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	err := p.cmd.Wait()
	if st, ok := p.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && st.Signaled() && st.Signal() == syscall.SIGTERM {
		return nil
	}
	return err
}

// freeAddr returns a loopback address that nobody listens on.
func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}
