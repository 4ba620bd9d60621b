package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"quarry/api/client"
	"quarry/internal/proc"
	"quarry/signer"
	"quarry/worker"
	"quarry/worker/folder"
	"quarry/worker/timeline"
)

// target says which store a command speaks to: a data folder on this machine,
// or a store node by URL.
type target struct {
	data   string
	store  string
	trust  string
	create bool // make the data folder when it is missing

	tokenFile string // of --store
	patient   bool   // the file may have its token later
	token     string // of QUARRY_TOKEN, for the commands that leave no reader behind
	ca        string
}

// flags adds the flags every command that needs a store has.
func (t *target) flags(c *cobra.Command) {
	f := c.Flags()
	f.StringVar(&t.data, "data", "", "data folder on this machine (env QUARRY_DATA)")
	f.StringVar(&t.store, "store", "", "URL of a store node, or several with commas between, the preferred one first (env QUARRY_STORE)")
	f.StringVar(&t.trust, "trust", "", "public key, or folder of *.pub, for --store (env QUARRY_TRUST)")
	t.accessFlags(f)
}

// accessFlags are about a --store that asks who calls, or has a certificate of its
// own.
func (t *target) accessFlags(f *pflag.FlagSet) {
	f.StringVar(&t.tokenFile, "token-file", "", "file with the token for --store, read again when it changes (env QUARRY_TOKEN_FILE; QUARRY_TOKEN has a token itself)")
	f.StringVar(&t.ca, "ca", "", "certificates (PEM) that an https --store is held against, in place of the system's (env QUARRY_CA)")
}

// fromEnv fills in what no flag has said; a flag goes before the other one's
// variable.
func (t *target) fromEnv(getenv func(string) string) {
	if t.data == "" && t.store == "" {
		t.data, t.store = getenv("QUARRY_DATA"), getenv("QUARRY_STORE")
	}
	if t.trust == "" {
		t.trust = getenv("QUARRY_TRUST")
	}
	if t.tokenFile == "" {
		t.tokenFile = getenv("QUARRY_TOKEN_FILE")
	}
	if t.ca == "" {
		t.ca = getenv("QUARRY_CA")
	}
	if t.tokenFile == "" && t.token == "" {
		t.token = getenv("QUARRY_TOKEN")
	}
}

// resolve checks the flags and makes the data folder's path absolute.
func (t *target) resolve() error {
	t.fromEnv(os.Getenv)
	// What this command starts stays, and is to have no token in its environment.
	if err := os.Unsetenv("QUARRY_TOKEN"); err != nil {
		return err
	}
	if t.data != "" { // whose socket asks for none
		t.tokenFile, t.token, t.ca = "", "", ""
	}
	switch {
	case t.data != "" && t.store != "":
		return fmt.Errorf("%w: give --data or --store, not both", errUsage)
	case t.data == "" && t.store == "":
		return fmt.Errorf("%w: give --data DIR for a store on this machine, or --store URL", errUsage)
	case t.data == "":
		return t.absolute()
	}
	d, err := openDataDir(t.data)
	if err != nil {
		return err
	}
	t.data = string(d)
	if t.create {
		return nil
	}
	if ok, err := d.exists(); err != nil || ok {
		return err
	}
	return fmt.Errorf("data folder %s has no store; quarry convert or quarry serve makes one", d)
}

// absolute makes paths so that a reader with another working directory finds them.
func (t *target) absolute() error {
	for _, path := range []*string{&t.tokenFile, &t.ca} {
		if *path == "" {
			continue
		}
		abs, err := filepath.Abs(*path)
		if err != nil {
			return err
		}
		*path = abs
	}
	return nil
}

// stores returns the URLs of --store.
func (t *target) stores() []string {
	if t.store == "" {
		return nil
	}
	return strings.Split(t.store, ",")
}

// client connects to the preferred store.
func (t *target) client(ctx context.Context) (*client.Client, error) {
	if err := t.ready(ctx); err != nil {
		return nil, err
	}
	return t.dial()
}

