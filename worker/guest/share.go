package guest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strconv"
	"strings"
	"unicode/utf8"

	"quarry/worker/guest/flat"
	"quarry/worker/guest/wire"
	"quarry/worker/sandbox"
)

// Give puts a file or folder of the host at an absolute path of the guest, read-only
// for everybody there: a copy of what it is now, as an EROFS image that has no name
// and goes with the sandbox, or with Take. What the path is made of and is missing is
// made, as root. No symlink of the guest is followed: it could have the share land
// anywhere. docs/decisions/guest-files.md says why it is an image.
func (f *Files) Give(ctx context.Context, host, target string) error {
	if err := f.canGive(target); err != nil {
		return err
	}
	at := path.Clean(target) // without links on the way there is no other meaning of ".."
	kind, err := f.mounted(ctx, at)
	if err != nil {
		return err
	}
	if kind != "" {
		return fmt.Errorf("%w: a share or another mount is at %s: take it away first", sandbox.ErrFileExists, at)
	}
	if _, err := f.mount(ctx, host, at, 0); err != nil {
		return err
	}
	// The Sentry's mount follows what links there are by then: of a guest that runs on,
	// only what is mounted now says where the share is.
	if kind, err = f.mounted(ctx, at); err == nil && kind != erofs {
		err = fmt.Errorf("%w: processes of the sandbox moved folders of %s meanwhile, and the share is elsewhere in it: end what runs there first", sandbox.ErrFilePath, at)
	}
	return err
}

// GiveFirst is Give in a guest in which nothing has run: symlinks are the image's, and
// followed.
func (f *Files) GiveFirst(ctx context.Context, host, target string) error {
	if err := f.canGive(target); err != nil {
		return err
	}
	_, err := f.mount(ctx, host, target, wire.FlagLinks)
	return err
}

func (f *Files) canGive(target string) error {
	if f.c.Mounter == nil {
		return fmt.Errorf("%w: shares for a sandbox that runs", sandbox.ErrUnsupported)
	}
	return checkTarget(target)
}

// mount makes the image and the place for it, and says where that is.
func (f *Files) mount(ctx context.Context, host, target string, flags uint32) (at string, err error) {
	st, err := os.Stat(host)
	if err != nil {
		return "", shared(err)
	}
	image, err := f.image(host)
	if err != nil {
		return "", err
	}
	defer image.Close()
	q := wire.Request{Op: wire.OpTarget, Path: target, Flags: flags}
	want := wire.TypeFile
	if st.IsDir() {
		q.Flags, want = q.Flags|wire.FlagFolder, wire.TypeFolder
	}
	b, err := f.ask(ctx, f.c.Runner.Run, q, wire.KindEntry)
	if err != nil {
		return "", err
	}
	e, err := decodeEntry(b)
	if err != nil {
		return "", err
	}
	if e.Type != want || checkTarget(e.Path) != nil || flags&wire.FlagLinks == 0 && e.Path != target {
		return "", broken("another mount point")
	}
	return e.Path, f.c.Mounter.Mount(ctx, image, e.Path)
}

// elsewhere says where shares are: the guest may have moved the folder of one.
func (f *Files) elsewhere(ctx context.Context) string {
	list, err := f.mounts(ctx)
	if err != nil {
		return ""
	}
	var at []string
	for line := range strings.SplitSeq(list, "\n") {
		head, tail, ok := strings.Cut(line, " - ")
		fields := strings.Split(head, " ")
		if ok && len(fields) > 4 && fields[4] != "/" && strings.HasPrefix(tail, erofs+" ") {
			at = append(at, unescaped.Replace(fields[4]))
		}
	}
	if len(at) == 0 {
		return ""
	}
	return fmt.Sprintf(": there are shares at %q, as the sandbox may have moved a folder", at)
}

// erofs is the type of shares in the guest's list of mounts.
const erofs = "erofs"

// mountsOf is the list of mounts, which the Sentry gives and no process of the guest.
const mountsOf = "/proc/1/mountinfo"

// maxMounts bounds that list.
const maxMounts = 1 << 20

// mounted says what type is mounted at a path, "" for none.
func (f *Files) mounted(ctx context.Context, at string) (string, error) {
	list, err := f.mounts(ctx)
	return mountedIn(list, at), err
}

