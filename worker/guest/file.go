package guest

import (
	"context"
	"io"

	"quarry/worker/sandbox"
)

// Stat returns what a path names; a symlink is not followed.
func (f *Files) Stat(ctx context.Context, name string) (sandbox.FileInfo, error) {
	return sandbox.FileInfo{}, sandbox.ErrUnsupported
}

// List returns what lies below a folder, depth levels down, in order of path. The
// folder itself is not among them; a symlink that names it is followed.
func (f *Files) List(ctx context.Context, name string, depth int) ([]sandbox.FileInfo, error) {
	return nil, sandbox.ErrUnsupported
}

// Read calls begin with the file, whose Size is that of the whole, and then writes the
// part that o chooses to w. Symlinks are followed.
func (f *Files) Read(ctx context.Context, name string, o sandbox.ReadOptions, begin func(sandbox.FileInfo) error, w io.Writer) error {
	return sandbox.ErrUnsupported
}

// ReadPaused is Read without a process of the guest, which may be paused. Of what it
// reads it knows neither mode nor owner nor time, and the Size is -1 where it is not
// small: what is not a regular file it knows by what comes, at the latest when
// Limits.Paused is over.
func (f *Files) ReadPaused(ctx context.Context, name string, o sandbox.ReadOptions, begin func(sandbox.FileInfo) error, w io.Writer) error {
	return sandbox.ErrUnsupported
}

// Write makes a file, or replaces one, in one step. Symlinks are followed; other names
// of the file that was there keep what they have.
func (f *Files) Write(ctx context.Context, name string, o sandbox.WriteOptions, owner Owner, r io.Reader) (sandbox.FileInfo, error) {
	return sandbox.FileInfo{}, sandbox.ErrUnsupported
}

// Remove removes a file, or a folder with all that is below it. Symlinks are not followed.
func (f *Files) Remove(ctx context.Context, name string) error {
	return sandbox.ErrUnsupported
}

// TarDown writes a tar of what lies below a folder, or of one file, in bytewise order
// of names. After an error what was written is no whole tar.
func (f *Files) TarDown(ctx context.Context, o sandbox.TarOptions, w io.Writer) error {
	return sandbox.ErrUnsupported
}

// TarUp unpacks a tar below a folder, which is made when it is missing. After an error
// what was unpacked before it is there.
func (f *Files) TarUp(ctx context.Context, name string, r io.Reader) error {
	return sandbox.ErrUnsupported
}

// Give puts a file or folder of the host at an absolute path of the guest, read-only
// for everybody there: a copy of what it is now.
func (f *Files) Give(ctx context.Context, host, target string) error {
	return sandbox.ErrUnsupported
}

// Take removes what Give has put there.
func (f *Files) Take(ctx context.Context, target string) error {
	return sandbox.ErrUnsupported
}
