package main

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"time"

	"quarry/converter/oci"
)

// commitTime bounds the wait for an answer to a request that was sent whole: the
// store makes a layer durable meanwhile, of which 100 MB take a second or more.
const commitTime = 10 * time.Minute

// storeRegistry is how a store is spoken to as a registry.
type storeRegistry struct {
	where       string // for people
	host        string
	plain       bool // http, not https
	transport   *http.Transport
	credentials oci.Credentials
}

// registry returns the registry of the preferred store, for one repository.
func (t *target) registry(ctx context.Context, repo string) (*storeRegistry, error) {
	r := &storeRegistry{where: t.data, transport: &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
		TLSHandshakeTimeout: 10 * time.Second, ResponseHeaderTimeout: commitTime, IdleConnTimeout: time.Minute,
	}}
	if t.data != "" {
		// The host is never looked up: every connection goes to the folder's socket.
		r.host, r.plain = "localhost:80", true
		r.transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) { return dialOwner(ctx, dataDir(t.data)) }
		return r, nil
	}
	r.where = t.stores()[0]
	u, err := url.Parse(r.where)
	if err != nil {
		return nil, fmt.Errorf("%w: --store: %w", errUsage, err)
	}
	r.host, r.plain = u.Host, u.Scheme == "http"
	if r.credentials, err = t.registryCredentials(ctx, "registry://"+u.Host+"/"+repo); err != nil {
		return nil, err
	}
	roots, err := loadCA(t.ca)
	if err != nil {
		return nil, err
	}
	r.transport.TLSClientConfig = &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
	return r, nil
}

// registryCredentials are what the store is shown: the token as a password, which goes
// with any user name.
func (t *target) registryCredentials(ctx context.Context, registry string) (oci.Credentials, error) {
	shown, err := t.shown()
	if err != nil {
		return oci.Credentials{}, err
	}
	token, err := shown.Text()
	if err == nil && token == "" {
		return oci.UserCredentials(ctx, registry)
	}
	if err != nil {
		return oci.Credentials{}, err
	}
	return oci.Credentials{Username: "token", Password: oci.Secret(token)}, nil
}
