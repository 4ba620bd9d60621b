// Command quarry is a content-addressed store for task images and the thin
// worker that runs sandboxes from them. See README.md for the main job.
package main

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"quarry/api"
	"quarry/signer"
	"quarry/store"
	"quarry/store/catalog"
	"quarry/store/image"
	"quarry/worker"
)

// version is what `quarry version` prints; the build sets it.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// run is main without the process around it.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRoot()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	code := exitCode(err)
	if err != nil && !errors.As(err, new(exitStatus)) {
		fmt.Fprintf(stderr, "quarry: %s%s\n", printable(err.Error()), hint(err))
	}
	return code
}

// hint is the fix for an error of a library, which cannot name it.
func hint(err error) string {
	if errors.As(err, new(x509.UnknownAuthorityError)) {
		return ": give --ca FILE (QUARRY_CA) with the certificate of who signed the store's"
	}
	return ""
}

// Exit codes of all commands. run has more: see its help.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
	exitDamage  = 3

	exitRunOurs     = 125 // run: quarry itself failed, or --timeout fired
	exitRunNotExec  = 126
	exitRunNotFound = 127
)

var (
	// errDamage says that something stored is damaged or gone.
	errDamage = errors.New("damage found")
	// errUsage says that the command line is wrong.
	errUsage = errors.New("usage")
)

// exitStatus is the status of a sandbox's command, passed on silently.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// runError marks an error of the run command, whose exit codes leave the small
// numbers to the sandbox's command.
type runError struct{ error }

func (e runError) Unwrap() error { return e.error }

// exitCode is the one switch from error to exit code.
func exitCode(err error) int {
	var status exitStatus
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &status):
		return int(status)
	case errors.As(err, new(runError)):
		switch {
		case errors.Is(err, worker.ErrCommandNotFound):
			return exitRunNotFound
		case errors.Is(err, worker.ErrNotExecutable):
			return exitRunNotExec
		}
		return exitRunOurs
	case errors.Is(err, errUsage):
		return exitUsage
	case isDamage(err):
		return exitDamage
	}
	return exitFailure
}

// isDamage reports whether an error says that something stored, or sent by a
// store, is not what was signed, or is gone.
func isDamage(err error) bool {
	for _, damage := range []error{errDamage, api.ErrObjectCorrupt, api.ErrChunkCorrupt, catalog.ErrDamaged, signer.ErrAltered, image.ErrWrongSource, image.ErrWrongPlatform} {
		if errors.Is(err, damage) {
			return true
		}
	}
	return errors.As(err, new(*store.CorruptError))
}

// newRoot builds the table of commands.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "quarry",
		Short:         "lazily read images for sandboxes: convert, serve, mount, run",
		SilenceErrors: true,
		SilenceUsage:  true,
		Args:          cobra.ArbitraryArgs,
		RunE: func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return c.Help()
			}
			return noCommand(c, args)
		},
		Long: `quarry keeps task images in a content-addressed store and runs sandboxes from
them, reading only what a sandbox touches. Every byte is verified before it is used.

Exit codes: 0 ok, 1 failure, 2 usage, 3 damage found. run passes on its command's.`,
	}
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		if c.Name() == "run" {
			return runError{usage(c, err)}
		}
		return usage(c, err)
	})
	root.AddCommand(
		newServe(), newConvert(), newPush(), newImages(), newExport(), newTreeDigest(), newVerify(),
		newMount(), newUmount(), newRun(), newPull(), newExplain(), newKeygen(), newSign(), newToken(), newCheck(), newGC(), newIndex(),
		newWorker(), newPs(), newCreate(), newRm(), newExec(), newLogs(), newCp(), newStats(),
		newBench(), newDoctor(), newVersion(), newReader(), newKeeper(),
	)
	return root
}

func usage(c *cobra.Command, err error) error {
	return fmt.Errorf("%w: %w\nsee %s --help", errUsage, err, c.CommandPath())
}

// noCommand is what a command that only has others does when it is run.
func noCommand(c *cobra.Command, args []string) error {
	if len(args) == 0 {
		return usage(c, fmt.Errorf("%s needs one of its commands", c.CommandPath()))
	}
	return usage(c, fmt.Errorf("%s has no command %q", c.CommandPath(), args[0]))
}

// exactArgs is cobra.ExactArgs with our usage error.
func exactArgs(n int) cobra.PositionalArgs { return rangeArgs(n, n) }

func rangeArgs(low, high int) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) < low || len(args) > high {
			return usage(c, fmt.Errorf("%d arguments given, the command is: quarry %s", len(args), c.Use))
		}
		return nil
	}
}