// mounts is the guest's list of mounts.
func (f *Files) mounts(ctx context.Context) (string, error) {
	k, err := f.cat(mountsOf)
	if err != nil {
		return "", err
	}
	defer k.out.Close()
	list, err := io.ReadAll(&catReader{ctx: ctx, k: k, path: mountsOf, idle: f.c.Limits.Idle, most: maxMounts})
	if err != nil {
		return "", fmt.Errorf("mounts of the guest: %w", err)
	}
	return string(list), nil
}

// mountedIn looks a path up in a text of mountinfo. The last one of a path hides those
// before it.
func mountedIn(list, at string) (kind string) {
	at = escaped.Replace(at)
	for line := range strings.SplitSeq(list, "\n") {
		// 36 35 98:0 /root /point options optional… - type source superoptions
		// Only the four characters that are escaped end a field: a name may have others
		// that are space elsewhere.
		head, tail, ok := strings.Cut(line, " - ")
		fields := strings.Split(head, " ")
		if ok && len(fields) > 4 && fields[4] == at {
			kind, _, _ = strings.Cut(tail, " ")
		}
	}
	return kind
}

// escaped writes a path as mountinfo does.
var escaped = strings.NewReplacer(" ", `\040`, "\t", `\011`, "\n", `\012`, `\`, `\134`)

// unescaped is the way back.
var unescaped = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// checkTarget refuses what no mount can be at: it would hide what the guest runs on.
func checkTarget(p string) error {
	clean := path.Clean(p)
	if !path.IsAbs(p) || len(p) >= wire.MaxPath || strings.Contains(p, "\x00") || !utf8.ValidString(p) {
		return fmt.Errorf("%w: %q: a share's target is an absolute path in UTF-8", sandbox.ErrFilePath, p)
	}
	for _, not := range []string{"/proc", "/sys", "/dev"} {
		if clean == not || strings.HasPrefix(clean, not+"/") {
			return fmt.Errorf("%w: %q is the kernel's: choose a target elsewhere", sandbox.ErrFilePath, p)
		}
	}
	if clean == "/" {
		return fmt.Errorf("%w: a share cannot be at /", sandbox.ErrFilePath)
	}
	return nil
}

// image makes the image of a file or folder, which can be read and nothing else.
func (f *Files) image(host string) (*os.File, error) {
	file, err := nameless(f.c.Spool)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if _, err := flat.Write(file, host, flat.Limits{Files: int(f.c.Limits.Entries), Bytes: f.c.Limits.Bytes}); err != nil {
		return nil, shared(err)
	}
	// The Sentry gets a descriptor that writes nothing.
	r, err := os.Open("/proc/self/fd/" + strconv.Itoa(int(file.Fd())))
	if err != nil {
		return nil, fmt.Errorf("image of a share: %w", err)
	}
	return r, nil
}

// shared says of an error of the host what callers may know.
func shared(err error) error {
	switch {
	case errors.Is(err, flat.ErrTooLarge):
		return fmt.Errorf("%w: %w", sandbox.ErrTooLarge, err)
	case errors.Is(err, flat.ErrType), errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %w", sandbox.ErrShare, err)
	}
	return fmt.Errorf("image of a share: %w", err)
}

// Take removes what Give has put at a target. Who has a file of it open keeps that.
func (f *Files) Take(ctx context.Context, target string) error {
	if err := f.canGive(target); err != nil {
		return err
	}
	at := path.Clean(target)
	switch kind, err := f.mounted(ctx, at); {
	case err != nil:
		return err
	case kind == "":
		return fmt.Errorf("%w: no share is at %s%s", sandbox.ErrFileNotFound, at, f.elsewhere(ctx))
	case kind != erofs:
		return fmt.Errorf("%w: what is mounted at %s came with the sandbox, and goes with it", sandbox.ErrFileType, at)
	}
	if _, err := f.ask(ctx, f.c.Mounter.RunAdmin, wire.Request{Op: wire.OpUnmount, Path: at}, wire.KindEnd); err != nil {
		return err
	}
	kind, err := f.mounted(ctx, at)
	if err == nil && kind == erofs {
		err = broken("the share is still there")
	}
	return err
}
