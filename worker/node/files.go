package node

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"

	"quarry/worker/guest"
	"quarry/worker/holder"
	"quarry/worker/sandbox"
	"quarry/worker/sentry"
)

// runner runs the helper of file calls in a guest.
type runner struct {
	b       *box
	program string
}

// Run implements guest.Runner.
func (r runner) Run(ctx context.Context, argv []string, stdin, stdout, stderr *os.File) (int, error) {
	return r.run(ctx, bits(capabilitiesOf(0)), argv, stdin, stdout, stderr)
}

// RunAdmin is Run with the right to mount.
func (r runner) RunAdmin(ctx context.Context, argv []string, stdin, stdout, stderr *os.File) (int, error) {
	c := capabilitiesOf(0)
	more := bitsOf([]string{"CAP_SYS_ADMIN"})
	caps := bits(c)
	return r.run(ctx, sentry.Capabilities{
		Permitted: caps.Permitted | more, Effective: caps.Effective | more, Bounding: caps.Bounding | more,
	}, argv, stdin, stdout, stderr)
}

func (r runner) run(ctx context.Context, caps sentry.Capabilities, argv []string, stdin, stdout, stderr *os.File) (int, error) {
	f, err := os.Open(r.program)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	st, err := r.b.h.RunHelper(ctx, holder.Helper{
		Process: holder.Process{Argv: argv, WorkDir: "/", Capabilities: caps},
		Program: f, Stdin: stdin, Stdout: stdout, Stderr: stderr,
	})
	return st.Code, err
}

// Cat implements guest.Runner.
func (r runner) Cat(ctx context.Context, path string, out *os.File) error {
	return r.b.h.Cat(ctx, path, out)
}

// Mount implements guest.Mounter.
func (r runner) Mount(ctx context.Context, image *os.File, target string) error {
	return r.b.h.Mount(ctx, image, target)
}

// newFiles returns the files of a sandbox that runs.
func (b *box) newFiles() *guest.Files {
	r := runner{b, b.n.c.Guest}
	return guest.New(guest.Config{Runner: r, Mounter: r, WorkDir: b.base.Cwd, Spool: b.dir, Log: b.n.log})
}

// withFiles calls fn with a sandbox's files. It counts as use.
func (n *Node) withFiles(ctx context.Context, id string, fn func(b *box, f *guest.Files) error) error {
	b, err := n.running(ctx, id)
	if err != nil {
		return err
	}
	if n.c.Guest == "" {
		return fmt.Errorf("%w: file calls and shares need quarry-guest: install it beside quarry-shim, and start the worker anew", sandbox.ErrUnsupported)
	}
	defer b.use()()
	b.mu.Lock()
	if b.files == nil {
		b.files = b.newFiles()
	}
	f := b.files
	b.mu.Unlock()
	return b.explain(ctx, n.whoseDisk(fn(b, f)))
}

// awake refuses what needs the guest's tasks while they stand.
func (b *box) awake() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.nap.now {
		return fmt.Errorf("%w: it is hibernated: wake it first", sandbox.ErrNotReady)
	}
	if b.paused.now {
		return fmt.Errorf("%w: it is paused: resume it first", sandbox.ErrNotReady)
	}
	return nil
}

// rise has a sandbox run that waits for its model or is idle, until release is called,
// and refuses one that somebody has paused. how is rouse, or glance.
func (b *box) rise(ctx context.Context, how func(*box, context.Context) (func(), error)) (release func(), err error) {
	if release, err = how(b, ctx); err != nil {
		return nil, err
	}
	if err := b.awake(); err != nil {
		release()
		return nil, err
	}
	return release, nil
}

// ReadFile implements sandbox.Node.
func (n *Node) ReadFile(ctx context.Context, id, path string, o sandbox.ReadOptions, begin func(sandbox.FileInfo) error, w io.Writer) error {
	return n.withFiles(ctx, id, func(b *box, f *guest.Files) error {
		done, err := b.idles().look(false)
		if err != nil {
			return err
		}
		defer done()
		if b.awake() == nil {
			err = f.Read(ctx, path, o, begin, w)
			if !errors.Is(err, holder.ErrPaused) { // nothing was read then: the pause came first
				return err
			}
		}
		err = f.ReadPaused(ctx, path, o, begin, w)
		asleep := errors.Is(err, holder.ErrHibernated)
		if !errors.Is(err, guest.ErrUnclear) && !asleep {
			return err
		}
		release, rerr := b.rise(ctx, (*box).glance) // one that waits for its model may be asked, what a caller has paused not
		switch {
		case rerr != nil && asleep:
			return rerr
		case errors.Is(rerr, sandbox.ErrNotReady) && errors.Is(err, guest.ErrEmpty):
			return f.Empty(path, begin) // it stays paused, and an empty file must not need it to run
		case rerr != nil:
			return err
		}
		defer release()
		return f.Read(ctx, path, o, begin, w)
	})
}

