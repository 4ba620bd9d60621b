package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"quarry/signer"
)

func newKeygen() *cobra.Command {
	return &cobra.Command{
		Use:   "keygen FILE",
		Short: "make a signing key: FILE (private, mode 0600) and FILE.pub",
		Long: `keygen makes an Ed25519 key pair: FILE is the private key (PKCS#8 PEM, mode 0600) for
quarry serve --key, FILE.pub the public key (SPKI PEM) for --trust. It prints the key id.
Existing files are not replaced.`,
		Args: exactArgs(1),
		RunE: func(c *cobra.Command, args []string) error { return runKeygen(args[0], c.OutOrStdout()) },
	}
}

func runKeygen(path string, stdout io.Writer) error {
	key, err := signer.Generate()
	if err != nil {
		return err
	}
	if err := key.Save(path); err != nil {
		return err
	}
	if err := key.Public().Save(path + ".pub"); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	_, err = fmt.Fprintln(stdout, key.Public().ID())
	return err
}