// ready resolves the target. A data folder without a server gets one, before the
// first request, because that may be one that cannot be sent twice.
func (t *target) ready(ctx context.Context) error {
	if err := t.resolve(); err != nil || t.data == "" {
		return err
	}
	defer timeline.Begin(ctx, timeline.Store)()
	return ensureOwner(ctx, dataDir(t.data))
}

// dial returns a client of the preferred store, which connects at its first
// request.
func (t *target) dial() (*client.Client, error) {
	all, err := t.dialAll()
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

// dialAll returns a client of each store, the preferred one first.
func (t *target) dialAll() ([]*client.Client, error) {
	if t.data != "" {
		d := dataDir(t.data)
		c, err := client.New(client.Config{
			Socket: d.socket(),
			Dial:   func(ctx context.Context, _, _ string) (net.Conn, error) { return dialOwner(ctx, d) },
		})
		return []*client.Client{c}, err
	}
	shown, err := t.shown()
	if err != nil {
		return nil, err
	}
	ca, err := loadCA(t.ca)
	if err != nil {
		return nil, err
	}
	var all []*client.Client
	for _, url := range t.stores() {
		c, err := client.New(client.Config{URL: url, Token: shown, CA: ca})
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	return all, nil
}

// shown is the token for --store. A file that has none now is an error here; the
// reader, which was told of it before, waits for one.
func (t *target) shown() (*client.Token, error) {
	if t.tokenFile == "" {
		return client.FixedToken(t.token), nil
	}
	tok, err := client.FileToken(t.tokenFile)
	if t.patient {
		err = nil
	}
	return tok, err
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

// images returns the worker's way to verified images of these stores.
func (t *target) images(ctx context.Context, wk *worker.Worker) (*folder.Images, *client.Stores, error) {
	if err := t.ready(ctx); err != nil {
		return nil, nil, err
	}
	if t.store != "" && t.token != "" {
		return nil, nil, usageError("QUARRY_TOKEN is for commands that end: what reads an image goes on after this one, and nothing keeps a token for it: put it into a file and give --token-file FILE")
	}
	trust, err := t.trusted()
	if err != nil {
		return nil, nil, err
	}
	clients, err := t.dialAll()
	if err != nil {
		return nil, nil, err
	}
	stores := client.NewStores(client.StoresConfig{Clients: clients})
	return &folder.Images{
		Dir: wk.Dir, Source: stores, Origin: folder.Origin{Stores: t.stores(), Data: t.data, TokenFile: t.tokenFile, CA: t.ca}, Trust: trust, Log: wk.Log,
	}, stores, nil
}

// ownerStart bounds the start of a data folder's server: after a crash it reads
// the footers of packs that the index does not know yet.
const ownerStart = 2 * time.Minute

// ensureOwner makes sure that a server of the data folder answers.
func ensureOwner(ctx context.Context, d dataDir) error {
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(d.run(), 0o700); err != nil {
		return d.wrap(err)
	}
	ctx, cancel := context.WithTimeout(ctx, ownerStart)
	defer cancel()
	args := []string{self, "serve", "--data", string(d), "--background"}
	err = proc.Ensure(ctx, args, d.serveLog(), func(ctx context.Context) bool { return answers(ctx, d) })
	var ended *exec.ExitError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &ended):
		if err = fmt.Errorf("the server of %s: %w", d, err); ended.ExitCode() == exitDamage {
			err = fmt.Errorf("%w: %w", errDamage, err)
		}
		return err
	}
	return d.wrap(err)
}

// answers reports whether somebody listens on the data folder's socket.
func answers(ctx context.Context, d dataDir) bool {
	var nd net.Dialer
	conn, err := nd.DialContext(ctx, "unix", d.socket())
	if err != nil {
		return false
	}
	conn.Close()
	return true
}

// dialOwner connects to the server of a data folder and starts one when none
// answers: the one there was may have ended, idle, since the last request.
func dialOwner(ctx context.Context, d dataDir) (net.Conn, error) {
	var nd net.Dialer
	conn, err := nd.DialContext(ctx, "unix", d.socket())
	if err == nil || !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ECONNREFUSED) {
		return conn, err
	}
	if err := ensureOwner(ctx, d); err != nil {
		return nil, err
	}
	return nd.DialContext(ctx, "unix", d.socket())
}