// WriteFile implements sandbox.Node.
func (n *Node) WriteFile(ctx context.Context, id, path string, o sandbox.WriteOptions, r io.Reader) (info sandbox.FileInfo, err error) {
	err = n.withFiles(ctx, id, func(b *box, f *guest.Files) error {
		release, err := b.rise(ctx, (*box).stir)
		if err != nil {
			return err
		}
		defer release()
		owner := guest.Owner{UID: b.base.User.UID, GID: b.base.User.GID}
		if o.User != "" {
			a, err := b.account(ctx, o.User)
			if err != nil {
				return err
			}
			owner = guest.Owner{UID: a.UID, GID: a.GID}
		}
		info, err = f.Write(ctx, path, o, owner, r)
		return err
	})
	return info, err
}

// StatFile implements sandbox.Node.
func (n *Node) StatFile(ctx context.Context, id, path string) (info sandbox.FileInfo, err error) {
	err = n.awakeFiles(ctx, id, (*box).glance, func(f *guest.Files) error {
		info, err = f.Stat(ctx, path)
		return err
	})
	return info, err
}

// ListFiles implements sandbox.Node.
func (n *Node) ListFiles(ctx context.Context, id, path string, depth int) (list []sandbox.FileInfo, err error) {
	err = n.awakeFiles(ctx, id, (*box).glance, func(f *guest.Files) error {
		list, err = f.List(ctx, path, depth)
		return err
	})
	return list, err
}

// RemoveFile implements sandbox.Node.
func (n *Node) RemoveFile(ctx context.Context, id, path string) error {
	return n.awakeFiles(ctx, id, (*box).stir, func(f *guest.Files) error { return f.Remove(ctx, path) })
}

// TarDown implements sandbox.Node.
func (n *Node) TarDown(ctx context.Context, id string, o sandbox.TarOptions, w io.Writer) error {
	return n.awakeFiles(ctx, id, (*box).glance, func(f *guest.Files) error { return f.TarDown(ctx, o, w) })
}

// TarUp implements sandbox.Node.
func (n *Node) TarUp(ctx context.Context, id, path string, r io.Reader) error {
	return n.withFiles(ctx, id, func(b *box, f *guest.Files) error {
		release, err := b.rise(ctx, (*box).stir)
		if err != nil {
			return err
		}
		defer release()
		return f.TarUp(ctx, path, guest.Owner{UID: b.base.User.UID, GID: b.base.User.GID}, r)
	})
}

// awakeFiles is withFiles of a sandbox that is not paused.
func (n *Node) awakeFiles(ctx context.Context, id string, how func(*box, context.Context) (func(), error), fn func(*guest.Files) error) error {
	return n.withFiles(ctx, id, func(b *box, f *guest.Files) error {
		release, err := b.rise(ctx, how)
		if err != nil {
			return err
		}
		defer release()
		return fn(f)
	})
}

// Give implements sandbox.Node.
func (n *Node) Give(ctx context.Context, id string, s sandbox.Share) error {
	if err := n.checkShare(s); err != nil {
		return err
	}
	return n.withFiles(ctx, id, func(b *box, f *guest.Files) error {
		release, err := b.rise(ctx, (*box).rouse)
		if err != nil {
			return err
		}
		defer release()
		if !b.reserve(s.Target) {
			return fmt.Errorf("%w: another share is on its way to %s", sandbox.ErrFileExists, s.Target)
		}
		defer b.unreserve(s.Target)
		return n.give(ctx, f, s)
	})
}

// reserve notes that a share is on its way to a target, where none other is: what is
// there already the guest's list of mounts says.
func (b *box) reserve(target string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	target = path.Clean(target)
	if b.giving[target] {
		return false
	}
	if b.giving == nil {
		b.giving = map[string]bool{}
	}
	b.giving[target] = true
	return true
}

func (b *box) unreserve(target string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.giving, path.Clean(target))
}

// give copies what a share names to a guest that runs.
func (n *Node) give(ctx context.Context, f *guest.Files, s sandbox.Share) error {
	from, _, err := n.openShare(s.Name)
	if err != nil {
		return err
	}
	defer from.Close()
	return f.Give(ctx, pathOf(from), s.Target)
}

// Take implements sandbox.Node.
func (n *Node) Take(ctx context.Context, id, target string) error {
	return n.withFiles(ctx, id, func(b *box, f *guest.Files) error {
		release, err := b.rise(ctx, (*box).rouse)
		if err != nil {
			return err
		}
		defer release()
		return f.Take(ctx, target)
	})
}
