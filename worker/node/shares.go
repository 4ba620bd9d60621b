package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"quarry/nbd/attach"
	"quarry/worker/guest"
	"quarry/worker/sandbox"
)

// A share is bound from a descriptor that was opened below the operator's folder, so
// that nobody who writes there can have another file given by putting a link in its
// place.

// openShare opens what a share names. No link leads out of the operator's folder, and
// other mounts in it are its own business.
func (n *Node) openShare(name string) (*os.File, os.FileMode, error) {
	share, rest, _ := strings.Cut(name, "/")
	folder, ok := n.c.Shares[share]
	if !ok {
		return nil, 0, fmt.Errorf("share %q: %w: start the worker with --share %s=FOLDER, or name one that it has", name, sandbox.ErrShare, share)
	}
	root, err := unix.Open(folder, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, 0, fmt.Errorf("folder of share %q: %w", share, err)
	}
	defer unix.Close(root)
	if slices.Contains(strings.Split(rest, "/"), "..") {
		return nil, 0, fmt.Errorf("share %q: %w: a name has no .. in it", name, sandbox.ErrShare)
	}
	if rest == "" {
		rest = "."
	}
	fd, err := unix.Openat2(root, rest, &unix.OpenHow{
		Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_MAGICLINKS,
	})
	if errors.Is(err, unix.EXDEV) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ELOOP) {
		// Which it is, what leads out or what is not there, is not the caller's to know.
		return nil, 0, fmt.Errorf("share %q: %w: it has no such file or folder, or it is a link that leads out of the share", name, sandbox.ErrShare)
	}
	if err != nil {
		return nil, 0, fmt.Errorf("share %q: %w: %w", name, sandbox.ErrShare, err)
	}
	f := os.NewFile(uintptr(fd), name)
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() && !st.IsDir() {
		err = fmt.Errorf("share %q: %w: neither a file nor a folder", name, sandbox.ErrShare)
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, st.Mode(), nil
}

// bindShare binds a share read-only below a sandbox's own folder.
func (n *Node) bindShare(s sandbox.Share, to string) error {
	f, mode, err := n.openShare(s.Name)
	if err != nil {
		return err
	}
	defer f.Close()
	if mode.IsDir() {
		err = os.Mkdir(to, 0o700)
	} else {
		err = os.WriteFile(to, nil, 0o600)
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(pathOf(f), to, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("bind share %q: %w", s.Name, err)
	}
	flags := uintptr(unix.MS_BIND | unix.MS_REMOUNT | unix.MS_RDONLY | unix.MS_NOSUID | unix.MS_NODEV)
	if err := errors.Join(unix.Mount("", to, "", unix.MS_PRIVATE, ""), unix.Mount("", to, "", flags, "")); err != nil {
		return fmt.Errorf("make share %q read-only: %w", s.Name, err)
	}
	return nil
}

// pathOf is a path of a file that is open, whatever has its name now.
func pathOf(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// gift is a file or folder of the host that a guest is given once it runs, because the
// image has no place for it.
type gift struct {
	text   string // content of a file that the guest may change, or else
	host   string // path of a file of ours, or else
	share  string // name of a share
	target string
}

// bindOr binds what the image has a place for, and returns the others as gifts.
func (b *box) bindOr(ctx context.Context, root string, shares []sandbox.Share) (mounts []specs.Mount, gifts []gift, err error) {
	var bound []sandbox.Share
	for _, s := range shares {
		f, mode, err := b.n.openShare(s.Name)
		if err != nil {
			return nil, nil, err
		}
		f.Close()
		ok, err := canBind(ctx, root, s.Target, mode.IsDir())
		if err != nil {
			return nil, nil, err
		}
		if ok {
			bound = append(bound, s)
			continue
		}
		gifts = append(gifts, gift{share: s.Name, target: s.Target})
	}
	mounts, err = b.n.bindShares(b.dir, bound)
	return mounts, gifts, err
}

// giveAll gives a guest what its image had no place for, before anybody else can run a
// command in it.
func (b *box) giveAll(ctx context.Context) error {
	b.mu.Lock()
	gifts := b.gifts
	b.mu.Unlock()
	if len(gifts) == 0 {
		return nil
	}
	if b.n.c.Guest == "" {
		return fmt.Errorf("%w: the image has no %s to give something at, and quarry-guest, which would make one, is not beside quarry-shim", sandbox.ErrUnsupported, gifts[0].target)
	}
	f := b.newFiles()
	for _, g := range gifts {
		var err error
		if g.text != "" {
			mode := uint32(0o644)
			_, werr := f.Write(ctx, g.target, sandbox.WriteOptions{Size: int64(len(g.text)), Mode: &mode, MkDirs: true}, guest.Owner{}, strings.NewReader(g.text))
			if werr != nil && ctx.Err() == nil { // a convenience, and its first process may have ended the sandbox
				b.n.log.InfoContext(ctx, "a sandbox is without a file that it was to be given", "sandbox", b.id, "file", g.target, "err", werr)
			}
		} else if g.host != "" {
			err = f.GiveFirst(ctx, g.host, g.target)
		} else {
			err = b.n.give(ctx, f, sandbox.Share{Name: g.share, Target: g.target})
		}
		if err != nil {
			return fmt.Errorf("give %s: %w", g.target, err)
		}
	}
	return nil
}

// bindShares binds shares, and returns the mounts of the spec.
func (n *Node) bindShares(dir string, shares []sandbox.Share) ([]specs.Mount, error) {
	if len(shares) == 0 {
		return nil, nil
	}
	at := filepath.Join(dir, "shares")
	if err := os.Mkdir(at, 0o700); err != nil {
		return nil, err
	}
	mounts := make([]specs.Mount, 0, len(shares))
	for i, s := range shares {
		to := filepath.Join(at, strconv.Itoa(i))
		if err := n.bindShare(s, to); err != nil {
			return nil, err
		}
		mounts = append(mounts, specs.Mount{Destination: s.Target, Type: "bind", Source: to, Options: []string{"bind", "ro", "nosuid", "nodev"}})
	}
	return mounts, nil
}

// unmountBelow unmounts whatever is mounted below a folder, the last one first. The
// guest keeps what it was given: the gofer has mounts of its own.
func unmountBelow(dir string) error {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	defer f.Close()
	var points []string
	err = attach.Mounts(f, func(m attach.MountEntry) {
		if strings.HasPrefix(m.Point, dir+"/") {
			points = append(points, m.Point)
		}
	})
	if err != nil {
		return err
	}
	var errs []error
	for i := len(points) - 1; i >= 0; i-- {
		if err := unix.Unmount(points[i], unix.MNT_DETACH); err != nil && !errors.Is(err, unix.EINVAL) {
			errs = append(errs, fmt.Errorf("umount %s: %w", points[i], err))
		}
	}
	return errors.Join(errs...)
}
