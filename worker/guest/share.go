package guest

import (
	"context"

	"quarry/worker/sandbox"
)

// Give puts a file or folder of the host at an absolute path of the guest, read-only
// for everybody there: a copy of what it is now.
func (f *Files) Give(ctx context.Context, host, target string) error {
	return sandbox.ErrUnsupported
}

// Take removes what Give has put there.
func (f *Files) Take(ctx context.Context, target string) error {
	return sandbox.ErrUnsupported
}
