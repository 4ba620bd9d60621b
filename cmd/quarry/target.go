package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"quarry/api/client"
	"quarry/signer"
	"quarry/worker"
)

// target says which store a command speaks to: a data folder on this machine,
// or a store node by URL.
type target struct {
	data   string
	store  string
	trust  string
	create bool // make the data folder when it is missing

	cmd *cobra.Command // whose flags these are; nil for none
}

// flags adds the flags every command that needs a store has.
func (t *target) flags(c *cobra.Command) {
	t.cmd = c
	f := c.Flags()
	f.StringVar(&t.data, "data", os.Getenv("QUARRY_DATA"), "data folder on this machine (env QUARRY_DATA)")
	f.StringVar(&t.store, "store", os.Getenv("QUARRY_STORE"), "URL of a store node (env QUARRY_STORE)")
	f.StringVar(&t.trust, "trust", os.Getenv("QUARRY_TRUST"), "public key, or folder of *.pub, for --store (env QUARRY_TRUST)")
}

// resolve checks the flags and makes the data folder's path absolute, because
// processes started later have another working directory.
func (t *target) resolve() error {
	// A flag goes before the other one's environment variable.
	if t.cmd != nil && t.data != "" && t.store != "" {
		switch data, store := t.cmd.Flags().Changed("data"), t.cmd.Flags().Changed("store"); {
		case store && !data:
			t.data = ""
		case data && !store:
			t.store = ""
		}
	}
	switch {
	case t.data != "" && t.store != "":
		return fmt.Errorf("%w: give --data or --store, not both", errUsage)
	case t.data == "" && t.store == "":
		return fmt.Errorf("%w: give --data DIR for a store on this machine, or --store URL", errUsage)
	case t.data == "":
		return nil
	}
	abs, err := filepath.Abs(t.data)
	if err != nil {
		return err
	}
	t.data = abs
	const maxData = 80 // with run/quarry.sock it must fit a socket address
	if len(abs) > maxData {
		return fmt.Errorf("data folder %s: the path has %d bytes, at most %d fit a socket address", abs, len(abs), maxData)
	}
	if !t.create && !dataDir(abs).exists() {
		return fmt.Errorf("data folder %s has no store; quarry convert or quarry serve makes one", abs)
	}
	return nil
}

// client connects to the store; a data folder without a server gets one.
func (t *target) client() (*client.Client, error) {
	if err := t.resolve(); err != nil {
		return nil, err
	}
	if t.data == "" {
		return client.New(client.Config{URL: t.store})
	}
	d := dataDir(t.data)
	return client.New(client.Config{
		Socket: d.socket(),
		Dial:   func(ctx context.Context, _, _ string) (net.Conn, error) { return dialOwner(ctx, d) },
	})
}

// trusted loads the public keys images must be signed with.
func (t *target) trusted() (signer.Trust, error) {
	switch {
	case t.trust != "":
		return signer.LoadTrust(t.trust)
	case t.data != "":
		return signer.LoadTrust(dataDir(t.data).keys())
	}
	return signer.Trust{}, fmt.Errorf("%w: --store needs --trust FILE|DIR: the public key its images are signed with", errUsage)
}

// images returns the worker's way to verified images of this store.
func (t *target) images(d worker.Dir, log *slog.Logger) (*worker.Images, *client.Client, error) {
	c, err := t.client()
	if err != nil {
		return nil, nil, err
	}
	trust, err := t.trusted()
	if err != nil {
		return nil, nil, err
	}
	return &worker.Images{
		Dir: d, Source: c, Origin: worker.Origin{Store: t.store, Data: t.data}, Trust: trust, Log: log,
	}, c, nil
}

// ownerStart bounds the start of a data folder's server: after a crash it reads
// the footers of packs that the index does not know yet.
const ownerStart = 2 * time.Minute

// dialOwner connects to the server of a data folder and starts one when none
// answers.
func dialOwner(ctx context.Context, d dataDir) (net.Conn, error) {
	var nd net.Dialer
	conn, err := nd.DialContext(ctx, "unix", d.socket())
	if err == nil || !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) {
		return conn, err
	}
	ctx, cancel := context.WithTimeout(ctx, ownerStart)
	defer cancel()
	ended, err := startOwner(d)
	if err != nil {
		return nil, fmt.Errorf("start a server for %s: %w", d, err)
	}
	for {
		conn, err := nd.DialContext(ctx, "unix", d.socket())
		if err == nil {
			return conn, nil
		}
		select {
		case err := <-ended:
			if err != nil {
				return nil, fmt.Errorf("the server for %s ended (%w): %s", d, err, lastLine(d.serveLog()))
			}
			// Another process has the folder and is about to listen.
			if ended, err = startLater(ctx, d); err != nil {
				return nil, err
			}
		case <-ctx.Done():
			return nil, fmt.Errorf("the server for %s does not answer: %w; see %s", d, ctx.Err(), d.serveLog())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// startLater starts a server again after a moment: the owner that was there may
// be on its way out.
func startLater(ctx context.Context, d dataDir) (<-chan error, error) {
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(50 * time.Millisecond):
	}
	return startOwner(d)
}

// startOwner starts a background server and returns where its end is told.
func startOwner(d dataDir) (<-chan error, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(d.run(), 0o700); err != nil {
		return nil, err
	}
	logFile, err := os.OpenFile(d.serveLog(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err
	}
	defer logFile.Close()
	cmd := exec.Command(self, "serve", "--data", string(d), "--background")
	cmd.Stdout, cmd.Stderr, cmd.Dir = logFile, logFile, "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }() // ends with the server, or with this process
	return ended, nil
}

// lastLine returns the end of a log for an error message.
func lastLine(path string) string {
	raw, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(raw)), "\n")
	return lines[len(lines)-1]
}
