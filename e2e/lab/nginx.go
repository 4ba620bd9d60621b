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

// nginxConf has nginx serve a folder as well as it can: a worker a processor,
// sendfile, and connections that are kept.
const nginxConf = `daemon off;
user root;
worker_processes auto;
pid %[1]s/pid;
error_log %[1]s/error.log;
events { worker_connections 4096; }
http {
	access_log off;
	sendfile on;
	tcp_nopush on;
	keepalive_requests 1000000;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	server { listen %[2]s; root %[3]s; }
}
`

// Nginx is a running nginx.
type Nginx struct {
	Addr string
	cmd  *exec.Cmd
}

// Nginx starts nginx on a free loopback port with the files of a folder.
func (l *Lab) Nginx(ctx context.Context, root string) (*Nginx, error) {
	path, err := exec.LookPath("nginx")
	if err != nil {
		return nil, fmt.Errorf("%w: make setup installs it", err)
	}
	dir, err := os.MkdirTemp(l.Dir, "nginx")
	if err != nil {
		return nil, err
	}
	addr, err := freeAddr()
	if err != nil {
		return nil, err
	}
	conf := filepath.Join(dir, "nginx.conf")
	if err := os.WriteFile(conf, fmt.Appendf(nil, nginxConf, dir, addr, root), 0o600); err != nil {
		return nil, err
	}
	n := &Nginx{Addr: addr, cmd: exec.CommandContext(ctx, path, "-p", dir, "-c", conf, "-e", filepath.Join(dir, "error.log"))}
	n.cmd.Cancel = func() error { return n.cmd.Process.Signal(syscall.SIGTERM) }
	n.cmd.WaitDelay = 10 * time.Second
	if err := n.cmd.Start(); err != nil {
		return nil, err
	}
	for range 200 { // 10 s
		conn, err := net.Dial("tcp", addr)
		if err == nil {
			return n, conn.Close()
		}
		time.Sleep(50 * time.Millisecond)
	}
	return nil, errors.Join(fmt.Errorf("nginx does not listen on %s, see %s", addr, dir), n.Stop())
}

// Stop ends nginx.
func (n *Nginx) Stop() error {
	if err := n.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	return n.cmd.Wait()
}

// freeAddr returns a loopback address that nobody listens on.
func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}
