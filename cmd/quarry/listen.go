package main

import (
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"quarry/api/access"
)

// doors are the flags of serve that say who gets in.
type doors struct {
	listen       string
	noAuth       bool
	tokens       string // file, "" = the data folder's
	cert, key    string
	insecureHTTP bool
	metricsOpen  bool
}

func (o *doors) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&o.listen, "listen", o.listen, "address of the HTTP API; port 0 takes a free one")
	f.BoolVar(&o.noAuth, "no-auth", false, "serve everyone who can reach the address; loopback only")
	f.StringVar(&o.tokens, "tokens", "", "tokens file to use instead of the folder's own; read again when it changes")
	f.StringVar(&o.cert, "tls-cert", "", "serve HTTPS with this certificate chain (PEM); read again when it changes")
	f.StringVar(&o.key, "tls-key", "", "private key of --tls-cert (PEM)")
	f.BoolVar(&o.insecureHTTP, "insecure-http", false, "take tokens over plain HTTP on other addresses than loopback, too: something before the server ends TLS")
	f.BoolVar(&o.metricsOpen, "metrics-open", false, "serve /metrics to whoever has no admin token, too")
}

// check finds mistakes before the data folder is opened: without tokens the address
// is on loopback, and tokens do not go over a network in the clear unless somebody
// says so.
func (o doors) check() error {
	host, port, err := net.SplitHostPort(o.listen)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return fmt.Errorf("%w: --listen %s: %w", errUsage, o.listen, err)
	}
	ip := net.ParseIP(host)
	loopback := host == "localhost" || ip != nil && ip.IsLoopback()
	switch {
	case (o.cert == "") != (o.key == ""):
		return usageError("--tls-cert and --tls-key go together")
	case o.noAuth && o.tokens != "":
		return usageError("--no-auth asks nobody for a token: leave it out, or --tokens")
	case o.noAuth && !loopback:
		return fmt.Errorf("%w: --no-auth listens on loopback only, not on %q: leave it out and make a token with quarry token create", errUsage, o.listen)
	case !o.noAuth && !loopback && o.cert == "" && !o.insecureHTTP:
		return fmt.Errorf("%w: --listen %s would take tokens over plain HTTP: give --tls-cert FILE --tls-key FILE, or --insecure-http when something before it ends TLS", errUsage, o.listen)
	}
	return nil
}

// loopbackHost reports whether a Host header is an address, or the name that every
// machine has for itself. A server that asks for no token takes nothing else: any name may
// be made to lead to 127.0.0.1, and a browser takes what comes of it for the site of that
// name. Clients that are no browsers may leave it out.
func loopbackHost(header string) bool {
	host := header
	if h, _, err := net.SplitHostPort(header); err == nil {
		host = h
	}
	host = strings.Trim(host, "[]")
	return host == "" || strings.EqualFold(host, "localhost") || net.ParseIP(host) != nil
}

// guard returns who looks at tokens, nil with --no-auth. There must be a token: who
// starts a server that lets nobody in has forgotten something.
func (o doors) guard(d dataDir, log *slog.Logger) (*access.Guard, error) {
	file, err := o.tokensFile(d.tokens(), "--data "+string(d), access.Admin)
	if err != nil || file == nil {
		return nil, err
	}
	if err := os.MkdirAll(d.keys(), 0o700); err != nil {
		return nil, d.wrap(err)
	}
	key, err := loadMACKey(d.bearerKey(), "bearer key", "clients log in anew")
	if err != nil {
		return nil, err
	}
	return access.New(access.Config{Tokens: file, Key: key, TLS: o.cert != "", Log: log}), nil
}

// tokensFile opens --tokens, or the file at path, which the flag in how makes one in;
// nil with --no-auth. scope is that of the token that whoever has none needs first.
func (o doors) tokensFile(path, how string, scope access.Scope) (*access.File, error) {
	if o.noAuth {
		return nil, nil
	}
	if o.tokens != "" {
		path, how = o.tokens, "--tokens "+o.tokens
	}
	file := access.Open(path, nil)
	err := file.Ready()
	if errors.Is(err, access.ErrNoTokens) {
		err = fmt.Errorf("%w: make one with: quarry token create %s --scope %s; or pass --no-auth to serve everyone on loopback", err, how, scope)
	}
	return file, err
}

// try opens and closes what open will open: a node that stands by for hours is to find
// out at once that it could not serve. The address may be that of the node it waits for.
func (o doors) try(log *slog.Logger) error {
	l, _, err := o.open(log)
	if errors.Is(err, syscall.EADDRINUSE) {
		log.Warn("the address is in use: it must be free when this node is to serve", "listen", o.listen)
		return nil
	}
	if err != nil {
		return err
	}
	return l.Close()
}

// open listens for TCP, with TLS when there is a certificate. It returns the URL.
func (o doors) open(log *slog.Logger) (net.Listener, string, error) {
	var cert *certificate
	if o.cert != "" {
		var err error
		if cert, err = loadCertificate(o.cert, o.key, log); err != nil {
			return nil, "", err
		}
	}
	l, err := net.Listen("tcp", o.listen)
	if err != nil || cert == nil {
		if err != nil {
			return nil, "", err
		}
		return l, "http://" + l.Addr().String(), nil
	}
	return tls.NewListener(l, cert.config()), "https://" + l.Addr().String(), nil
}
