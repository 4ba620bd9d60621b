package worker

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	specs "github.com/opencontainers/runtime-spec/specs-go"

	"quarry/internal/proc"
	"quarry/nbd/attach"
	"quarry/worker/folder"
)

// What a node needs for sandboxes that outlive it: a reference to the mount that
// another process holds on, and the spec of one without a command of its image.

// givenInit is what a sandbox's first process is called that is none of the image's.
const givenInit = "init"

// AcquireForSandbox is Acquire for a mount that becomes a sandbox's root, of an image
// that this machine can run. With noTrace, the store is not told what is touched.
func (w *Worker) AcquireForSandbox(ctx context.Context, im *folder.Image, noTrace bool) (*Mount, error) {
	if err := runsHere(im); err != nil {
		return nil, err
	}
	if noTrace && !w.NoTrace {
		quiet := *w
		quiet.NoTrace = true
		w = &quiet
	}
	return w.acquireForSandbox(ctx, im)
}

// Lock is the file whose lock is the reference. A process that inherits it keeps the
// image mounted after this one has ended.
func (mt *Mount) Lock() *os.File { return mt.ref.File() }

// Ref names the reference for Inherited.
func (mt *Mount) Ref() string { return mt.path }

// Inherited is a reference that a process which has ended took, and another held on
// to, for its Release. ref is a Mount's Ref.
func (w *Worker) Inherited(ref string) (*Mount, error) {
	refs := filepath.Dir(ref)
	dir := filepath.Dir(refs)
	if filepath.Base(refs) != "refs" || filepath.Dir(dir) != w.Dir.Mounts() || filepath.Base(ref) == "refs" {
		return nil, fmt.Errorf("%s is no reference to an image's mount", ref)
	}
	return &Mount{w: w, dir: dir, path: ref}, nil
}

// Leave is Release for who does not wait for others: a mount that seems to be used by
// a process which is about to end stays, for SweepMounts.
func (mt *Mount) Leave(ctx context.Context) error {
	l, err := proc.TakeLock(ctx, mt.dir+".lock")
	if err != nil {
		return err
	}
	defer l.Unlock()
	if err := mt.drop(); err != nil {
		return err
	}
	return mt.w.stopIfUnused(ctx, mt.dir, false)
}

// SweepMounts unmounts the images that nobody uses.
func (w *Worker) SweepMounts(ctx context.Context) error { return w.sweepMounts(ctx) }

// Served is who answers the reads of a mount, and what it has counted since it began.
type Served struct {
	PID         int    `json:"pid"`
	Start       uint64 `json:"start"` // in clock ticks since boot
	FailedReads uint64 `json:"failed_reads"`
}

// Served tells who serves the mount now. A mount whose server has ended is an error:
// its reads get EIO, and nobody counts them.
func (mt *Mount) Served() (Served, error) {
	st, err := attach.ReadState(mt.dir)
	if err != nil {
		return Served{}, err
	}
	counts, err := attach.ReadCounts(mt.dir)
	if err != nil {
		return Served{}, err
	}
	if !st.Alive() {
		return Served{}, fmt.Errorf("%w: shim %d", ErrUnserved, st.PID)
	}
	return Served{PID: st.PID, Start: st.Start, FailedReads: counts.FailedReads}, nil
}

// ErrUnserved says that nobody answers the reads of a mount any more: all of them fail.
var ErrUnserved = errors.New("the process that served the image has ended")

// FailedSince counts the reads that have failed since then. Errors: ErrUnserved, also
// when the image was mounted anew: who has the mount of then reads nothing more.
func (mt *Mount) FailedSince(since Served) (int64, error) {
	if start, err := attach.ProcessStart(since.PID); err == nil && start == since.Start {
		counts, err := attach.ReadCounts(mt.dir)
		if err != nil {
			return 0, err
		}
		return int64(counts.FailedReads - since.FailedReads), nil
	}
	now, err := mt.Served() // which knows of other PID namespaces
	switch {
	case errors.Is(err, fs.ErrNotExist): // the mount was swept
		return 0, fmt.Errorf("%w: %w", ErrUnserved, err)
	case err != nil:
		return 0, err
	case now.PID != since.PID || now.Start != since.Start:
		return 0, fmt.Errorf("%w: shim %d", ErrUnserved, since.PID)
	}
	return int64(now.FailedReads - since.FailedReads), nil
}

// SandboxSpec makes the OCI runtime spec of a sandbox whose root is the mount. Only
// Entrypoint, Env, WorkDir and User of c are looked at; without an entrypoint the
// first process is none of the image's, and comes by a descriptor.
func (w *Worker) SandboxSpec(ctx context.Context, im *folder.Image, mt *Mount, c Command) (*specs.Spec, error) {
	c = Command{Entrypoint: c.Entrypoint, Env: c.Env, WorkDir: c.WorkDir, User: c.User, given: len(c.Entrypoint) == 0}
	return specOf(ctx, im, mt.Root(), c)
}

// Account is a user as a passwd and a group file describe it.
type Account struct {
	UID, GID uint32
	Groups   []uint32
	Home     string
}

// Account looks up user[:group], names or numbers, in the image. Errors: ErrNoUser.
func (mt *Mount) Account(ctx context.Context, user string) (Account, error) {
	return leaveBehind(ctx, func() (Account, error) {
		r, err := openRoot(mt.Root())
		if err != nil {
			return Account{}, err
		}
		defer r.close()
		return account(r.lookupUser(user))
	})
}

// AccountIn is Account in the content of a passwd and a group file.
func AccountIn(passwd, group []byte, user string) (Account, error) {
	p, err := parseAccounts(bytes.NewReader(passwd), "/etc/passwd")
	if err != nil {
		return Account{}, err
	}
	g, err := parseAccounts(bytes.NewReader(group), "/etc/group")
	if err != nil {
		return Account{}, err
	}
	return account(lookupIn(user, p, g))
}

func account(id identity, err error) (Account, error) {
	return Account{UID: id.uid, GID: id.gid, Groups: id.groups, Home: id.home}, err
}

// leaveBehind runs what reads a mount, which cannot be interrupted, only left behind.
func leaveBehind[T any](ctx context.Context, read func() (T, error)) (T, error) {
	type made struct {
		v   T
		err error
	}
	done := make(chan made, 1)
	go func() { // ends with its reads, which the reader and the shim bound
		v, err := read()
		done <- made{v, err}
	}()
	select {
	case m := <-done:
		return m.v, m.err
	case <-ctx.Done():
		var none T
		return none, context.Cause(ctx)
	}
}

// Capabilities are those of a user's processes: docker's default set.
func Capabilities(uid uint32) *specs.LinuxCapabilities {
	caps := defaultCapabilities()
	if uid != 0 {
		return &specs.LinuxCapabilities{Bounding: caps}
	}
	return &specs.LinuxCapabilities{Bounding: caps, Permitted: caps, Effective: caps}
}
