package main

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"quarry/api/sandboxes/client"
)

// nodeTarget says which worker a command speaks to.
type nodeTarget struct {
	dir       string // whose socket is used without --node
	url       string
	tokenFile string
	ca        string
}

func (t *nodeTarget) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&t.dir, "worker-dir", defaultWorkerDir(), "folder of the worker on this machine (env QUARRY_WORKER)")
	f.StringVar(&t.url, "node", os.Getenv("QUARRY_NODE"), "URL of a worker; default is the one of --worker-dir on this machine (env QUARRY_NODE)")
	f.StringVar(&t.tokenFile, "token-file", os.Getenv("QUARRY_TOKEN_FILE"), "file with the token for --node (env QUARRY_TOKEN_FILE; QUARRY_TOKEN has a token itself)")
	f.StringVar(&t.ca, "ca", os.Getenv("QUARRY_CA"), "certificates (PEM) that an https --node is held against, in place of the system's (env QUARRY_CA)")
}

// dial returns a client of the worker.
func (t *nodeTarget) dial() (*client.Client, error) {
	if t.url == "" {
		// What stands in the environment may be there for other calls.
		if t.tokenFile != os.Getenv("QUARRY_TOKEN_FILE") {
			return nil, fmt.Errorf("%w: --token-file is for --node, which is not given: the socket of a worker asks for no token", errUsage)
		}
		if t.ca != os.Getenv("QUARRY_CA") {
			return nil, fmt.Errorf("%w: --ca is for --node, which is not given", errUsage)
		}
		socket := workerSocket(t.dir)
		if _, err := os.Stat(socket); err != nil {
			return nil, fmt.Errorf("no worker serves %s: start one with quarry worker --worker-dir %s, or give --node URL", t.dir, t.dir)
		}
		return client.New(client.Config{URL: "unix:" + socket})
	}
	token := os.Getenv("QUARRY_TOKEN")
	if t.tokenFile != "" {
		raw, err := os.ReadFile(t.tokenFile)
		if err != nil {
			return nil, fmt.Errorf("--token-file: %w", err)
		}
		token = strings.TrimSpace(string(raw))
	}
	pool, err := loadCA(t.ca)
	if err != nil {
		return nil, err
	}
	cfg := client.Config{URL: t.url, Token: token}
	if pool != nil {
		transport := http.DefaultTransport.(*http.Transport).Clone()
		transport.TLSClientConfig = &tls.Config{RootCAs: pool}
		cfg.HTTP = &http.Client{Transport: transport}
	}
	return client.New(cfg)
}
