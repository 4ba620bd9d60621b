package lab

import (
	"context"
	"fmt"
	"path/filepath"
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

// Nginx starts nginx on a free loopback port with the files of a folder.
func (l *Lab) Nginx(ctx context.Context, root string) (*Peer, error) {
	return l.startPeer(ctx, "nginx", func(dir, conf, addr string) (string, []string) {
		return fmt.Sprintf(nginxConf, dir, addr, root), []string{"-p", dir, "-c", conf, "-e", filepath.Join(dir, "error.log")}
	})
}
