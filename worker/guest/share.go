package guest

import (
	"context"
	"errors"
	"fmt"
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
// made, as root. docs/decisions/guest-files.md says why it is an image.
func (f *Files) Give(ctx context.Context, host, target string) error {
	if f.c.Mounter == nil {
		return fmt.Errorf("%w: shares for a sandbox that runs", sandbox.ErrUnsupported)
	}
	if err := checkTarget(target); err != nil {
		return err
	}
	st, err := os.Stat(host)
	if err != nil {
		return shared(err)
	}
	image, err := f.image(host)
	if err != nil {
		return err
	}
	defer image.Close()
	q := wire.Request{Op: wire.OpTarget, Path: target}
	want := wire.TypeFile
	if st.IsDir() {
		q.Flags, want = wire.FlagFolder, wire.TypeFolder
	}
	b, err := f.ask(ctx, f.c.Runner.Run, q, wire.KindEntry)
	if err != nil {
		return err
	}
	e, err := decodeEntry(b)
	if err != nil {
		return err
	}
	// The mount follows no links: it goes to where the helper says that the path leads.
	if e.Type != want || checkTarget(e.Path) != nil {
		return broken("another mount point")
	}
	return f.c.Mounter.Mount(ctx, image, e.Path)
}

// checkTarget refuses what no mount can be at: it would hide what the guest runs on.
func checkTarget(p string) error {
	clean := path.Clean(p)
	if !path.IsAbs(p) || len(p) >= wire.MaxPath || strings.Contains(p, "\x00") || !utf8.ValidString(p) {
		return fmt.Errorf("%w: %q: a share's target is an absolute path in UTF-8", sandbox.ErrFilePath, p)
	}
	for _, not := range []string{"/proc", "/sys", "/dev"} {
		if clean == not || strings.HasPrefix(clean, not+"/") {
			return fmt.Errorf("%w: %q is the kernel's", sandbox.ErrFilePath, p)
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
	if f.c.Mounter == nil {
		return fmt.Errorf("%w: shares for a sandbox that runs", sandbox.ErrUnsupported)
	}
	if err := checkTarget(target); err != nil {
		return err
	}
	_, err := f.ask(ctx, f.c.Mounter.RunAdmin, wire.Request{Op: wire.OpUnmount, Path: target}, wire.KindEnd)
	return err
}
