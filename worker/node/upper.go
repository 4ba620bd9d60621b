package node

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// What every guest is to have below /etc and its image may lack comes with the writable
// layer as that begins, so that no program has to run in the guest for it.

const (
	// resolvConf is where a guest looks for its name server.
	resolvConf = "/etc/resolv.conf"
	// hostsFile is where it looks up localhost and its own name.
	hostsFile = "/etc/hosts"
	// upperFile is what the layer begins with, in a sandbox's folder, and the annotation
	// that tells runsc.
	upperFile       = "upper.tar"
	upperAnnotation = "dev.gvisor.tar.rootfs.upper"
	upperFlag       = "--allow-rootfs-tar-annotation"
)

// place is what an image has at a path.
type place struct {
	err    error // why there is nothing
	st     unix.Stat_t
	xattrs bool // a folder has some, or it is not known
}

func (p place) isA(kind uint32) bool { return p.err == nil && p.st.Mode&unix.S_IFMT == kind }

// bare reports whether nothing is there, or an empty file.
func (p place) bare() bool {
	return errors.Is(p.err, unix.ENOENT) || p.isA(unix.S_IFREG) && p.st.Size == 0
}

// find looks at a path of an image; with links it follows those in it. The image is
// read, and such a read cannot be interrupted, only left behind: it ends with what the
// shim bounds.
func find(ctx context.Context, root, path string, links bool) (place, error) {
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	if !links {
		how.Flags |= unix.O_NOFOLLOW
		how.Resolve |= unix.RESOLVE_NO_SYMLINKS
	}
	found := make(chan place, 1)
	go func() { found <- look(root, path, how) }() // ends with its reads
	select {
	case p := <-found:
		return p, nil
	case <-ctx.Done():
		return place{}, context.Cause(ctx)
	}
}

func look(root, path string, how unix.OpenHow) (p place) {
	at, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return place{err: err}
	}
	defer unix.Close(at)
	fd, err := unix.Openat2(at, path, &how)
	if err != nil {
		return place{err: err}
	}
	f := os.NewFile(uintptr(fd), path)
	defer f.Close()
	if p.err = unix.Fstat(fd, &p.st); p.isA(unix.S_IFDIR) {
		n, err := unix.Listxattr(pathOf(f), nil)
		p.xattrs = n > 0 || err != nil
	}
	return p
}

// canBind reports whether the image has a file, or folder, where one is to be bound.
// runsc makes none in an image, which is read-only, and follows no link there.
func canBind(ctx context.Context, root, target string, folder bool) (bool, error) {
	kind := uint32(unix.S_IFREG)
	if folder {
		kind = unix.S_IFDIR
	}
	p, err := find(ctx, root, target, false)
	return p.isA(kind), err
}

// upperLayer is a tar of files below /etc for the writable layer to begin with, which
// are root's and which the guest may change. A folder in that layer stands for the
// image's own, so it is made as that is; nil where that cannot be said in a tar. The
// top folder's attributes are the Sentry's to keep, and none of its xattrs are.
func upperLayer(root, etc place, files map[string][]byte, at time.Time) ([]byte, error) {
	if len(files) == 0 || !root.isA(unix.S_IFDIR) || !etc.isA(unix.S_IFDIR) || etc.xattrs {
		return nil, nil
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, d := range []struct {
		name string
		st   unix.Stat_t
	}{{"./", root.st}, {"./etc/", etc.st}} {
		h := tar.Header{
			Typeflag: tar.TypeDir, Name: d.name, Mode: int64(d.st.Mode &^ unix.S_IFMT), Uid: int(d.st.Uid), Gid: int(d.st.Gid),
			ModTime: time.Unix(d.st.Mtim.Unix()), Format: tar.FormatPAX,
		}
		if err := w.WriteHeader(&h); err != nil {
			return nil, err
		}
	}
	for _, path := range []string{hostsFile, resolvConf} {
		text, ok := files[path]
		if !ok {
			continue
		}
		h := tar.Header{Typeflag: tar.TypeReg, Name: "." + path, Mode: 0o644, Size: int64(len(text)), ModTime: at, Format: tar.FormatPAX}
		if err := w.WriteHeader(&h); err != nil {
			return nil, err
		}
		if _, err := w.Write(text); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), w.Close()
}

// beginUpper writes what the writable layer begins with into the sandbox's folder, and
// reports false when the image has no place for it.
func (b *box) beginUpper(ctx context.Context, root string, files map[string][]byte) (bool, error) {
	if len(files) == 0 {
		return false, nil
	}
	top, err := find(ctx, root, "/", false)
	if err != nil {
		return false, err
	}
	etc, err := find(ctx, root, "/etc", false)
	if err != nil {
		return false, err
	}
	raw, err := upperLayer(top, etc, files, b.j.Created)
	if err != nil || raw == nil {
		return false, err
	}
	return true, os.WriteFile(filepath.Join(b.dir, upperFile), raw, 0o600)
}

// hosts is the text of a guest's hosts file.
func hosts(name string) string {
	text := "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
	if name != "" {
		text += "127.0.1.1\t" + name + "\n"
	}
	return text
}
