package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	"quarry/worker/folder"
)

// certificateLook bounds how often the files of the certificate are looked at.
const certificateLook = time.Second

// certificate is the key pair of the server, which is read again when its files
// change: those who renew it need not restart anything. Safe for concurrent use.
type certificate struct {
	cert, key string
	log       *slog.Logger

	mu     sync.Mutex // guards what follows
	looked time.Time
	infos  [2]fs.FileInfo
	pair   *tls.Certificate
}

func loadCertificate(cert, key string, log *slog.Logger) (*certificate, error) {
	c := &certificate{cert: cert, key: key, log: log}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert %s, --tls-key %s: %w", cert, key, err)
	}
	c.pair, c.infos = &pair, c.stat()
	return c, nil
}

// stat returns what the files are, nil for one that is not there.
func (c *certificate) stat() (infos [2]fs.FileInfo) {
	for i, path := range []string{c.cert, c.key} {
		if info, err := os.Stat(path); err == nil {
			infos[i] = info
		}
	}
	return infos
}

// config is the server's: HTTP/1.1 alone, so that each connection carries one request
// at a time, as the limits of the server count them.
func (c *certificate) config() *tls.Config {
	return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}, GetCertificate: c.get}
}

// get returns the pair for a handshake. While the files are no pair, such as between
// the change of the one and of the other, the pair from before stays.
func (c *certificate) get(*tls.ClientHelloInfo) (*tls.Certificate, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if now.Sub(c.looked) < certificateLook {
		return c.pair, nil
	}
	c.looked = now
	infos := c.stat()
	if unchanged(infos[0], c.infos[0]) && unchanged(infos[1], c.infos[1]) {
		return c.pair, nil
	}
	c.infos = infos
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		c.log.Error("new certificate cannot be used, the one from before stays", "cert", c.cert, "key", c.key, "err", err)
		return c.pair, nil
	}
	c.log.Info("certificate read again", "cert", c.cert, "expires", pair.Leaf.NotAfter)
	c.pair = &pair
	return c.pair, nil
}

func unchanged(a, b fs.FileInfo) bool {
	if a == nil || b == nil {
		return a == nil && b == nil
	}
	return os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// maxCA bounds a file of certificate authorities; a system's whole list has some
// 250 KiB.
const maxCA = 4 << 20

// loadCA reads the certificates of --ca; nil for none, which means the system's.
func loadCA(path string) (*x509.CertPool, error) {
	if path == "" {
		return nil, nil
	}
	raw, err := folder.ReadBounded(path, maxCA)
	if err != nil {
		return nil, fmt.Errorf("--ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(raw) {
		return nil, fmt.Errorf("--ca %s: %w", path, errors.New("no PEM certificate in it"))
	}
	return pool, nil
}
