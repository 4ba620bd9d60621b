package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"quarry/worker"
	"quarry/worker/sandbox"
	"quarry/worker/sentry"
)

// capabilityBits are the capabilities that docker gives, with CAP_SYS_ADMIN for
// helpers that mount.
var capabilityBits = map[string]int{
	"CAP_AUDIT_WRITE": unix.CAP_AUDIT_WRITE, "CAP_CHOWN": unix.CAP_CHOWN, "CAP_DAC_OVERRIDE": unix.CAP_DAC_OVERRIDE,
	"CAP_FOWNER": unix.CAP_FOWNER, "CAP_FSETID": unix.CAP_FSETID, "CAP_KILL": unix.CAP_KILL, "CAP_MKNOD": unix.CAP_MKNOD,
	"CAP_NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE, "CAP_NET_RAW": unix.CAP_NET_RAW, "CAP_SETFCAP": unix.CAP_SETFCAP,
	"CAP_SETGID": unix.CAP_SETGID, "CAP_SETPCAP": unix.CAP_SETPCAP, "CAP_SETUID": unix.CAP_SETUID, "CAP_SYS_CHROOT": unix.CAP_SYS_CHROOT,
	"CAP_SYS_ADMIN": unix.CAP_SYS_ADMIN,
}

func bitsOf(names []string) (out uint64) {
	for _, n := range names {
		if bit, ok := capabilityBits[n]; ok {
			out |= 1 << bit
		}
	}
	return out
}

func bits(c *specs.LinuxCapabilities) sentry.Capabilities {
	if c == nil {
		return sentry.Capabilities{}
	}
	return sentry.Capabilities{
		Permitted: bitsOf(c.Permitted), Inheritable: bitsOf(c.Inheritable), Effective: bitsOf(c.Effective),
		Bounding: bitsOf(c.Bounding), Ambient: bitsOf(c.Ambient),
	}
}

// capabilitiesOf are those of a user's processes.
func capabilitiesOf(uid uint32) *specs.LinuxCapabilities { return worker.Capabilities(uid) }

const (
	// accountsPatience bounds a read of the guest's own accounts, which may be a fifo.
	accountsPatience = 2 * time.Second
	maxAccounts      = 4 << 20
)

// account looks a user up in the image, and then among those that the guest has made
// since.
func (b *box) account(ctx context.Context, user string) (worker.Account, error) {
	a, err := b.mount.Account(ctx, user)
	if err == nil || !errors.Is(err, worker.ErrNoUser) {
		if err != nil {
			err = specError(err)
		}
		return a, err
	}
	passwd, perr := b.cat(ctx, "/etc/passwd")
	group, gerr := b.cat(ctx, "/etc/group")
	if perr != nil || gerr != nil {
		return a, fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)
	}
	if a, err = worker.AccountIn(passwd, group, user); err != nil {
		return a, fmt.Errorf("%w: %w", sandbox.ErrInvalid, err)
	}
	return a, nil
}

// cat reads a small file of the guest without a task of it.
func (b *box) cat(ctx context.Context, path string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, accountsPatience)
	defer cancel()
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	done := make(chan error, 1)
	go func() { // ends with ctx
		err := b.h.Cat(ctx, path, w)
		w.Close()
		done <- err
	}()
	stop := context.AfterFunc(ctx, func() { r.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	raw, err := io.ReadAll(io.LimitReader(r, maxAccounts+1))
	if err == nil && len(raw) > maxAccounts {
		cancel() // it may go on for ever
		err = sandbox.ErrTooLarge
	}
	return raw, errors.Join(err, <-done)
}
